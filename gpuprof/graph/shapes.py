"""Infers type and shape of every value of a graph with fixed inputs, node by node.

ONNX's own inference runs on each node, with the values computed so far by `gpuprof.graph.nodes`. So a shape computed
by a chain of ops becomes known, and errors on unknown shapes name the node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper
from onnx.shape_inference import InferenceError, infer_node_outputs

from gpuprof.domain.model import Tensor
from gpuprof.domain.sizes import LARGEST_SIZE
from gpuprof.errors import InputError
from gpuprof.graph.element_types import dtype_name, elem_type, runtime_types
from gpuprof.graph.file import MOST_ELEMENTS
from gpuprof.graph.nodes import (
    MOST_VALUES,
    Array,
    constant_tensor,
    known_value,
    label,
    list_captured,
    name_loop,
    used_names,
)

#: Ops with data-dependent output sizes, replaced by the largest possible size.
_AT_MOST = {"NonZero", "Compress", "Unique", "NonMaxSuppression"}
#: Ops without inference in ONNX that keep the shape and type of their first input.
_LIKE_FIRST = {
    "BiasAdd", "BiasDropout", "BiasGelu", "BiasSplitGelu", "BiasSoftmax", "DynamicQuantizeLinear", "FastGelu",
    "Gelu", "GroupNorm", "GroupNormalization", "Inverse", "LayerNormalization", "QuickGelu", "RotaryEmbedding",
    "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
}  # fmt: skip
_SAME_ELEMENTS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"}
#: ONNX's messages on types → fixes: for mixed types, such as a half-precision weight with a float32 input, and for
#: unsupported types, such as booleans in `CumSum`.
_TYPE_FIXES = {
    "inconsistent type|element type of inputs": "export it again with inputs of one type, as the op asks",
    "has unsupported type": "export it again with an input of a type that the op takes; runtimes refuse it, too",
}
_MEASURE = "measure it on the device: gpuprof profile MODEL"
#: Domain of trees, encoders and vectorizers, whose cost does not follow from shapes.
_CLASSICAL = "ai.onnx.ml"
#: Ops never folded: random ops differ in each run, and ONNX Runtime does not fold nodes with subgraphs, nor the
#: dequantisation of 8-bit weights, which would quadruple their size.
_NEVER_FOLDED = {
    "DequantizeLinear", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial",
    "Bernoulli", "If", "Loop", "Scan",
}  # fmt: skip
#: First opset in which Scan has no batch of its own.
_OLDEST_SCAN = 9
#: Limits of folding: a node with a larger output, in bytes and relative to its inputs, is an op, since zeros of a large
#: shape take memory although the file holds a few bytes. Smaller outputs are weights: networks with synthetic weights
#: fill the matrices of large layers this way, with hundreds of megabytes.
_MOST_FOLDED_BYTES, _MOST_FOLDED_GROWTH = 2**31, 8


class UnknownShapeError(InputError):
    """Raised where a node's output shape is unknown before run time, so that the graph allows no estimate."""


@dataclass(frozen=True, slots=True)
class Body:
    """A nested graph of a node."""

    shapes: Shapes
    nodes: tuple[NodeProto, ...]  #: Ops of the nested graph.
    outputs: tuple[Tensor, ...]
    times: int  #: Number of executions.


class Shapes:
    """Types, shapes and known values of a graph's tensors, filled by `add`.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        Inputs and weights.
    constants : iterable of str
        Names of the weights.
    declared : mapping of str to Tensor
        Declared intermediate values, for ops without inference in ONNX.
    opsets : mapping of str to int
        Opset by domain.
    used : set of str
        Values in use; the shapes of other values are not needed.
    model : str
        Name of the model in errors.
    turns : mapping of str to int, optional
        Given iterations of a Loop, by `name_loop`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        constants: Iterable[str],
        declared: Mapping[str, Tensor],
        opsets: Mapping[str, int],
        used: set[str],
        model: str,
        turns: Mapping[str, int] | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self.constants = set(constants)
        self.values: dict[str, Array] = {}
        self._declared = declared
        self._opsets = dict(opsets)
        self._imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        self._used = used
        self._model = model
        self._turns = turns or {}
        self._protos: dict[str, TensorProto] = {}
        self._types: dict[str, TypeProto] = {}
        self._bodies: dict[tuple[str, ...], tuple[Body, ...]] = {}
        #: Known values that are of the first iteration of a loop alone, and decide neither turns nor branches.
        self._of_first_turn: set[str] = set()

    def add_value(self, tensor: TensorProto) -> None:
        """Record the value of a small weight. Raises `InputError` for an invalid array, as in a damaged file."""
        if prod(tensor.dims) <= MOST_VALUES and tensor.data_type != TensorProto.STRING:
            try:
                self.values[tensor.name] = numpy_helper.to_array(tensor)
            except (ValueError, TypeError) as error:
                raise InputError(f"{self._model}: the values of {tensor.name!r} cannot be read: {error}") from None
            self._protos[tensor.name] = tensor

    def add(self, node: NodeProto) -> bool:
        """Infer the outputs of ``node``; return whether the runtime folds the node when loading the model.

        Raises `InputError` naming the node, if the node contradicts its inputs or an output's shape stays unknown.
        """
        if node.op_type == "Constant" and not node.domain:
            self.add_constant(node)
            return True
        for name in (*node.input, *list_captured(node)):
            if name and name not in self.tensors:
                raise InputError(f"{self._model}: node {label(node)} uses {name!r}, which nothing gives")
        if not self._evaluate(node):
            for name, tensor in zip(node.output, self._infer(node), strict=False):
                if name and tensor is not None:
                    self._record_tensor(node, tensor)
        folded = self._is_folded(node)
        if folded:
            self.constants.update(name for name in node.output if name)
        return folded

    def _is_folded(self, node: NodeProto) -> bool:
        inputs = [name for name in node.input if name]
        if node.op_type in _NEVER_FOLDED or not all(name in self.constants for name in inputs):
            return False
        output_bytes, input_bytes = (
            sum(self.tensors[name].bytes for name in names if name in self.tensors) for names in (node.output, inputs)
        )
        return output_bytes <= max(_MOST_FOLDED_BYTES, _MOST_FOLDED_GROWTH * input_bytes)

    def _record_tensor(self, node: NodeProto, tensor: Tensor) -> None:
        if tensor.elements > MOST_ELEMENTS:
            raise InputError(
                f"{self._model}: node {label(node)} gives {list(tensor.shape)}, more than {MOST_ELEMENTS:,} elements",
                "export it with the sizes that are sent, or give those of free dimensions with --dim",
            )
        self.tensors[tensor.name] = tensor

    def _evaluate(self, node: NodeProto) -> bool:
        """Compute the node's value if small and known; return whether it was computed."""
        if len(node.output) != 1 or node.domain not in ("", "ai.onnx"):
            return False
        value: Array | None
        if node.op_type == "Shape":
            attributes = {attribute.name: attribute.i for attribute in node.attribute}
            shape = self.tensors[node.input[0]].shape
            value = np.array(shape[attributes.get("start", 0) : attributes.get("end", len(shape))], np.int64)
        elif node.op_type == "Size":
            value = np.array(self.tensors[node.input[0]].elements, np.int64)
        else:
            value = known_value(node, self.values, self._opsets.get("", 1))
        if value is None:
            return False
        name = node.output[0]
        if node.op_type not in ("Shape", "Size") and self._of_first_turn.intersection(node.input):
            self._of_first_turn.add(name)
        self.values[name] = value
        self.tensors[name] = Tensor(name, dtype_name(helper.np_dtype_to_tensor_dtype(value.dtype)), value.shape)
        return True

    def _infer(self, node: NodeProto) -> list[Tensor | None]:
        if node.op_type == "If" and node.domain == "":
            return self._infer_if(node)
        if node.op_type == "Loop" and node.domain == "" and (outputs := self._infer_loop(node)) is not None:
            return outputs
        if node.op_type == "Scan" and node.domain == "":
            self._walk_scan(node)
        types = self._infer_with_onnx(node)
        result: list[Tensor | None] = []
        for name in node.output:
            result.append(self._resolve_tensor(node, name, types.get(name)) if name else None)
        if node.op_type in _SAME_ELEMENTS and result[0] is not None:
            source = self.tensors[node.input[0]]
            # ONNX's inference does not check a constant target against the data.
            if result[0].elements != source.elements:
                raise InputError(
                    f"{self._model}: node {label(node)} cannot turn {list(source.shape)} into {list(result[0].shape)}",
                    "its target fits another batch: gpuprof zoo rebatch MODEL --batch dynamic -o FILE",
                )
        return result

    def _infer_with_onnx(self, node: NodeProto) -> dict[str, TypeProto]:
        schema = _schema(node.op_type, self._opsets.get(node.domain, 0), node.domain)
        if schema is None or schema.deprecated:
            return self._infer_with_runtime(node)
        names = [name for name in (*node.input, *list_captured(node)) if name]
        values = {name: self._proto(name) for name in node.input if name in self.values}
        if node.op_type == "STFT" and not any(attribute.name == "onesided" for attribute in node.attribute):
            # The operator's default is half of the spectrum, but ONNX's inference assumes the whole.
            node = helper.make_node("STFT", node.input, node.output, onesided=1)
        try:
            return infer_node_outputs(
                schema, node, {name: self._type(name) for name in names}, values, opset_imports=self._imports
            )
        except (InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError) as error:
            message = (
                str(error).split("): ", 1)[-1].replace("[ShapeInferenceError]", "").replace("[TypeInferenceError]", "")
            )
            shapes = ", ".join(str(list(self.tensors[name].shape)) for name in node.input if name)
            raise InputError(
                f"{self._model}: node {label(node)} contradicts its inputs {shapes}: {' '.join(message.split())}",
                next((fix for words, fix in _TYPE_FIXES.items() if re.search(words, message, re.IGNORECASE)), ""),
            ) from error

    def _infer_with_runtime(self, node: NodeProto) -> dict[str, TypeProto]:
        """Return the output types of an op defined only in ONNX Runtime."""
        if all(name in self._declared for name in node.output if name in self._used):
            return {}
        types = {name: self._type(name) for name in node.input if name}
        values = {name: self._proto(name) for name in node.input if name in self.values}
        return runtime_types(node, types, values, self._imports)

    def _infer_if(self, node: NodeProto) -> list[Tensor | None]:
        """Return the outputs of the possible branch with the largest outputs."""
        condition = self._constant_value(node.input[0])
        branches = {attribute.name: attribute.g for attribute in node.attribute}
        if condition is not None:
            branches = {
                k: g for k, g in branches.items() if k == ("then_branch" if condition.item() else "else_branch")
            }
        bodies = [self._walk_body(branch) for branch in branches.values()]
        self._bodies[_key(node)] = tuple(bodies)
        results = [body.outputs for body in bodies]
        largest = max(results, key=lambda tensors: sum(tensor.elements for tensor in tensors), default=())
        return [Tensor(name, tensor.dtype, tensor.shape) for name, tensor in zip(node.output, largest, strict=False)]

    def _infer_loop(self, node: NodeProto) -> list[Tensor | None] | None:
        """Return the outputs of a Loop, with all iterations like the first; None for data-dependent shapes.

        A trip count is only a bound if the condition can end the loop earlier: such a loop has no body to sum.
        """
        states = [self.tensors[name] for name in node.input[2:]]
        graph = next(attribute.g for attribute in node.attribute if attribute.name == "body")
        first = [np.array(0, np.int64), np.array(True), *(self.values.get(name) for name in node.input[2:])]
        inputs = [Tensor("", "int64", ()), Tensor("", "bool", ()), *states]
        if len(graph.input) != len(inputs):
            return None
        turns = self._turns.get(name_loop(node)) or self._count_turns(node, graph)
        try:
            body = self._walk_body(graph, list(zip(inputs, first, strict=True)), 1 if turns is None else turns)
        except InputError:
            return None
        results = body.outputs[1:]
        states_after, gathered = results[: len(states)], results[len(states) :]
        # A state that grows with each iteration (a key cache): the first iteration cannot represent the others.
        if [tensor.shape for tensor in states_after] != [tensor.shape for tensor in states]:
            return None
        if turns is None:
            if gathered:
                return None
        else:
            self._bodies[_key(node)] = (body,)
        shapes = [tensor.shape for tensor in states_after] + [(body.times, *tensor.shape) for tensor in gathered]
        return [
            Tensor(name, tensor.dtype, shape) if name else None
            for name, tensor, shape in zip(node.output, results, shapes, strict=False)
        ]

    def _count_turns(self, node: NodeProto, graph: GraphProto) -> int | None:
        """Return the iterations of a Loop; None where data-dependent, by the trip count or by the condition."""
        trips = self._constant_value(node.input[0])
        start = self._constant_value(node.input[1]) if len(node.input) > 1 and node.input[1] else np.array(True)
        if start is not None and not start:
            return 0
        # Converters write the largest number of 32 or of 64 bits for "no bound".
        if trips is None or trips.item() >= LARGEST_SIZE or start is None or not self._is_always_true(graph):
            return None
        return max(0, int(trips.item()))

    def _constant_value(self, name: str) -> Array | None:
        """Return a known value that is the same in all iterations of a surrounding loop, else None."""
        return None if name in self._of_first_turn else self.values.get(name)

    def _is_always_true(self, graph: GraphProto) -> bool:
        """Return whether a Loop's body returns its input condition, or a constant true."""
        name = graph.output[0].name
        producers = {output: node for node in graph.node for output in node.output}
        while name in producers and producers[name].op_type == "Identity":
            name = producers[name].input[0]
        if name == graph.input[1].name:
            return True
        constants = {tensor.name: tensor for tensor in graph.initializer}
        if name in producers:
            return producers[name].op_type == "Constant" and bool(
                numpy_helper.to_array(constant_tensor(producers[name])).all()
            )
        if name in constants:
            return bool(numpy_helper.to_array(constants[name]).all())
        return name in self.values and bool(self.values[name].all())

    def _walk_scan(self, node: NodeProto) -> None:
        """Record the body of a Scan; those of opset 8, which scan each item of a batch, stay unknown."""
        attributes = {attribute.name: attribute for attribute in node.attribute}
        scanned = attributes["num_scan_inputs"].i
        inputs = [self.tensors[name] for name in node.input if name]
        graph = attributes["body"].g
        axes = list(attributes["scan_input_axes"].ints) if "scan_input_axes" in attributes else [0] * scanned
        if len(inputs) != len(graph.input) or len(axes) != scanned or self._opsets.get("", 1) < _OLDEST_SCAN:
            return
        slices = []
        try:
            for axis, tensor in zip(axes, inputs[-scanned:], strict=True):
                shape = list(tensor.shape)
                turns = shape.pop(axis)
                slices.append(Tensor(tensor.name, tensor.dtype, tuple(shape)))
            body = self._walk_body(graph, [(tensor, None) for tensor in (*inputs[:-scanned], *slices)], turns)
        except (InputError, IndexError):
            return
        self._bodies[_key(node)] = (body,)

    def body_of(self, node: NodeProto) -> tuple[Body, ...]:
        """Return the nested graphs of a node: a single body, or a body for each possible branch."""
        return self._bodies.get(_key(node), ())

    def _walk_body(self, graph: GraphProto, inputs: Sequence[tuple[Tensor, Array | None]] = (), times: int = 1) -> Body:
        tensors = {t.name: Tensor(t.name, dtype_name(t.data_type), tuple(t.dims)) for t in graph.initializer}
        names = [info.name for info in graph.input]
        tensors |= {
            name: Tensor(name, tensor.dtype, tensor.shape) for name, (tensor, _) in zip(names, inputs, strict=True)
        }
        fixed = {tensor.name for tensor in graph.initializer}
        inner = Shapes(
            self.tensors | tensors,
            self.constants | fixed,
            self._declared,
            self._opsets,
            used_names(graph),
            self._model,
            self._turns,
        )
        # Copies: names inside a body are local and must not appear outside.
        inner.values, inner._protos = dict(self.values), dict(self._protos)
        inner._of_first_turn = set(self._of_first_turn)
        for tensor in graph.initializer:
            inner.add_value(tensor)
        for name, (_, value) in zip(names, inputs, strict=True):
            if value is not None:
                inner.values[name] = value
                inner._of_first_turn.add(name)
        nodes = tuple(node for node in graph.node if not inner.add(node))
        return Body(inner, nodes, tuple(inner.tensors[info.name] for info in graph.output), times)

    def add_constant(self, node: NodeProto) -> None:
        """Record a Constant node as a weight."""
        tensor = constant_tensor(node)
        self.tensors[tensor.name] = Tensor(tensor.name, dtype_name(tensor.data_type), tuple(tensor.dims))
        self.constants.add(tensor.name)
        self.add_value(tensor)

    def _resolve_tensor(self, node: NodeProto, name: str, inferred: TypeProto | None) -> Tensor | None:
        """Return the tensor ``name``: from ONNX's inference, else at the largest possible size, else as declared."""
        source = self.tensors[node.input[0]] if node.input and node.input[0] else None
        if inferred is not None and inferred.WhichOneof("value") not in (None, "tensor_type"):
            kind = str(inferred.WhichOneof("value")).removesuffix("_type")
            raise UnknownShapeError(
                f"{self._model}: node {label(node)} gives a {kind}, not a tensor, so that nothing can be "
                "estimated from the graph",
                _MEASURE,
            )
        if inferred is not None and inferred.tensor_type.HasField("shape"):
            dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in inferred.tensor_type.shape.dim]
            if node.op_type in _AT_MOST and None in dims and name not in self._declared:
                dims = [self._max_selected(node) if dim is None else dim for dim in dims]
            # The inferred type is reused for the next node.
            elif None not in dims:
                self._types[name] = inferred
            if all(dim is not None and dim >= 0 for dim in dims):
                return Tensor(name, dtype_name(inferred.tensor_type.elem_type), tuple(dim or 0 for dim in dims))
        if name in self._declared:
            return self._declared[name]
        if node.op_type in _LIKE_FIRST and source is not None and name == node.output[0]:
            return Tensor(name, source.dtype, source.shape)
        if name not in self._used:
            return None
        domain = f" of domain {node.domain}" if node.domain else ""
        raise UnknownShapeError(
            f"{self._model}: the shape of {name!r}, which node {label(node)}{domain} gives, cannot be inferred, so "
            "that nothing can be estimated from the graph",
            _MEASURE
            if node.domain == _CLASSICAL
            else f"{_MEASURE}; or export it with its intermediate shapes (value_info)",
        )

    def _max_selected(self, node: NodeProto) -> int:
        """Return an upper bound of the elements that a selecting op, such as NonMaxSuppression, returns."""
        source = self.tensors[node.input[0]]
        try:
            if node.op_type == "NonMaxSuppression":  # each box of each class and image, or the requested maximum
                batch, classes, boxes = self.tensors[node.input[1]].shape
                limit = self.values.get(node.input[2]) if len(node.input) > 2 else None
                return batch * classes * (boxes if limit is None else min(boxes, int(limit.ravel()[0])))
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)
            return source.elements if axis is None else source.shape[axis]
        except (ValueError, IndexError, KeyError):
            shapes = ", ".join(str(list(self.tensors[name].shape)) for name in node.input if name)
            raise InputError(f"{self._model}: node {label(node)} contradicts its inputs {shapes}") from None

    def _proto(self, name: str) -> TensorProto:
        if name not in self._protos:
            self._protos[name] = numpy_helper.from_array(self.values[name], name)
        return self._protos[name]

    def _type(self, name: str) -> TypeProto:
        if name not in self._types:
            tensor = self.tensors[name]
            self._types[name] = helper.make_tensor_type_proto(elem_type(tensor.dtype), tensor.shape)
        return self._types[name]


def _key(node: NodeProto) -> tuple[str, ...]:
    return tuple(node.output)


@lru_cache(maxsize=1024)
def _schema(op_type: str, opset: int, domain: str) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except (onnx.defs.SchemaError, ValueError):
        return None
