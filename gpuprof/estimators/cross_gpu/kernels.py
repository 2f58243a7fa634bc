"""What a runtime launches for a graph: PyTorch eager a kernel or several a node, others chains of nodes at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.estimators.cross_gpu.op_table import OpTable, table_of

#: Bytes of an element of the activations and of the operands of products, by precision.
_WIDTHS = {
    "float16": (2.0, 2.0),
    "bfloat16": (2.0, 2.0),
    "float8": (2.0, 1.0),
    "int8": (2.0, 1.0),
    "float4": (2.0, 0.5),
}
_PRODUCTS = frozenset({"Gemm", "MatMul", "FusedMatMul", "FusedGemm", "MatMulInteger", "QLinearMatMul", "MatMulNBits"})
_CONVOLUTIONS = frozenset({"Conv", "FusedConv", "ConvInteger", "QLinearConv", "ConvTranspose"})
_NORMS = frozenset({"LayerNormalization", "SkipLayerNormalization", "RMSNormalization", "InstanceNormalization"})
_NORMS |= {"GroupNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}
_SOFTMAXES = frozenset({"Softmax", "LogSoftmax"})
_ATTENTION = frozenset({"Attention", "MultiHeadAttention", "GroupQueryAttention"})
_RECURRENT = {"LSTM": 4.0, "GRU": 3.0, "RNN": 1.0}
#: Shapes change, no kernel runs; a transposition that a product reads is none either (strides of its operands).
_VIEWS = frozenset(
    {
        "Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten", "Shape", "Size", "Dropout", "Constant",
        "ConstantOfShape", "Cast",
    }
)  # fmt: skip
_ELEMENTWISE = frozenset(
    {
        "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sqrt", "Reciprocal", "Exp", "Log", "Erf", "Relu", "Tanh",
        "Sigmoid", "Pow", "Where", "Equal", "Less", "Greater", "Not", "And", "Or", "Clip", "LeakyRelu", "PRelu",
        "Elu", "Selu", "Celu", "HardSigmoid", "HardSwish", "Swish", "Mish", "Softplus", "Softsign", "Gelu",
        "FastGelu", "QuickGelu", "BiasGelu", "BatchNormalization", "Sum", "Max", "Min", "Sin", "Cos", "Floor",
        "Ceil", "Round", "Sign", "LessOrEqual", "GreaterOrEqual", "Mod",
    }
)  # fmt: skip
_DEAR = frozenset({"Pow", "Erf", "Gelu", "Mish", "Softplus"})
#: Ops that a kernel does at most: compilers end a chain there (TorchInductor's ``max_fusion_size``).
_MOST_FUSED = 64
#: Traffic of a convolution of one channel each over that of its tensors: neighbours are read again.
_DEPTHWISE_TRAFFIC = 2.0
#: Elements: whole numbers no more than these are shapes and indices, which are worked out without a kernel.
_SMALL = 64
_INTEGERS = ("int64", "int32", "bool", "uint8")
#: Op type of the kernels that a convolution launches beside its own.
PART_OF_CONVOLUTION = "(part of the convolution)"


class LaunchMode(StrEnum):
    """How nodes become kernels."""

    EAGER = "eager"
    FUSED = "fused"


@dataclass(frozen=True, slots=True)
class KernelList:
    """The kernels of a graph."""

    ops: OpTable  #: N kernels.
    count: tuple[int, ...]  #: How many times each runs: the steps of a recurrent op.
    op_types: tuple[str, ...]  #: Of the node that each is of; `PART_OF_CONVOLUTION` of what follows its first.
    unknown: tuple[str, ...]  #: Op types of which only the traffic is known, sorted.


_Row = tuple[str, dict[str, float]]


def list_kernels(graph: ModelGraph, precision: str, runtime: LaunchMode) -> KernelList:
    """Return what ``runtime`` launches for ``graph`` in ``precision``."""
    walk = _Walk(graph, precision, runtime)
    rows = [(place, row, count) for place in range(len(graph.ops)) for row, count in walk.kernels(place)]
    places = [place for place, _, _ in rows]
    types = tuple(
        PART_OF_CONVOLUTION
        if place == before and graph.ops[place].op_type in _CONVOLUTIONS
        else graph.ops[place].op_type
        for before, place in zip([-1, *places], places, strict=False)
    )
    known = {op.op_type for op in graph.ops if op.flops is not None} | _VIEWS
    return KernelList(
        table_of(row for _, row, _ in rows),
        tuple(count for _, _, count in rows),
        types,
        tuple(sorted({op.op_type for op in graph.ops} - known)),
    )


class _Walk:
    """One pass over a graph: which nodes are launched, and with which traffic."""

    def __init__(self, graph: ModelGraph, precision: str, runtime: LaunchMode) -> None:
        self._ops = graph.ops
        self._readers: dict[str, list[int]] = defaultdict(list)
        for place, op in enumerate(graph.ops):
            for tensor in op.inputs:
                self._readers[tensor.name].append(place)
        self._maker = {tensor.name: place for place, op in enumerate(graph.ops) for tensor in op.outputs}
        self._width, self._operand = _WIDTHS.get(precision, (4.0, 4.0))
        self._narrow = precision in _WIDTHS
        self._absorbed: dict[int, int] = {}
        self._find_biases()
        self._find_gelus()
        self._find_swishes()
        if runtime is LaunchMode.FUSED:
            self._find_chains()
        self._groups: dict[int, list[int]] = defaultdict(list)
        for place in self._absorbed:
            self._groups[self._anchor(place)].append(place)
        self._attention = self._find_attention() if runtime is LaunchMode.FUSED and self._narrow else {}
        self._inside = {place for group in self._attention.values() for place in group}
        for last, group in self._attention.items():
            self._inside |= self._list_strided(group[-2], last)
        self._width_between = self._operand if precision == "int8" else self._width
        self._reorders = precision == "tfloat32"

    def kernels(self, place: int) -> Iterable[tuple[_Row, int]]:
        """Yield the rows of the kernels of a node, and how many times each runs."""
        op = self._ops[place]
        if place in self._attention:
            yield self._attention_row(place), 1
        elif place in self._absorbed or place in self._inside or self._is_free(place):
            return
        elif op.op_type in _RECURRENT:
            yield from self._recurrent(op)
        elif op.op_type in _PRODUCTS:
            yield self._product(place), 1
        elif op.op_type in _CONVOLUTIONS:
            family, _ = convolution = self._convolution(place)
            yield convolution, 1
            if family == "conv" and self._reorders:
                yield from ((self._layout_conversion(one), 1) for one in (op.inputs[0], op.outputs[0]))
        elif op.op_type == "Attention" and len(op.inputs[0].shape) == 3 and len(op.inputs[1].shape) == 2:
            yield self._projection(op), 1
            yield self._projected_attention(op), 1
        elif op.op_type in _ATTENTION and len(op.inputs) > 2 and len(op.inputs[0].shape) in (3, 4):
            yield self._whole_attention(op), 1
        else:
            yield self._rowwise(place), 1

    def _is_free(self, place: int) -> bool:
        op = self._ops[place]
        if not op.outputs or (op.op_type in _VIEWS and op.op_type != "Cast"):
            return True
        small = all(t.elements <= _SMALL and t.dtype in _INTEGERS for t in op.outputs)
        readers = [self._ops[r].op_type for t in op.outputs for r in self._readers[t.name]]
        strided = op.op_type == "Transpose" and bool(readers) and all(kind in _PRODUCTS for kind in readers)
        same = op.op_type == "Cast" and len({t.dtype for t in (*op.inputs, *op.outputs) if "int" not in t.dtype}) < 2
        return small or strided or same or (op.op_type == "Expand" and all(kind in _ELEMENTWISE for kind in readers))

    def _anchor(self, place: int) -> int:
        while place in self._absorbed:
            place = self._absorbed[place]
        return place

    def _only_reader(self, place: int) -> int | None:
        op = self._ops[place]
        readers = {r for t in op.outputs for r in self._readers[t.name]}
        return readers.pop() if len(readers) == 1 and len(op.outputs) == 1 else None

    def _find_biases(self) -> None:
        """Tie the bias of a linear layer, which exporters write as an addition, to its product: one kernel anywhere."""
        for place, op in enumerate(self._ops):
            if op.op_type != "Add" or not any(len(weight.shape) == 1 for weight in op.weights):
                continue
            before = next((self._maker[t.name] for t in op.inputs if t.name in self._maker), None)
            if before is not None and self._ops[before].op_type in _PRODUCTS and self._only_reader(before) == place:
                self._absorbed[place] = before

    def _find_gelus(self) -> None:
        """Tie the ops that exporters make of one GELU, ``x (1 + erf(x / sqrt 2)) / 2``, to their last."""
        for place, op in enumerate(self._ops):
            if op.op_type != "Erf":
                continue
            chain, last = [place], place
            while (reader := self._only_reader(last)) is not None and self._ops[reader].op_type in ("Add", "Mul"):
                chain.append(last := reader)
                if len(chain) == 4:
                    break
            before = self._maker.get(op.inputs[0].name)
            if len(chain) >= 3 and before is not None and self._ops[before].op_type in ("Div", "Mul"):
                self._absorbed.update(dict.fromkeys([before, *chain[:-1]], chain[-1]))
                halves = self._maker.get(self._ops[chain[-1]].inputs[0].name)
                if halves is not None and halves not in self._absorbed and self._is_scaling(halves, chain[-1]):
                    self._absorbed[halves] = chain[-1]

    def _find_swishes(self) -> None:
        """Tie the sigmoid in ``x sigmoid(x)`` to the product: exporters write one activation as two ops."""
        for place, op in enumerate(self._ops):
            reader = self._only_reader(place) if op.op_type in ("Sigmoid", "HardSigmoid") else None
            if reader is None or self._ops[reader].op_type != "Mul":
                continue
            if op.inputs[0].name in {tensor.name for tensor in self._ops[reader].inputs}:
                self._absorbed[place] = reader

    def _is_scaling(self, place: int, reader: int) -> bool:
        return self._ops[place].op_type in ("Mul", "Div") and self._only_reader(place) == reader and place != reader

    def _find_chains(self) -> None:
        """Tie element-wise ops to the op before that they alone read, and to a row-wise op that reads them alone."""
        members = Counter(self._anchor(place) for place in self._absorbed)
        for place, op in enumerate(self._ops):
            if op.op_type not in _ELEMENTWISE or place in self._absorbed:
                continue
            for tensor in op.inputs:
                before = self._maker.get(tensor.name)
                anchor = place if before is None else self._anchor(before)
                full = members[anchor] + members[place] + 2 > _MOST_FUSED
                if before is not None and anchor != place and not full and self._may_join(before, place):
                    self._absorbed[place] = anchor
                    members[anchor] += members[place] + 1
                    break
            else:
                reader = self._only_reader(place)
                if reader is not None and self._ops[reader].op_type in _SOFTMAXES | _NORMS:
                    self._absorbed[place] = reader  # which nothing absorbs: no two ops can be tied to each other

    def _may_join(self, before: int, place: int) -> bool:
        made = self._ops[before].outputs[0]
        same = made.elements == self._ops[place].outputs[0].elements
        kinds = _ELEMENTWISE | _PRODUCTS | _CONVOLUTIONS | _NORMS | {"Transpose"}
        return same and self._only_reader(before) == place and self._ops[before].op_type in kinds

    def _find_attention(self) -> dict[int, list[int]]:
        """Return for the last product of each attention the nodes between it and the first, both included."""
        patterns = {}
        for place, op in enumerate(self._ops):
            if op.op_type not in _SOFTMAXES:
                continue
            after, before, inside = self._only_reader(place), self._maker.get(op.inputs[0].name), [place]
            while after is not None and self._ops[after].op_type in _VIEWS:
                inside.append(after)
                after = self._only_reader(after)
            while before is not None and self._ops[before].op_type in _ELEMENTWISE | _VIEWS:
                inside.append(before)
                before = next((self._maker[t.name] for t in self._ops[before].inputs if t.name in self._maker), None)
            if after is not None and before is not None and self._is_pair(before, after):
                patterns[after] = [*inside, before, after]
        return patterns

    def _is_pair(self, before: int, after: int) -> bool:
        return all(self._ops[p].op_type in _PRODUCTS and len(self._ops[p].inputs[1].shape) > 2 for p in (before, after))

    def _list_strided(self, first: int, last: int) -> set[int]:
        """Return what only moves queries, keys and values to an attention, and its result away: it reads and writes
        in strides. A scaling of the queries is its own, too.
        """
        moved: set[int] = set()
        waiting = [*self._ops[first].inputs[:2], self._ops[last].inputs[1]]
        while waiting:
            place = self._maker.get(waiting.pop().name)
            if place is None or place in moved or not self._is_moving(place):
                continue
            moved.add(place)
            waiting.extend(self._ops[place].inputs[:1])
        inside = self._inside | {first, last}
        while others := {
            place
            for place in moved
            if any(r not in moved and r not in inside for t in self._ops[place].outputs for r in self._readers[t.name])
        }:
            moved -= others
        after = self._only_reader(last)
        while after is not None and self._ops[after].op_type in _VIEWS | {"Transpose"}:
            moved.add(after)
            after = self._only_reader(after)
        return moved

    def _is_moving(self, place: int) -> bool:
        op = self._ops[place]
        scaling = op.op_type in ("Mul", "Div") and op.inputs[0].elements == op.outputs[0].elements
        scaling = scaling and all(t.elements == 1 for t in op.inputs[1:])
        return scaling or op.op_type in _VIEWS | {"Transpose", "Split", "Gather", "Slice"}

    def _attention_row(self, place: int) -> _Row:
        first = self._ops[self._attention[place][-2]]
        queries, size = first.inputs[0].shape[-2:]
        keys, heads = first.outputs[0].shape[-1], prod(first.outputs[0].shape[:-2])
        return _attention_columns(heads, heads, queries, keys, size, self._width, causal=False)

    def _whole_attention(self, op: Op) -> _Row:
        query, key = op.inputs[0].shape, op.inputs[1].shape
        heads = int(op.attributes.get("q_num_heads", op.attributes.get("num_heads", 1)))  # type: ignore[call-overload]
        if len(query) == 4:
            batch, heads, queries, size = query
            key_heads, keys = key[1], key[2]
        else:
            batch, queries, size = query[0], query[1], query[2] // heads
            key_heads, keys = max(1, key[2] // size), key[1]
        causal = bool(op.attributes.get("is_causal", op.attributes.get("unidirectional", 0)))
        return _attention_columns(batch * heads, batch * key_heads, queries, keys, size, self._width, causal=causal)

    def _projection(self, op: Op) -> _Row:
        """Return the product by which ONNX Runtime's own Attention makes queries, keys and values of its input."""
        taken, weight = op.inputs[0], op.inputs[1]
        rows, depth, columns = float(prod(taken.shape[:-1])), float(weight.shape[0]), float(weight.shape[1])
        row = {
            **{"b": 1.0, "m": rows, "n": columns, "k": depth, "width": self._operand},
            "flops": 2.0 * rows * columns * depth,
            "read_bytes": self._operand * (rows * depth + depth * columns),
            "written_bytes": self._width * rows * columns,
            "elements": rows * columns,
            "extra": 0.0,
        }
        return "matmul", row

    def _projected_attention(self, op: Op) -> _Row:
        """Return the attention of ONNX Runtime's own Attention, of a sequence to itself."""
        batch, queries, _ = op.inputs[0].shape
        heads = int(op.attributes.get("num_heads", 1))  # type: ignore[call-overload]
        size = max(1, op.outputs[0].shape[-1] // heads)
        causal = bool(op.attributes.get("unidirectional", 0))
        every = batch * heads
        return _attention_columns(every, every, queries, queries, size, self._width, causal=causal)

    def _product(self, place: int) -> _Row:
        op = self._ops[place]
        left, right, out = op.inputs[0], op.inputs[1], op.outputs[0]
        depth = left.shape[0] if op.attributes.get("transA") and len(left.shape) > 1 else left.shape[-1]
        shared = right in op.weights or len(right.shape) < 3
        columns = float(out.shape[-1]) if out.shape else 1.0
        copies = 1.0 if shared else float(prod(out.shape[:-2]))
        rows = out.elements / columns / copies
        packed = 0.5 if op.op_type == "MatMulNBits" else self._operand
        read = self._operand * copies * rows * depth + packed * copies * depth * columns
        row = {
            **{"b": copies, "m": rows, "n": columns, "k": float(depth), "width": self._operand},
            "flops": 2.0 * copies * rows * columns * depth,
            "read_bytes": read + self._extra_bytes(place),
            "written_bytes": self._width * out.elements,
            "elements": float(out.elements),
            "extra": 0.0 if shared or self._narrow else 1.0,
        }
        return "matmul", row

    def _convolution(self, place: int) -> _Row:
        op = self._ops[place]
        image, weight, out = (
            op.inputs[0],
            next((w for w in op.weights if len(w.shape) > 2), op.inputs[1]),
            op.outputs[0],
        )
        groups = int(op.attributes.get("group", 1) or 1)  # type: ignore[call-overload]
        taps, outs = float(prod(weight.shape[1:])), float(out.shape[1])
        pixels = out.elements / outs
        made = self._width_between * out.elements
        moved = self._width_between * image.elements + made + self._operand * weight.elements + self._extra_bytes(place)
        if groups > 1 and weight.shape[1] == 1:
            row = {**self._measure_output(out), "read_bytes": _DEPTHWISE_TRAFFIC * moved - made, "written_bytes": made}
            return "movement", {**row, "flops": 2.0 * out.elements * taps}
        if op.op_type == "ConvTranspose":
            pixels, outs, taps = image.elements / image.shape[1], taps, float(image.shape[1])
        stride = max(int(s) for s in op.attributes.get("strides", (1,)) or (1,))  # type: ignore[attr-defined]
        row = {
            **{"b": float(groups), "m": pixels, "n": max(1.0, outs / groups), "k": taps},
            "flops": 2.0 * pixels * outs * taps,
            "read_bytes": moved - made,
            "written_bytes": made,
            "elements": float(out.elements),
            "width": self._width,  # products of 8 bits that were measured make their operands first; these are there
            "kernel": float(weight.shape[-1]),
            "stride": float(stride),
            "image": float(out.shape[-1]),
        }
        return "conv", row

    def _layout_conversion(self, tensor: Tensor) -> _Row:
        """Return the kernel that puts the channels last before a convolution in TF32, or first again behind it.

        In half precision cuDNN takes either order, and compilers keep the channels last.
        """
        return "movement", {"read_bytes": self._width * tensor.elements, **self._measure_output(tensor)}

    def _recurrent(self, op: Op) -> Iterable[tuple[_Row, int]]:
        """Yield the product for the inputs of all steps, and a step."""
        steps, batch, size = (*op.inputs[0].shape, 1, 1, 1)[:3]
        hidden = float(op.attributes.get("hidden_size", op.outputs[0].shape[-1]))  # type: ignore[arg-type]
        both = 2.0 if op.attributes.get("direction") == "bidirectional" else 1.0
        gates = _RECURRENT[op.op_type] * hidden * both
        yield self._plain_product(float(steps * batch), gates, float(size)), 1
        yield self._plain_product(float(batch), gates, hidden), steps

    def _plain_product(self, rows: float, columns: float, depth: float) -> _Row:
        read = self._operand * (rows * depth + depth * columns)
        sizes = {"m": rows, "n": columns, "k": depth, "width": self._operand, "elements": rows * columns}
        moved = {"read_bytes": read, "written_bytes": self._width * rows * columns}
        return "matmul", {**sizes, **moved, "flops": 2.0 * rows * columns * depth}

    def _rowwise(self, place: int) -> _Row:
        op = self._ops[place]
        group = {place, *self._groups[place]}
        inputs = {t.name: t for p in group for t in self._ops[p].inputs if self._maker.get(t.name) not in group}
        final = self._ops[max([place, *self._groups[place]])].outputs[0]
        read = sum(map(self._bytes, inputs.values()))
        if op.op_type in ("Gather", "Slice", "GatherElements", "GatherND", "Compress", "Split"):
            read = min(read, sum(map(self._bytes, op.outputs)) + 8.0 * _SMALL)
        row = {"read_bytes": read, **self._measure_output(final), "flops": float(op.flops or 0)}
        row["written_bytes"] = sum(map(self._bytes, op.outputs)) if len(op.outputs) > 1 else row["written_bytes"]
        row["extra"] = float(any(self._ops[p].op_type in _DEAR for p in group) and op.op_type == "Pow")
        if op.op_type in _SOFTMAXES | _NORMS:
            shape = op.inputs[0].shape
            axis = op.attributes.get("axis", -1)
            row["row"] = float(shape[int(axis)] if shape and isinstance(axis, int) else 1)
            return ("softmax" if op.op_type in _SOFTMAXES else "norm"), row
        return ("elementwise" if op.op_type in _ELEMENTWISE else "movement"), row

    def _extra_bytes(self, place: int) -> float:
        """Return what the ops fused into a product read besides what it gives."""
        group = {place, *self._groups[place]}
        inputs = {
            t.name: t for p in group - {place} for t in self._ops[p].inputs if self._maker.get(t.name) not in group
        }
        return sum(map(self._bytes, inputs.values()))

    def _measure_output(self, tensor: Tensor) -> dict[str, float]:
        return {"written_bytes": self._bytes(tensor), "elements": float(tensor.elements), "width": self._width}

    def _bytes(self, tensor: Tensor) -> float:
        return self._width * tensor.elements if "float" in tensor.dtype else float(tensor.bytes)


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
