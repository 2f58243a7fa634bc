"""Lists the kernels of a graph by precision and runtime, at every batch, and the host's time to launch them.

PyTorch eager launches some kernels per node, others fuse chains of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import pairwise
from math import hypot, inf, prod

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.errors import InputError
from gpuprof.estimators.constants import constant
from gpuprof.estimators.cross_gpu.features import BYTES, OpTable, resolve_precision, table_of
from gpuprof.estimators.cross_gpu.node_groups import (
    ATTENTION,
    CONVOLUTIONS,
    ELEMENTWISE,
    NORMS,
    PRODUCTS,
    RECURRENT,
    SOFTMAXES,
    VIEWS,
    NodeGroups,
)

_DEAR = frozenset({"Pow", "Erf", "Gelu", "Mish", "Softplus"})
#: Element-wise ops with vectorised kernels, exempt from the slow-down in half precision, which image networks lack.
_STREAMED = frozenset({"Relu", "Clip", "Add", "Sum", "BatchNormalization"})
#: Op types without a kernel in PyTorch, whose tensors have strides.
_PYTORCH_VIEWS = frozenset({"Slice", "Split", "Expand"})
#: Op types that compilers join with the kernels that read their indices or masks.
_INDEXED = ELEMENTWISE - {"QuantizeLinear"} | _PYTORCH_VIEWS | {"Range", "Gather", "GatherElements", "Concat"}
#: Maximum elements of integer tensors taken as shapes and indices, which the host computes without a kernel.
_SMALL = 64
#: Columns that hold totals over all iterations of a body.
_OF_ALL_TURNS = ("flops", "read_bytes", "written_bytes", "elements")
_INTEGERS = ("int64", "int32", "bool", "uint8")
#: Op types of the additional kernels that a convolution launches.
LAYOUT_OF_CONVOLUTION, BIAS_OF_CONVOLUTION = "(layout of the convolution)", "(bias of the convolution)"
#: Family of a convolution's further kernel → its op type.
_FURTHER = {"movement": LAYOUT_OF_CONVOLUTION, "elementwise": BIAS_OF_CONVOLUTION}


class LaunchMode(StrEnum):
    """Runtimes, by how nodes become kernels; ``:fused-attention``: the optimizer fuses attention into one kernel.

    Without fused attention, and where the file has no attention op, products and softmax are kernels of their own, as
    in ONNX Runtime's optimizer and TensorRT 8.0. Attention in full precision is never fused.
    """

    #: ONNX Runtime's CUDA provider, used by `gpuprof serve`: a kernel per node, biases of convolutions and of most
    #: products in kernels of their own; residuals fused with their normalisation; inputs and outputs copied.
    ONNXRUNTIME = "onnxruntime"
    ONNXRUNTIME_FUSED = "onnxruntime:fused-attention"
    TENSORRT = "tensorrt"  #: Chains of element-wise ops fused.
    TENSORRT_FUSED = "tensorrt:fused-attention"
    EAGER = "pytorch-eager"  #: PyTorch, op by op.
    EAGER_FUSED = "pytorch-eager:fused-attention"
    SCRIPT = "pytorch-script"  #: TorchScript: the same kernels, launched without Python.
    FUSED = "pytorch-compiled"  #: TorchInductor, with fused attention.

    @classmethod
    def _missing_(cls, value: object) -> LaunchMode | None:
        return {"eager": cls.EAGER, "fused": cls.FUSED}.get(str(value))  # names in earlier versions

    @property
    def is_onnxruntime(self) -> bool:
        """Whether ONNX Runtime launches, with copies of inputs and outputs."""
        return self.startswith("onnxruntime")

    @property
    def is_eager(self) -> bool:
        """Whether PyTorch launches each op by itself."""
        return self.startswith(("pytorch-eager", "pytorch-script"))

    @property
    def joins_chains(self) -> bool:
        """Whether chains of element-wise ops are fused into a single kernel."""
        return not (self.is_onnxruntime or self.is_eager)

    @property
    def fuses_attention(self) -> bool:
        """Whether attention in half precision or below is fused, however the file writes it."""
        return self is LaunchMode.FUSED or self.endswith(":fused-attention")


@dataclass(frozen=True, slots=True)
class KernelList:
    """The kernels of a graph."""

    ops: OpTable  #: N kernels.
    #: Runs of each kernel: the steps of a recurrent op, the nodes that all iterations of a Loop run.
    count: tuple[int, ...]
    op_types: tuple[str, ...]  #: Type of each kernel's node; for a convolution's further kernels as `_FURTHER`.
    unknown: tuple[str, ...]  #: Op types with unknown FLOPs, only their traffic counted, sorted.
    #: ``input_bytes``, ``output_bytes``: Bytes of a batch copied from the host, and back to it.
    input_bytes: float = 0.0
    output_bytes: float = 0.0


_Row = tuple[str, dict[str, float]]


def list_kernels(graph: ModelGraph, precision: str, runtime: LaunchMode) -> KernelList:
    """Return the kernels launched by ``runtime`` for ``graph`` in ``precision``."""
    walk = _Walk(graph, precision, runtime)
    rows = [(place, row, count) for place in range(len(graph.ops)) for row, count in walk.kernels(place)]
    places = [place for place, _, _ in rows]
    types = tuple(
        _FURTHER.get(family, op_type) if place == before and op_type in CONVOLUTIONS else op_type
        for before, (place, (family, _), _) in zip([-1, *places], rows, strict=False)
        for op_type in (graph.ops[place].op_type,)
    )
    modelled = {op.op_type for op in graph.ops if op.flops is not None} | VIEWS
    return KernelList(
        table_of(row for _, row, _ in rows),
        tuple(count for _, _, count in rows),
        types,
        tuple(sorted({op.op_type for op in graph.ops} - modelled)),
        float(sum(tensor.bytes for tensor in graph.inputs)),
        float(sum(tensor.bytes for tensor in graph.outputs)),
    )


class _Walk:
    """A pass over a graph that lists the launched nodes with their traffic."""

    def __init__(self, graph: ModelGraph, precision: str, runtime: LaunchMode) -> None:
        self._ops = graph.ops
        # Bytes of an operand of products, and of an activation, which has at least 16 bits.
        self._operand = BYTES.get(precision, 4.0)
        self._width = max(self._operand, BYTES["float16"])
        self._by_pytorch, self._by_tensorrt = runtime.startswith("pytorch"), runtime.startswith("tensorrt")
        if precision == "int8" and self._by_tensorrt:  # so do normalisations, activations and attention
            self._width = self._operand
        self._narrow = self._width < 4.0
        self._by_onnxruntime, self._fused = runtime.is_onnxruntime, runtime.joins_chains
        self._groups = NodeGroups(
            graph.ops,
            fused=self._fused,
            narrow=self._narrow,
            by_onnxruntime=self._by_onnxruntime,
            attention=runtime.fuses_attention,
        )
        # The measured products in 8 bits quantise their operands first; in a file quantising is an op of its own.
        self._width_of_products = max(self._operand, 2.0)
        self._width_between = self._operand if precision == "int8" else self._width
        self._of_shapes = _list_of_shapes(graph.ops)
        self._reorders = precision == "tfloat32" and not self._fused

    def kernels(self, place: int) -> Iterable[tuple[_Row, int]]:
        """Yield the rows of a node's kernels, and the number of runs of each."""
        op = self._ops[place]
        if any(tensor.elements == 0 for tensor in (*op.inputs[:1], *op.outputs[:1])):
            return  # nothing to work on, some dimension being 0
        if place in self._groups.attention:
            yield self._attention_row(place), 1
        elif self._groups.is_inside(place) or self._is_free(place):
            return
        elif op.op_type in RECURRENT:
            yield from self._recurrent(op)
        elif op.op_type in PRODUCTS:
            yield self._product(place), 1
        elif op.op_type in CONVOLUTIONS:
            family, _ = convolution = self._convolution(place)
            yield convolution, 1
            if family == "conv" and self._reorders and not (self._by_onnxruntime and _is_pointwise(op)):
                yield from ((self._layout_conversion(tensor), 1) for tensor in (op.inputs[0], op.outputs[0]))
            if self._by_onnxruntime and self._groups.has_bias(place):
                yield ("elementwise", self._bias_row(op.outputs[0])), 1
        elif op.op_type == "Attention" and len(op.inputs[0].shape) == 3 and len(op.inputs[1].shape) == 2:
            # ONNX Runtime's own Attention projects its input to queries, keys and values.
            source, weight = op.inputs[:2]
            yield self._plain_product(float(prod(source.shape[:-1])), float(weight.shape[1]), float(weight.shape[0])), 1
            yield self._whole_attention(op, op.outputs[0].shape, op.outputs[0].shape), 1
        elif op.op_type in ATTENTION and len(op.inputs) > 2 and len(op.inputs[0].shape) in (3, 4):
            yield self._whole_attention(op, op.inputs[0].shape, op.inputs[1].shape), 1
        else:
            family, row = self._rowwise(place)
            if op.launches > 1:  # ops and iterations of a body run sequentially
                row["read_bytes"], row["written_bytes"] = float(op.bytes_read), float(op.bytes_written)
                row |= {name: row[name] / op.launches for name in _OF_ALL_TURNS}
            yield (family, row), op.launches

    def _is_free(self, place: int) -> bool:
        op = self._ops[place]
        if not op.outputs or (op.op_type in VIEWS and op.op_type != "Cast"):
            return True
        if self._fused and op.op_type == "DequantizeLinear" and len(op.weights) == len(op.inputs):
            return True  # weights in 8 bits, read directly by products
        small = all(t.elements <= _SMALL for t in (*op.inputs, *op.outputs)) and all(
            t.dtype in _INTEGERS or t.name in self._of_shapes for t in op.outputs
        )
        readers = [self._ops[r].op_type for t in op.outputs for r in self._groups.readers[t.name]]
        if self._by_pytorch and op.op_type in _PYTORCH_VIEWS:
            return True
        if self._fused and readers and op.op_type in _INDEXED and all(t.dtype in _INTEGERS for t in op.outputs):
            return True
        strided = op.op_type == "Transpose" and bool(readers) and all(kind in PRODUCTS for kind in readers)
        # Products read only an exchange of the last two dimensions; other orders, as heads before tokens, are copied.
        strided = strided and (not self._narrow or _exchanges_last(op))
        same = op.op_type == "Cast" and len({t.dtype for t in (*op.inputs, *op.outputs) if "int" not in t.dtype}) < 2
        return small or strided or same or (op.op_type == "Expand" and all(kind in ELEMENTWISE for kind in readers))

    def _attention_row(self, place: int) -> _Row:
        first = self._ops[self._groups.attention[place][-2]]
        queries, size = first.inputs[0].shape[-2:]
        keys, heads = first.outputs[0].shape[-1], prod(first.outputs[0].shape[:-2])
        family, row = _attention_columns(heads, heads, queries, keys, size, self._width, causal=False)
        is_whole = self._by_tensorrt and queries <= constant("kernels", "head_queries")
        return family, {**row, "row": float(queries) if is_whole else 1.0}

    def _whole_attention(self, op: Op, query: tuple[int, ...], key: tuple[int, ...]) -> _Row:
        heads = int(op.attributes.get("q_num_heads", op.attributes.get("num_heads", 1)))  # type: ignore[call-overload]
        if len(query) == 4:
            batch, heads, queries, size = query
            key_heads, keys = key[1], key[2]
        else:
            batch, queries, size = query[0], query[1], max(1, query[2] // heads)
            key_heads, keys = max(1, key[2] // size), key[1]
        causal = bool(op.attributes.get("is_causal", op.attributes.get("unidirectional", 0)))
        return _attention_columns(batch * heads, batch * key_heads, queries, keys, size, self._width, causal=causal)

    def _product(self, place: int) -> _Row:
        op = self._ops[place]
        left, right, out = op.inputs[0], op.inputs[1], op.outputs[0]
        depth = left.shape[0] if op.attributes.get("transA") and len(left.shape) > 1 else left.shape[-1]
        shared = right in op.weights or len(right.shape) < 3
        columns = float(out.shape[-1]) if out.shape else 1.0
        copies = 1.0 if shared else float(prod(out.shape[:-2]))
        rows = out.elements / columns / copies
        joint = [self._ops[member] for member in self._groups.members[place] if self._ops[member].op_type in PRODUCTS]
        columns += sum(float(product.outputs[0].shape[-1]) for product in joint)
        packed = 0.5 if op.op_type == "MatMulNBits" else self._operand
        read_bytes = self._operand * copies * rows * depth + packed * copies * depth * columns
        row = {
            **{"b": copies, "m": rows, "n": columns, "k": float(depth), "width": self._width_of_products},
            "flops": 2.0 * copies * rows * columns * depth,
            "read_bytes": read_bytes + self._extra_bytes(place),
            "written_bytes": self._width * copies * rows * columns,
            "elements": copies * rows * columns,
            "extra": 0.0 if shared or self._narrow else 1.0,
        }
        return "matmul", row

    def _convolution(self, place: int) -> _Row:
        op = self._ops[place]
        image, weight, out = op.inputs[0], _find_filter(op), op.outputs[0]
        groups = int(op.attributes.get("group", 1) or 1)  # type: ignore[call-overload]
        taps, outs = float(prod(weight.shape[1:])), float(out.shape[1])
        pixels = out.elements / outs
        store = self._width_between * out.elements
        bytes_moved = (
            self._width_between * image.elements + store + self._operand * weight.elements + self._extra_bytes(place)
        )
        if groups > 1 and weight.shape[1] == 1:
            row = {
                **self._measure_output(out),
                "read_bytes": constant("kernels", "depthwise_traffic") * bytes_moved - store,
                "written_bytes": store,
            }
            return "movement", {**row, "flops": 2.0 * out.elements * taps}
        if op.op_type == "ConvTranspose":
            pixels, outs, taps = image.elements / image.shape[1], taps, float(image.shape[1])
        stride = max(int(s) for s in op.attributes.get("strides", (1,)) or (1,))  # type: ignore[attr-defined]
        row = {
            **{"b": float(groups), "m": pixels, "n": max(1.0, outs / groups), "k": taps},
            "flops": 2.0 * pixels * outs * taps,
            "read_bytes": bytes_moved - store,
            "written_bytes": store,
            "elements": float(out.elements),
            "width": self._width_of_products,
            "kernel": float(weight.shape[-1]),
            "stride": float(stride),
            "image": float(out.shape[-1]),
        }
        return "conv", row

    def _layout_conversion(self, tensor: Tensor) -> _Row:
        """Return the kernel that puts the channels last before a convolution in TF32, or first again behind it.

        In half precision cuDNN takes either order, and compilers keep the channels last: with these kernels, ResNet-50
        by TensorRT in TF32 was predicted up to twice as long.
        """
        return "movement", {"read_bytes": self._width * tensor.elements, **self._measure_output(tensor)}

    def _bias_row(self, tensor: Tensor) -> dict[str, float]:
        """Return cuDNN's kernel by which ONNX Runtime adds the bias of a convolution, in place."""
        slow = {"flops": constant("kernels", "slow_flops") * tensor.elements}
        return {"read_bytes": self._bytes(tensor), **self._measure_output(tensor), **slow}

    def _recurrent(self, op: Op) -> Iterable[tuple[_Row, int]]:
        """Yield the product for the inputs of all time steps, and the product of a single step."""
        steps, batch, size = (*op.inputs[0].shape, 1, 1, 1)[:3]
        hidden = float(op.attributes.get("hidden_size", op.outputs[0].shape[-1]))  # type: ignore[arg-type]
        both = 2.0 if op.attributes.get("direction") == "bidirectional" else 1.0
        gates = RECURRENT[op.op_type] * hidden * both
        yield self._plain_product(float(steps * batch), gates, float(size)), 1
        yield self._plain_product(float(batch), gates, hidden), steps

    def _plain_product(self, rows: float, columns: float, depth: float) -> _Row:
        read_bytes = self._operand * (rows * depth + depth * columns)
        sizes = {"m": rows, "n": columns, "k": depth, "width": self._width_of_products, "elements": rows * columns}
        traffic = {"read_bytes": read_bytes, "written_bytes": self._width * rows * columns}
        return "matmul", {**sizes, **traffic, "flops": 2.0 * rows * columns * depth}

    def _rowwise(self, place: int) -> _Row:
        op = self._ops[place]
        group = {place, *self._groups.members[place]}
        inputs = {t.name: t for p in group for t in self._ops[p].inputs if self._groups.maker.get(t.name) not in group}
        final = self._ops[max([place, *self._groups.members[place]])].outputs[0]
        read_bytes = sum(map(self._bytes, inputs.values()))
        if op.op_type in ("Gather", "Slice", "GatherElements", "GatherND", "Compress", "Split"):
            read_bytes = min(read_bytes, sum(map(self._bytes, op.outputs)) + 8.0 * _SMALL)
        row = {"read_bytes": read_bytes, **self._measure_output(final), "flops": float(op.flops or 0)}
        row["written_bytes"] = sum(map(self._bytes, op.outputs)) if len(op.outputs) > 1 else row["written_bytes"]
        row["extra"] = float(any(self._ops[p].op_type in _DEAR for p in group) and op.op_type == "Pow")
        if self._narrow and op.op_type not in _STREAMED:
            row["flops"] = max(row["flops"], constant("kernels", "half_flops") * self._width / 2.0 * final.elements)
        broadcasts = op.op_type in ELEMENTWISE and any(_is_broadcast(self._ops[p]) for p in group)
        if self._by_onnxruntime and (op.op_type == "Clip" or (self._narrow and broadcasts)):
            row["flops"] = constant("kernels", "slow_flops") * final.elements
        if op.op_type in SOFTMAXES | NORMS:
            row["row"] = _count_row(op)
            return ("softmax" if op.op_type in SOFTMAXES else "norm"), row
        if place in self._groups.norm_rows:
            row["row"] = float(self._groups.norm_rows[place])
            return "norm", row
        return ("elementwise" if op.op_type in ELEMENTWISE else "movement"), row

    def _extra_bytes(self, place: int) -> float:
        """Return the bytes read by the ops fused into a product, except the product's own result."""
        group = {place, *self._groups.members[place]}
        inputs = {
            t.name: t
            for p in group - {place}
            for t in self._ops[p].inputs
            if self._groups.maker.get(t.name) not in group and not self._is_operand(place, p, t)
        }
        return sum(map(self._bytes, inputs.values()))

    def _is_operand(self, place: int, candidate: int, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is an operand of the product ``place``, or of ``candidate``, joined with it."""
        joint = self._ops[candidate].op_type in PRODUCTS and tensor in self._ops[candidate].inputs[:2]
        return joint or tensor in self._ops[place].inputs[:1]

    def _measure_output(self, tensor: Tensor) -> dict[str, float]:
        return {"written_bytes": self._bytes(tensor), "elements": float(tensor.elements), "width": self._width}

    def _bytes(self, tensor: Tensor) -> float:
        return self._width * tensor.elements if "float" in tensor.dtype else float(tensor.bytes)


def _is_broadcast(op: Op) -> bool:
    """Return whether an operand of an element-wise op is repeated: a mask, a bias; not a single number."""
    sizes = {tensor.elements for tensor in op.inputs} - {1}
    return op.op_type in ("Add", "Sub", "Mul", "Div", "Where") and len(sizes) > 1


def _exchanges_last(op: Op) -> bool:
    """Return whether a transposition only swaps the last two dimensions."""
    order = op.attributes.get("perm")
    rank = len(op.outputs[0].shape)
    return isinstance(order, list | tuple) and list(order) == [*range(rank - 2), rank - 1, rank - 2]


def _find_filter(op: Op) -> Tensor:
    return next((tensor for tensor in op.weights if len(tensor.shape) > 2), op.inputs[1])


def _is_pointwise(op: Op) -> bool:
    """Return whether a convolution is a matrix product, in either order of channels."""
    strides = op.attributes.get("strides", (1,)) or (1,)
    return prod(_find_filter(op).shape[2:]) == 1 and all(int(stride) == 1 for stride in strides)  # type: ignore[attr-defined]


def _list_of_shapes(ops: Sequence[Op]) -> frozenset[str]:
    """Return the tensors computed from shapes alone; the host computes the small ones."""
    shape_tensors: set[str] = set()
    for op in ops:
        inputs = {tensor.name for tensor in op.inputs} - {tensor.name for tensor in op.weights}
        if op.op_type in ("Shape", "Size") or (inputs and inputs <= shape_tensors):
            shape_tensors.update(tensor.name for tensor in op.outputs)
    return frozenset(shape_tensors)


def _count_row(op: Op) -> float:
    """Return the number of elements that a softmax or a normalisation processes together."""
    shape, axis = op.inputs[0].shape, op.attributes.get("axis", -1)
    if op.op_type == "InstanceNormalization":
        return float(prod(shape[2:]))
    if op.op_type == "GroupNormalization":
        return float(prod(shape[1:]) / int(op.attributes.get("num_groups", 1)))  # type: ignore[call-overload]
    if not shape or not isinstance(axis, int):
        return 1.0
    return float(shape[axis] if op.op_type in SOFTMAXES else prod(shape[axis:]))


def _attention_columns(
    heads: float, key_heads: float, queries: float, keys: float, size: float, width: float, *, causal: bool
) -> _Row:
    pairs = queries * (queries + 1) / 2 if causal and queries == keys else queries * keys
    columns: Mapping[str, float] = {
        **{"b": float(heads), "m": float(queries), "n": max(1.0, pairs / queries), "k": float(size), "width": 2.0},
        "flops": 4.0 * heads * size * pairs,
        "read_bytes": width * size * (heads * queries + 2.0 * key_heads * keys),
        "written_bytes": width * heads * queries * size,
        "elements": float(heads * queries * size),
        "extra": key_heads / heads,
        "causal": float(causal),
    }
    return "attention", dict(columns)


#: Batches whose graphs decide whether kernels are linear in the batch.
_READ = tuple(1 << power for power in range(3))
#: Largest batch up to which every batch is predicted. Among larger batches, at most two per doubling are predicted; the
#: others are interpolated linearly.
_DENSE = _READ[-1]
_DOUBLINGS = tuple(1 << power for power in range(2, 20))
_LINEAR_COLUMNS = tuple(field.name for field in fields(OpTable) if field.name != "family")


class KernelsByBatch:
    """The kernels of a model at any batch; if all are linear in the batch, from its graphs at two batch sizes."""

    def __init__(
        self, graph_at: Callable[[int], ModelGraph], precision: str, runtime: LaunchMode, host_us: float | None = None
    ) -> None:
        self._graph_at = graph_at
        self.precision = precision  #: Type of the products' arithmetic.
        self.runtime = runtime  #: How nodes become kernels.
        self.host_us = host_us  #: Time of a launch on the host; None: the runtime's usual time.
        self._known: dict[int, KernelList] = {}
        self._linear: bool | None = None
        self._distinct: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._host_s: dict[int, float] = {}
        self._grids: dict[int, tuple[int, ...]] = {}

    def list_grid(self, most: int) -> tuple[int, ...]:
        """Return the predicted batches up to ``most``."""
        if most not in self._grids:
            points = {*range(1, _DENSE + 1), *(step for low in _DOUBLINGS for step in self._list_steps(low))}
            taken = (point for point in sorted(points) if point <= most)
            self._grids[most] = tuple(point for point in taken if self.is_linear() or self._is_taken(point))
        return self._grids[most]

    def _is_taken(self, batch: int) -> bool:
        """Return whether the model accepts a batch: a fixed batch excludes all others."""
        try:
            self.at(batch)
        except InputError:
            return False
        return True

    def find_distinct(self, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of the distinct kernels at ``batch``, and the index of each kernel among them."""
        like = 0 if self._linear else batch  # linear kernels that agree at two batches agree at all
        if like not in self._distinct:
            tables = [self.at(1).ops, self.at(2).ops] if like == 0 else [self.at(batch).ops]
            self._distinct[like] = find_distinct_rows(tables)
        return self._distinct[like]

    def grid(self, batch: int) -> tuple[int, ...]:
        """Return ``batch``, or the two batches between which its time is interpolated.

        All batches up to four are predicted, then two per doubling. If kernels are not linear in the batch, so that
        each batch needs a separate graph, one per doubling is predicted, unless the model refuses it.
        """
        steps = self._list_steps(1 << ((batch - 1).bit_length() - 1)) if batch > _DENSE else (batch,)
        if batch in steps:
            return (batch,)
        ends = next(pair for pair in pairwise(steps) if batch < pair[1])
        return ends if self.is_linear() or all(map(self._is_taken, ends)) else (batch,)

    def _list_steps(self, low: int) -> tuple[int, ...]:
        """Return the batch sizes from a power of two to the next at which times are predicted."""
        return (low, low + low // 2, 2 * low) if self.is_linear() else (low, 2 * low)

    def host_seconds(self, batch: int) -> float:
        """Return `host_seconds` of the kernels at ``batch``."""
        like = 0 if self._linear else batch  # every batch has the same number of kernels
        if like not in self._host_s:
            self._host_s[like] = host_seconds(self.at(batch), self.runtime, self.host_us)
        return self._host_s[like]

    def at(self, batch: int) -> KernelList:
        """Return the kernels at ``batch``."""
        if batch not in self._known:
            if batch not in _READ and self.is_linear():
                self._known[batch] = self._between(batch)
            else:
                self._known[batch] = list_kernels(self._graph_at(batch), self.precision, self.runtime)
        return self._known[batch]

    def is_linear(self) -> bool:
        """Return whether all kernels are linear in the batch."""
        if self._linear is None:
            try:
                at1, at2, at4 = map(self.at, _READ)
            except InputError:
                self._linear = False
                return False
            # By extrapolation from batches 1 and 2, batch 4 is at 3 · at2 - 2 · at1.
            same = at1.op_types == at2.op_types == at4.op_types and at1.count == at2.count == at4.count
            self._linear = same and all(
                np.allclose(getattr(at4.ops, name), 3 * getattr(at2.ops, name) - 2 * getattr(at1.ops, name), rtol=1e-9)
                for name in _LINEAR_COLUMNS
            )
        return self._linear

    def _between(self, batch: int) -> KernelList:
        at1, at2 = self.at(1), self.at(2)
        columns = {
            name: getattr(at1.ops, name) + (batch - 1) * (getattr(at2.ops, name) - getattr(at1.ops, name))
            for name in _LINEAR_COLUMNS
        }
        traffic = {
            name: getattr(at1, name) + (batch - 1) * (getattr(at2, name) - getattr(at1, name))
            for name in ("input_bytes", "output_bytes")
        }
        return replace(at1, ops=OpTable(family=at1.ops.family, **columns), **traffic)


def find_distinct_rows(tables: Sequence[OpTable]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first row of each group of rows that are equal in all tables, and the group of every row."""
    keys = np.column_stack([getattr(table, field.name) for table in tables for field in fields(OpTable)])
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    # NumPy 2.0 returns the inverse of unique along an axis in another shape than other versions.
    return first, inverse.reshape(-1)


def host_seconds(kernels: KernelList, runtime: LaunchMode, host_us: float | None = None) -> float:
    """Return the host's seconds to launch all kernels; ``host_us``: of a launch, by default the usual time."""
    usual_us = constant("host.launch_us", runtime.partition(":")[0])
    # PyTorch and TensorRT launch the conversion of a layout with its convolution.
    free = None if runtime.is_onnxruntime else LAYOUT_OF_CONVOLUTION
    launches = sum(count for count, name in zip(kernels.count, kernels.op_types, strict=True) if name != free)
    return 1e-6 * launches * (usual_us if host_us is None else host_us)


def copy_seconds(kernels: KernelList, runtime: LaunchMode) -> float:
    """Return the time of copying a batch's inputs to the device and its outputs back; 0 if both stay on the device."""
    if not runtime.is_onnxruntime or not kernels.count:
        return 0.0
    to_device, to_host = (constant("host.copy_bytes_per_s", name) for name in ("to_device", "to_host"))
    return kernels.input_bytes / to_device + kernels.output_bytes / to_host


def batch_seconds(kernels_s: float, host_s: float, kernels: KernelList, runtime: LaunchMode) -> float:
    """Return the time of a batch from the times of its kernels and of the host.

    The host runs ahead of long kernels, and short kernels wait for the host, so the longer time determines the batch's.
    ONNX Runtime's batches begin and end with synchronous copies; where both times are nearly equal, neither is hidden.
    So the root of the sum of squares is used: for 18 batches of four networks on an H200, with measured kernel times,
    its median error was 7.7%, that of the longer time 9.9% (``python -m bench.gpu.launches``).
    """
    if not runtime.is_onnxruntime:
        return max(kernels_s, host_s)
    return hypot(kernels_s, host_s) + copy_seconds(kernels, runtime)


#: A precision in user options → the catalogue's name of the rate.
PRECISIONS: Mapping[str, str] = {
    "float32": "float32",
    "tf32": "tfloat32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "float8",
    "int8": "int8",
}


@dataclass(frozen=True, slots=True)
class Execution:
    """Precision and runtime of a model's execution."""

    #: A key of `PRECISIONS`; None: the precision of the model's types in ONNX Runtime's CUDA provider, TF32 included.
    precision: str | None = None
    runtime: LaunchMode = LaunchMode.ONNXRUNTIME
    host_us: float | None = None  #: Time of a launch on the host; None: the runtime's usual time.

    def rate_name(self, device: Device, own_type: str) -> str:
        """Return the name of the rate of a model's products on ``device``; ``own_type``: type of its weights."""
        if self.precision is None:
            precision = "tfloat32" if own_type == "float32" else own_type
            return resolve_precision(device, precision)
        return PRECISIONS[self.precision]

    def is_possible(self, device: Device) -> bool:
        """Return whether a GPU has the arithmetic; always true for CPUs, whose estimates ignore the precision."""
        return self.precision is None or device.kind != "gpu" or PRECISIONS[self.precision] in device.flops_per_s

    @staticmethod
    def possible_precisions(device: Device) -> list[str]:
        """Return the precisions of a GPU that users can choose."""
        return [precision for precision, name in PRECISIONS.items() if name in device.flops_per_s]


def type_of_weights(graph: ModelGraph) -> str:
    """Return the type of most of the weights' bytes; quantised models multiply in int8."""
    sizes: dict[str, int] = {}
    for tensor in (*graph.weights, *graph.inputs):
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
    for dtype in sorted(sizes, key=lambda name: -sizes[name]):
        if dtype in ("float64", "float32", "float16", "bfloat16", "int8"):
            return dtype
        if dtype.startswith("float8"):
            return "float8"
    return "float32"


def parse_execution(precision: str | None, runtime: str | None, host_us: float | None = None) -> Execution:
    """Return the execution for a precision, a runtime and the host's time of a launch.

    Raises `InputError` when the precision or runtime is unknown, or the time is not above 0.
    """
    if host_us is not None and not 0.0 < host_us < inf:
        raise InputError(f"the host's time of a launch must be above 0 but got {host_us:g} us")
    if precision is not None and precision not in PRECISIONS:
        raise InputError(f"unknown precision {precision!r}", f"choose one of {', '.join(PRECISIONS)}")
    try:
        mode = LaunchMode(runtime or LaunchMode.ONNXRUNTIME)
    except ValueError:
        raise InputError(f"unknown runtime {runtime!r}", f"choose one of {', '.join(LaunchMode)}") from None
    return Execution(precision, mode, host_us)
