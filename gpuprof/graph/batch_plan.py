"""Plans the changes that free a model's fixed batch dimension, or finds the node that prevents them.

The graph is walked at two batches at once: the file's batch and a large multiple. Where a constant holds the old batch
(the target of a Reshape, the bounds of a Slice, the sizes of a Resize, a state or token joined to the data), the shapes
at the two batches stop agreeing, and the constant is replaced by a value computed from the data. A node without such a
replacement is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, TensorShapeProto, helper, numpy_helper

from gpuprof.domain.model import Tensor
from gpuprof.errors import InputError
from gpuprof.graph.dims import batch_axes, bind_inputs, declared_dims, fixed_batch
from gpuprof.graph.file import OnnxFile
from gpuprof.graph.nodes import label, used_names
from gpuprof.graph.shapes import Shapes

#: Ratio of the second batch to the first: a prime that is unlikely to be a factor of any layer's size.
_RATIO = 1009
#: End of ONNX's Slice for "up to the end" at any size (operator specification).
_END = np.iinfo(np.int64).max
#: Positions of the initial states among the inputs of recurrent layers.
_STATES = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
#: Ops with outputs independent of the batch: sizes, and the scale of 8-bit quantisation.
_SUMMARIES = {"Shape", "Size", "DynamicQuantizeLinear"}


class NoBatchError(InputError):
    """Raised where no input of a model has a batch dimension."""


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """Position of the batch in a tensor."""

    axis: int
    #: Repetitions of the whole batch along the axis: 5 for an axis of 5 sequence steps times the batch.
    outer: int

    def before(self, shape: Sequence[int]) -> int:
        """Return the product of the tensor's dimensions before the batch dimension."""
        return prod(shape[: self.axis]) * self.outer


@dataclass(frozen=True, slots=True)
class BatchRewrite:
    """Changes that free the batch of a model."""

    batch: int  #: Fixed batch of the file; 1 where the batch is free already.
    nodes: dict[str, tuple[NodeProto, ...]]  #: Replacements of nodes, by the node's first output.
    initializers: tuple[TensorProto, ...]  #: New constants.
    places: dict[str, BatchAxis]  #: Position of the batch in each batched input and output.


def plan_rewrite(file: OnnxFile) -> BatchRewrite:
    """Return the changes that free the batch of a model, without applying them.

    Raises `InputError` naming the node that mixes samples, loses the batch, or uses the batch in an unsupported way.
    """
    walk = _BatchWalk.of(file)
    for node in file.model.graph.node:
        walk.take(node)
    outputs = [info.name for info in file.model.graph.output]
    if not any(name in walk.places for name in outputs):
        raise InputError(f"{file.path.name}: no output follows the batch, so it cannot be changed")
    places = {name: walk.places[name] for name in (*walk.inputs, *outputs) if name in walk.places}
    return BatchRewrite(walk.batch, walk.nodes, tuple(walk.initializers), places)


def apply_rewrite(model: ModelProto, rewrite: BatchRewrite, batch: int | None = None) -> None:
    """Change ``model`` in place to a free batch, or to ``batch``.

    Declared shapes of intermediate values hold the old batch and are dropped.
    """
    graph = model.graph
    nodes = [new for node in graph.node for new in rewrite.nodes.get(node.output[0] if node.output else "", (node,))]
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    graph.initializer.extend(rewrite.initializers)
    if model.ir_version < 4:  # weights must be declared as inputs
        for tensor in rewrite.initializers:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    del graph.value_info[:]
    for info in (*graph.input, *graph.output):
        place, dims = rewrite.places.get(info.name), info.type.tensor_type.shape.dim
        if place is not None and place.axis < len(dims):
            _set_batch(dims[place.axis], rewrite.batch, batch)


def _set_batch(dim: TensorShapeProto.Dimension, old: int, new: int | None) -> None:
    times = max(1, dim.dim_value // old)  # above 1 where the batch is folded into another dimension
    if new is not None:
        dim.dim_value = times * new
    elif times > 1:
        dim.dim_param = f"{times}*batch"
    else:
        dim.dim_param = dim.dim_param or "batch"


@dataclass
class _BatchWalk:
    """Walk over the graph at two batches."""

    name: str
    opset: int
    batch: int
    one: Shapes
    many: Shapes
    inputs: tuple[str, ...]
    places: dict[str, BatchAxis]
    nodes: dict[str, tuple[NodeProto, ...]] = field(default_factory=dict)
    initializers: list[TensorProto] = field(default_factory=list)

    @classmethod
    def of(cls, file: OnnxFile) -> _BatchWalk:
        """Return a walk over ``file``, positioned before the first node."""
        graph, name = file.model.graph, file.path.name
        infos = file.inputs
        declared = {info.name: declared_dims(info) or () for info in infos}
        free = batch_axes(declared)
        batch = fixed_batch(infos) or 1
        axes = free or {name: 0 for name, dims in declared.items() if dims and dims[0] == batch}
        if not axes:
            raise NoBatchError(
                f"{name}: no input has a batch dimension, so that none can be freed", "take it at batch 1"
            )
        tensors, _ = bind_inputs(infos, batch, {}, name)
        many = {
            tensor.name: Tensor(tensor.name, tensor.dtype, _scale_shape(tensor.shape, axes.get(tensor.name)))
            for tensor in tensors.values()
        }

        def shapes(inputs: dict[str, Tensor]) -> Shapes:
            result = Shapes(inputs | file.weights, file.weights, {}, file.opsets, used_names(graph), name)
            for tensor in graph.initializer:
                result.add_value(tensor)
            return result

        places = {name: BatchAxis(axis, 1) for name, axis in axes.items()}
        return cls(name, file.opsets.get("", 1), batch, shapes(tensors), shapes(many), tuple(tensors), places)

    def take(self, node: NodeProto) -> None:
        """Add a node, rewritten if necessary, to the walks at both batches."""
        # The unchanged node at the old batch, the changed node at the new: both must agree except in the batch.
        self.one.add(node)
        changed = self._change_node(node)
        try:
            for new in changed:
                self.many.add(new)
        except InputError as error:
            raise self._refusal_error(node, f"at another batch it {_reason(error)}") from error
        self._locate_batch(node)
        if len(changed) > 1 or changed[0] is not node:
            self.nodes[node.output[0]] = tuple(changed)

    def _refusal_error(self, node: NodeProto, why: str) -> InputError:
        return InputError(
            f"{self.name}: the batch cannot be changed, node {label(node)} stands in the way: {why}",
            "export the model with a dynamic batch",
        )

    def _locate_batch(self, node: NodeProto) -> None:
        """Record the position of the batch in the node's outputs, or refuse the node."""
        batched = [name for name in node.input if name in self.places]
        for name in node.output:
            if name not in self.one.tensors:  # absent or unused
                continue
            old, new = self.one.tensors[name].shape, self.many.tensors[name].shape
            axes = [axis for axis, (a, b) in enumerate(zip(old, new, strict=False)) if a != b]
            if len(old) != len(new) or len(axes) > 1 or any(new[axis] != old[axis] * _RATIO for axis in axes):
                raise self._refusal_error(node, f"it mixes samples: {list(old)} becomes {list(new)}")
            if axes:
                self.places[name] = self._record_batch_axis(node, batched, axes[0], old)
            elif batched and node.op_type not in _SUMMARIES:
                raise self._refusal_error(node, f"it gives {list(old)} whatever the batch")

    def _record_batch_axis(self, node: NodeProto, batched: list[str], axis: int, shape: tuple[int, ...]) -> BatchAxis:
        if batched and node.op_type == "Reshape":
            before = self.places[batched[0]].before(self.one.tensors[batched[0]].shape)
            return BatchAxis(axis, max(1, before // max(1, prod(shape[:axis]))))
        outers = [
            self.places[name].outer
            for name in batched
            if self.one.tensors[name].shape[self.places[name].axis] == shape[axis]
        ]
        return BatchAxis(axis, outers[0] if outers else 1)

    def _change_node(self, node: NodeProto) -> list[NodeProto]:
        rule = {
            "Reshape": self._rewrite_reshape,
            "Expand": self._rewrite_expand,
            "Slice": self._rewrite_slice,
            "Resize": self._rewrite_resize,
            "Concat": self._rewrite_concat,
        }.get(node.op_type, self._rewrite_recurrent if node.op_type in _STATES else None)
        changed = rule(node) if rule and node.domain == "" else None
        return [node] if changed is None else changed

    def _rewrite_reshape(self, node: NodeProto) -> list[NodeProto] | None:
        """Let the batch axis of the target follow the size of the data, by -1 or 0."""
        place = self.places.get(node.input[0])
        target = self._constant_list(node, 1, "shape")
        if place is None or target is None or self._depends_on_batch(node, 1):
            return None
        source, result = self.one.tensors[node.input[0]].shape, self.one.tensors[node.output[0]].shape
        axis = _axis_at(place.before(source), result)
        scaled = _scale_shape(result, axis)
        if _resolve_reshape(self.many.tensors[node.input[0]].shape, target) == scaled or 0 in result:
            return None
        copies = axis < len(source) and self.many.tensors[node.input[0]].shape[axis] == scaled[axis]
        # At most one dimension of a target may be -1. If another already is, 0 ("copy the input's size") also works
        # where the batch keeps its axis.
        if -1 in target and copies:
            target[axis] = 0
        else:
            target = [size if old == -1 else old for old, size in zip(target, result, strict=True)]
            target[axis] = -1
        return [self._with_list(node, 1, "shape", target)]

    def _rewrite_expand(self, node: NodeProto) -> list[NodeProto] | None:
        place, target = self.places.get(node.input[0]), self._constant_list(node, 1, "")
        if place is None or target is None or self._depends_on_batch(node, 1):
            return None
        rank = len(self.one.tensors[node.input[0]].shape)
        axis = place.axis + len(target) - rank
        if axis < 0 or target[axis] == 1:
            return None
        target[axis] = 1  # 1 keeps the size of the data
        return [self._with_list(node, 1, "", target)]

    def _rewrite_slice(self, node: NodeProto) -> list[NodeProto] | None:
        """Replace "up to the old batch" by "up to the end"."""
        place = self.places.get(node.input[0])
        starts, ends = self._constant_list(node, 1, "starts"), self._constant_list(node, 2, "ends")
        if place is None or starts is None or ends is None:
            return None
        axes = self._constant_list(node, 3, "axes") or list(range(len(starts)))
        shape = self.one.tensors[node.input[0]].shape
        whole = [
            i for i, axis in enumerate(axes) if axis % len(shape) == place.axis and starts[i] == 0
            and shape[place.axis] <= ends[i] < _END
        ]  # fmt: skip
        for i in whole:
            ends[i] = _END
        return [self._with_list(node, 2, "ends", ends)] if whole else None

    def _rewrite_resize(self, node: NodeProto) -> list[NodeProto] | None:
        place, sizes = self.places.get(node.input[0]), self._constant_list(node, 3, "")
        if place is None or not sizes or len(sizes) < len(self.one.tensors[node.input[0]].shape):
            return None
        if self._depends_on_batch(node, 3):
            return None
        nodes, name = self._shape_like(node, sizes[: place.axis], node.input[0], place.axis, sizes[place.axis + 1 :])
        changed = _copy(node)
        changed.input[3] = name
        return [*nodes, changed]

    def _rewrite_concat(self, node: NodeProto) -> list[NodeProto] | None:
        """Repeat values joined to each sample, such as a class token."""
        batched = [name for name in node.input if name in self.places]
        alone = [name for name in node.input if name not in self.places]
        if not batched or not alone:
            return None
        axis = self.places[batched[0]].axis
        # Joined along the batch, the value would be another sample, not a part of each sample.
        if self.batch != 1 or axis == _attribute(node, "axis", 0) % len(self.one.tensors[batched[0]].shape):
            return None
        return self._repeat_inputs(node, alone, batched[0], axis, axis)

    def _rewrite_recurrent(self, node: NodeProto) -> list[NodeProto] | None:
        """Repeat the initial states for each sample."""
        place = self.places.get(node.input[0])
        states = [node.input[i] for i in _STATES[node.op_type] if len(node.input) > i and node.input[i]]
        alone = [name for name in states if name not in self.places]
        if place is None or not alone or self.batch != 1:
            return None
        # States are [directions, batch, hidden], or with layout=1 (opset 14) [batch, directions, hidden].
        axis = 0 if _attribute(node, "layout", 0) else 1
        return self._repeat_inputs(node, alone, node.input[0], place.axis, axis)

    def _repeat_inputs(
        self, node: NodeProto, names: Iterable[str], source: str, source_axis: int, axis: int
    ) -> list[NodeProto]:
        changed, nodes = _copy(node), []
        for name in dict.fromkeys(names):
            rank = len(self.one.tensors[name].shape)
            helpers, shape = self._shape_like(node, [1] * axis, source, source_axis, [1] * (rank - axis - 1), name)
            repeated = self._new_name(name, "repeated")
            nodes += [*helpers, helper.make_node("Expand", [name, shape], [repeated], name=repeated)]
            for i, name_used in enumerate(changed.input):
                if name_used == name:
                    changed.input[i] = repeated
        return [*nodes, changed]

    def _shape_like(
        self, node: NodeProto, before: list[int], source: str, axis: int, after: list[int], suffix: str = ""
    ) -> tuple[list[NodeProto], str]:
        """Return nodes for ``[*before, source.shape[axis], *after]``, and the name of the result."""
        stem = f"{node.output[0]}{'_' if suffix else ''}{suffix}"
        shape, size, result = (self._new_name(stem, part) for part in ("shape", "batch", "target"))
        nodes = [
            helper.make_node("Shape", [source], [shape], name=shape),
            helper.make_node("Gather", [shape, self._add_constant([axis], stem)], [size], name=size),
        ]
        parts = [self._add_constant(part, f"{stem}_{i}") if part else "" for i, part in enumerate((before, after))]
        joined = [name for name in (parts[0], size, parts[1]) if name]
        nodes.append(helper.make_node("Concat", joined, [result], name=result, axis=0))
        return nodes, result

    def _constant_list(self, node: NodeProto, position: int, attribute: str) -> list[int] | None:
        """Return a constant list, given as an input or, in old opsets, as an attribute."""
        if len(node.input) > position and node.input[position]:
            value = self.one.values.get(node.input[position])
            return None if value is None else [int(item) for item in np.atleast_1d(value)]
        return next((list(a.ints) for a in node.attribute if a.name == attribute), None)

    def _depends_on_batch(self, node: NodeProto, position: int) -> bool:
        """Return whether an input is already computed from the batch."""
        if len(node.input) <= position:
            return False
        name = node.input[position]
        new = self.many.values.get(name)
        return new is None or not np.array_equal(self.one.values[name], new)

    def _with_list(self, node: NodeProto, position: int, attribute: str, values: list[int]) -> NodeProto:
        changed = _copy(node)
        if len(node.input) > position and node.input[position]:
            changed.input[position] = self._add_constant(values, node.output[0])
        else:
            for item in changed.attribute:
                if item.name == attribute:
                    item.ints[:] = values
        return changed

    def _add_constant(self, values: list[int], stem: str) -> str:
        name = self._new_name(stem, f"constant_{len(self.initializers)}")
        tensor = numpy_helper.from_array(np.array(values, np.int64), name)
        self.initializers.append(tensor)
        self.many.tensors[name] = Tensor(name, "int64", (len(values),))
        self.many.constants.add(name)
        self.many.add_value(tensor)
        return name

    def _new_name(self, stem: str, suffix: str) -> str:
        name = f"{stem}_{suffix}"
        # Names of values must be unique in a graph.
        while name in self.one.tensors or name in self.many.tensors:
            name += "_"
        return name


def _scale_shape(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    return tuple(size * _RATIO if i == axis else size for i, size in enumerate(shape))


def _axis_at(before: int, shape: Sequence[int]) -> int:
    """Return the axis before which the dimensions multiply to ``before``, or the axis that contains that position."""
    reached = 1
    for axis, size in enumerate(shape):
        if reached == before or reached * size > before:
            return axis
        reached *= size
    return max(0, len(shape) - 1)


def _resolve_reshape(shape: tuple[int, ...], target: list[int]) -> tuple[int, ...] | None:
    sizes = [shape[i] if dim == 0 and i < len(shape) else dim for i, dim in enumerate(target)]
    product = prod(size for size in sizes if size != -1)
    if -1 in sizes and product:
        sizes[sizes.index(-1)] = prod(shape) // product
    return tuple(sizes) if prod(sizes) == prod(shape) else None


def _copy(node: NodeProto) -> NodeProto:
    copy: NodeProto = NodeProto.FromString(node.SerializeToString())
    return copy


def _attribute(node: NodeProto, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def _reason(error: InputError) -> str:
    return error.message.split(") ", 1)[-1]
