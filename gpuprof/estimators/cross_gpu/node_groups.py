"""Groups nodes of a graph into kernels: biases, some activations, attention, and in fusing runtimes whole chains."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuprof.domain.model import Op

_SCALING, _SQUARING = ("Div", "Mul"), ("Pow", "Mul")


@dataclass(frozen=True, slots=True)
class NormPattern:
    """The nodes of a normalisation, by their places in the graph."""

    first: int  #: The mean at its beginning.
    others: tuple[int, ...]
    row: int  #: Elements normalised together.


class NormSearch:
    """Finds normalisations in a graph.

    ``readers``: tensor → ops that read it; ``maker``: tensor → op that makes it.
    """

    def __init__(self, ops: Sequence[Op], readers: Mapping[str, list[int]], maker: Mapping[str, int]) -> None:
        self._ops, self._readers, self._maker = ops, readers, maker

    def find_layer_norms(self) -> Iterator[NormPattern]:
        """Yield ``(x - mean) / sqrt(mean((x - mean)²) + epsilon)``, scaled and shifted or not, below opset 17."""
        for first, op in enumerate(self._ops):
            if op.op_type != "ReduceMean":
                continue
            centred = self._read_by(first, "Sub")
            if centred is None or op.inputs[0] not in self._ops[centred].inputs:
                continue
            for square in self._list_readers(centred, _SQUARING):
                mean = self._read_by(square, "ReduceMean")
                scaled = None if mean is None else self._follow_root(mean)
                if mean is not None and scaled is not None and self._makes_input(centred, scaled[-1]):
                    yield self._pattern(first, [centred, square, mean, *scaled])

    def find_rms_norms(self) -> Iterator[NormPattern]:
        """Yield ``x / sqrt(mean(x²) + epsilon)``, scaled or not: several kernels eagerly, a single kernel if fused."""
        for square, op in enumerate(self._ops):
            mean = self._read_by(square, "ReduceMean") if op.op_type in _SQUARING else None
            scaled = None if mean is None else self._follow_root(mean)
            if mean is not None and scaled is not None and op.inputs[0] in self._ops[scaled[-1]].inputs:
                yield self._pattern(mean, [square, *scaled])

    def _follow_root(self, mean: int) -> list[int] | None:
        """Return the nodes from adding epsilon to a mean, through its root, to the scaling; None without these."""
        nodes, place = [], mean
        for kind in ("Add", "Sqrt"):
            reader = self._read_by(place, kind)
            if reader is None:
                return None
            nodes.append(place := reader)
        inverse = self._read_by(place, "Reciprocal")
        if inverse is None and (over := self._read_by(place, "Div")) is not None:
            inverse = over if self._ops[over].outputs[0].elements == self._ops[place].outputs[0].elements else None
        if inverse is not None:
            nodes.append(place := inverse)
        scaled = next(iter(self._list_readers(place, _SCALING)), None)
        return None if scaled is None else [*nodes, scaled]

    def _pattern(self, first: int, places: list[int]) -> NormPattern:
        last = places[-1]
        for kind in ("Mul", "Add"):  # the learned scale and shift
            reader = self._read_by(last, kind)
            if reader is not None and self._ops[reader].weights:
                places.append(last := reader)
        whole, means = self._ops[first].inputs[0].elements, self._ops[first].outputs[0].elements
        return NormPattern(first, tuple(places), max(1, whole // max(1, means)))

    def _list_readers(self, place: int, kinds: Sequence[str]) -> list[int]:
        readers = (reader for tensor in self._ops[place].outputs for reader in self._readers[tensor.name])
        return [reader for reader in readers if self._ops[reader].op_type in kinds]

    def _read_by(self, place: int, kind: str) -> int | None:
        """Return the first op of type ``kind`` that reads an output of the node ``place``."""
        return next(iter(self._list_readers(place, (kind,))), None)

    def _makes_input(self, place: int, reader: int) -> bool:
        return any(self._maker.get(tensor.name) == place for tensor in self._ops[reader].inputs)


PRODUCTS = frozenset({"Gemm", "MatMul", "FusedMatMul", "FusedGemm", "MatMulInteger", "QLinearMatMul", "MatMulNBits"})
PRODUCTS |= {"QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "GemmFastGelu"}
CONVOLUTIONS = frozenset({"Conv", "FusedConv", "ConvInteger", "QLinearConv", "ConvTranspose"})
NORMS = frozenset({"LayerNormalization", "SkipLayerNormalization", "RMSNormalization", "InstanceNormalization"})
NORMS |= {"GroupNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}
SOFTMAXES = frozenset({"Softmax", "LogSoftmax"})
ATTENTION = frozenset({"Attention", "MultiHeadAttention", "GroupQueryAttention"})
RECURRENT = {"LSTM": 4.0, "GRU": 3.0, "RNN": 1.0, "DynamicQuantizeLSTM": 4.0}
#: Ops that change shapes without a kernel; a transposition read by a product needs none either (strides of its
#: operands).
VIEWS = frozenset(
    {
        "Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten", "Shape", "Size", "Dropout", "Constant",
        "ConstantOfShape", "Cast",
    }
)  # fmt: skip
ELEMENTWISE = frozenset(
    {
        "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sqrt", "Reciprocal", "Exp", "Log", "Erf", "Relu", "Tanh",
        "Sigmoid", "Pow", "Where", "Equal", "Less", "Greater", "Not", "And", "Or", "Clip", "LeakyRelu", "PRelu",
        "Elu", "Selu", "Celu", "HardSigmoid", "HardSwish", "Swish", "Mish", "Softplus", "Softsign", "Gelu",
        "FastGelu", "QuickGelu", "BiasGelu", "BatchNormalization", "Sum", "Max", "Min", "Sin", "Cos", "Floor",
        "Ceil", "Round", "Sign", "LessOrEqual", "GreaterOrEqual", "Mod", "QuantizeLinear", "DequantizeLinear",
    }
)  # fmt: skip

#: Products that ONNX Runtime gives a scale.
_SCALED = frozenset({"MatMul", "FusedMatMul"})


class NodeGroups:
    """The nodes of a graph, their readers, and the nodes that share a kernel.

    ``ops``: in the order of the graph, identified by their places in it; ``fused``: whether the runtime joins chains of
    element-wise ops; ``narrow``: whether products are in half precision or below, a condition of fused attention;
    ``by_onnxruntime``: a normalisation's kernel does the sum before it and that sum's bias, GELUs are one kernel with
    their bias in some orders, products take a scale, and no other bias; ``attention``: whether the runtime has kernels
    for whole attention, in ONNX Runtime with the biases of its operands.
    """

    def __init__(
        self, ops: Sequence[Op], *, fused: bool, narrow: bool, by_onnxruntime: bool = False, attention: bool = True
    ) -> None:
        self._ops = ops
        #: Tensor → ops that read its elements; readers of its shape alone are left out.
        self.readers: dict[str, list[int]] = defaultdict(list)
        for place, op in enumerate(ops):
            for tensor in op.inputs if op.op_type not in ("Shape", "Size") else ():
                self.readers[tensor.name].append(place)
        #: Tensor → op that makes it.
        self.maker = {tensor.name: place for place, op in enumerate(ops) for tensor in op.outputs}
        self._absorbed: dict[int, int] = {}
        self.norm_rows: dict[int, int] = {}  #: First node of a normalisation written as several → elements of a row.
        self._find_norms(fused=fused)
        if by_onnxruntime:
            self._find_skip_norms()
            self._find_folded_norms()
        else:
            self._find_biases()
        self._find_gelus(by_onnxruntime=by_onnxruntime)
        self._find_swishes()
        if by_onnxruntime:
            self._find_scales()
        #: Whether attention adds the biases of its queries, keys and values.
        self._adds_biases = by_onnxruntime and attention
        if narrow and (fused or self._adds_biases):
            self._find_joint_products()
        if narrow and fused:
            self._find_activated_products()
        if fused:
            self._find_chains()
        #: A node whose kernel does the work of others → those nodes.
        self.members: dict[int, list[int]] = defaultdict(list)
        for place in self._absorbed:
            self.members[self._anchor(place)].append(place)
        #: The last product of an attention → its nodes; the last two are the first product and the last product.
        self.attention = self._find_attention() if narrow and attention else {}
        self._inside = {place for group in self.attention.values() for place in group}
        for last, group in self.attention.items():
            self._inside |= self._list_strided(group[-2], last)

    def is_inside(self, place: int) -> bool:
        """Return whether a node has no kernel of its own, because another node's kernel computes it."""
        return place in self._absorbed or place in self._inside

    def _anchor(self, place: int) -> int:
        while place in self._absorbed:
            place = self._absorbed[place]
        return place

    def _only_reader(self, place: int) -> int | None:
        op = self._ops[place]
        readers = {r for t in op.outputs for r in self.readers[t.name]}
        return readers.pop() if len(readers) == 1 and len(op.outputs) == 1 else None

    def _find_norms(self, *, fused: bool) -> None:
        """Group the primitive ops into which exporters split a normalisation, under its first ReduceMean."""
        search = NormSearch(self._ops, self.readers, self.maker)
        norms: list[NormPattern] = [*search.find_layer_norms(), *(search.find_rms_norms() if fused else ())]
        for norm in norms:
            if not {norm.first, *norm.others} & (self._absorbed.keys() | self.norm_rows.keys()):
                self._absorbed.update(dict.fromkeys(norm.others, norm.first))
                self.norm_rows[norm.first] = norm.row

    def _find_biases(self) -> None:
        """Tie the bias of a linear layer, an addition in exported files, to its product: every runtime fuses them."""
        for place, op in enumerate(self._ops):
            if not self._adds_weight(place):
                continue
            before = next((self.maker[t.name] for t in op.inputs if t.name in self.maker), None)
            if before is not None and self._ops[before].op_type in PRODUCTS and self._only_reader(before) == place:
                self._absorbed[place] = before

    def _find_skip_norms(self) -> None:
        """Tie a sum of two tensors, read only by a normalisation, to it, together with a bias read only by the sum."""
        for place, op in enumerate(self._ops):
            if not op.inputs or (op.op_type not in NORMS and place not in self.norm_rows):
                continue
            added = self._find_sum(op.inputs[0].name, weights=0)
            if added is None:
                continue
            biases = (self._find_sum(tensor.name, weights=1) for tensor in self._ops[added].inputs)
            tied = [added, *[bias for bias in biases if bias is not None][:1]]
            self._absorbed.update({node: place for node in tied if node not in self._absorbed})

    def _find_sum(self, tensor: str, *, weights: int) -> int | None:
        """Return the addition that makes a tensor with a single reader and has ``weights`` one-dimensional weights."""
        place = self.maker.get(tensor)
        if place is None or self._ops[place].op_type != "Add" or self._only_reader(place) is None:
            return None
        return place if sum(len(weight.shape) == 1 for weight in self._ops[place].weights) == weights else None

    def has_bias(self, place: int) -> bool:
        """Return whether a convolution has a bias, of its own or from a normalisation folded into it."""
        return self._normaliser(place) is not None or any(len(weight.shape) == 1 for weight in self._ops[place].weights)

    def _normaliser(self, place: int) -> int | None:
        """Return the batch normalisation behind a convolution, folded into its weights and bias."""
        reader = self._only_reader(place)
        return reader if reader is not None and self._ops[reader].op_type == "BatchNormalization" else None

    def _find_folded_norms(self) -> None:
        """Tie batch normalisations behind convolutions to them."""
        for place, op in enumerate(self._ops):
            if op.op_type in CONVOLUTIONS and (reader := self._normaliser(place)) is not None:
                self._absorbed[reader] = place

    def _find_scales(self) -> None:
        """Tie a multiplication by a number to the product before it or, as the product's only reader, behind it."""
        tied = self._absorbed.keys() | set(self._absorbed.values())
        for place, op in enumerate(self._ops):
            if place in tied or not self._scales(place):
                continue
            before, reader = self.maker.get(op.inputs[0].name), self._only_reader(place)
            if before is not None and self._ops[before].op_type in _SCALED and self._only_reader(before) == place:
                self._absorbed[place] = before
            elif reader is not None and self._ops[reader].op_type in _SCALED:
                self._absorbed[place] = reader

    def _find_gelus(self, *, by_onnxruntime: bool) -> None:
        """Tie the ops of a GELU written by exporters, ``x (1 + erf(x / sqrt 2)) / 2``, to their last.

        ONNX Runtime recognises the product of ``1 + erf`` with ``x`` or its half, but not a halving before it.
        """
        for place, op in enumerate(self._ops):
            if op.op_type != "Erf":
                continue
            chain, last = [place], place
            while (reader := self._only_reader(last)) is not None and self._ops[reader].op_type in ("Add", "Mul"):
                chain.append(last := reader)
                if len(chain) == 4:
                    break
            before = self.maker.get(op.inputs[0].name)
            if by_onnxruntime and len(chain) >= 3 and any(x.elements == 1 for x in self._ops[chain[2]].inputs):
                continue
            if len(chain) >= 3 and before is not None and self._ops[before].op_type in ("Div", "Mul"):
                self._absorbed.update(dict.fromkeys([before, *chain[:-1]], chain[-1]))
                halves = self.maker.get(self._ops[chain[-1]].inputs[0].name)
                if halves is not None and halves not in self._absorbed and self._is_scaling(halves, chain[-1]):
                    self._absorbed[halves] = chain[-1]
                added = self.maker.get(self._ops[before].inputs[0].name)
                if by_onnxruntime and added is not None and self._is_bias(added, chain[-1]):
                    self._absorbed[added] = chain[-1]

    def _find_joint_products(self) -> None:
        """Tie linear layers with the same input, as queries, keys and values, to the first of them, as
        a joint product.
        """
        first: dict[str, int] = {}
        for place, op in enumerate(self._ops):
            if op.op_type not in ("MatMul", "Gemm") or op.attributes.get("transA") or op.inputs[1] not in op.weights:
                continue
            anchor = first.setdefault(op.inputs[0].name, place)
            if anchor != place and len(op.inputs[1].shape) == 2:
                self._absorbed[place] = anchor

    def _find_activated_products(self) -> None:
        """Tie an activation of several ops to the linear layer whose only reader it is: the product's kernel computes
        it.
        """
        for place, op in enumerate(self._ops):
            readers = [reader for tensor in op.outputs for reader in self.readers[tensor.name]]
            last = {self._anchor(reader) for reader in readers}
            if len(readers) < 2 or len(last) > 1 or self._ops[self._anchor(place)].op_type not in PRODUCTS:
                continue
            end = last.pop()
            if self._ops[end].op_type in ELEMENTWISE:
                self._absorbed[end] = place

    def _find_swishes(self) -> None:
        """Tie the sigmoid in ``x sigmoid(x)`` to the product: exporters write the activation as two ops."""
        for place, op in enumerate(self._ops):
            reader = self._only_reader(place) if op.op_type in ("Sigmoid", "HardSigmoid") else None
            if reader is None or self._ops[reader].op_type != "Mul":
                continue
            if op.inputs[0].name in {tensor.name for tensor in self._ops[reader].inputs}:
                self._absorbed[place] = reader

    def _is_bias(self, place: int, last: int) -> bool:
        """Return whether an op adds a bias, and all its readers belong to the kernel of ``last``."""
        readers = {self._anchor(reader) for tensor in self._ops[place].outputs for reader in self.readers[tensor.name]}
        return self._adds_weight(place) and readers == {last}

    def _adds_weight(self, place: int) -> bool:
        return self._ops[place].op_type == "Add" and any(len(weight.shape) == 1 for weight in self._ops[place].weights)

    def _is_scaling(self, place: int, reader: int) -> bool:
        return self._ops[place].op_type in ("Mul", "Div") and self._only_reader(place) == reader and place != reader

    def _find_chains(self) -> None:
        """Tie element-wise ops to the op before them as its only readers, and to a row-wise op as their only reader."""
        members = Counter(self._anchor(place) for place in self._absorbed)
        for place, op in enumerate(self._ops):
            if op.op_type not in ELEMENTWISE or place in self._absorbed:
                continue
            for tensor in op.inputs:
                before = self.maker.get(tensor.name)
                anchor = place if before is None else self._anchor(before)
                # Compilers end a chain at 64 ops (TorchInductor's ``max_fusion_size``).
                full = members[anchor] + members[place] + 2 > 64
                if before is not None and anchor != place and not full and self._may_join(before, place):
                    self._absorbed[place] = anchor
                    members[anchor] += members[place] + 1
                    break
            else:
                reader = self._only_reader(place)
                if reader is not None and self._ops[reader].op_type in SOFTMAXES | NORMS:
                    self._absorbed[place] = reader  # nothing absorbs the reader: no two ops can be tied to each other

    def _may_join(self, before: int, place: int) -> bool:
        tensor = self._ops[before].outputs[0]
        same = tensor.elements == self._ops[place].outputs[0].elements
        kinds = ELEMENTWISE | PRODUCTS | CONVOLUTIONS | NORMS | {"Transpose", "Gather", "Concat"}
        return same and self._only_reader(before) == place and self._ops[before].op_type in kinds

    def _find_attention(self) -> dict[int, list[int]]:
        """Return for the last product of each attention the nodes between it and the first, both included."""
        patterns = {}
        for place, op in enumerate(self._ops):
            if op.op_type not in SOFTMAXES:
                continue
            after, before, inside = self._only_reader(place), self.maker.get(op.inputs[0].name), [place]
            while after is not None and self._ops[after].op_type in VIEWS:
                inside.append(after)
                after = self._only_reader(after)
            while before is not None and self._ops[before].op_type in ELEMENTWISE | VIEWS:
                inside.append(before)
                before = next((self.maker[t.name] for t in self._ops[before].inputs if t.name in self.maker), None)
            if after is not None and before is not None and self._is_pair(before, after):
                patterns[after] = [*inside, before, after]
        return patterns

    def _is_pair(self, before: int, after: int) -> bool:
        return all(self._ops[p].op_type in PRODUCTS and len(self._ops[p].inputs[1].shape) > 2 for p in (before, after))

    def _list_strided(self, first: int, last: int) -> set[int]:
        """Return the ops that only move an attention's inputs and result: its kernel reads and writes in strides. A
        scaling of the queries belongs to the kernel, too.
        """
        places: set[int] = set()
        waiting = [*self._ops[first].inputs[:2], self._ops[last].inputs[1]]
        while waiting:
            place = self.maker.get(waiting.pop().name)
            if place is None or place in places or not self._is_moving(place):
                continue
            places.add(place)
            op = self._ops[place]
            waiting.extend([tensor for tensor in op.inputs if tensor not in op.weights][:1])
        inside = self._inside | {first, last}
        while outside := {
            place
            for place in places
            if any(r not in places and r not in inside for t in self._ops[place].outputs for r in self.readers[t.name])
        }:
            places -= outside
        after = self._only_reader(last)
        while after is not None and self._ops[after].op_type in VIEWS | {"Transpose"}:
            places.add(after)
            after = self._only_reader(after)
        return places

    def _is_moving(self, place: int) -> bool:
        biased = self._adds_biases and self._adds_weight(place)
        is_view = self._ops[place].op_type in VIEWS | {"Transpose", "Split", "Gather", "Slice"}
        return self._scales(place) or biased or is_view

    def _scales(self, place: int) -> bool:
        op = self._ops[place]
        is_scaling = op.op_type in ("Mul", "Div") and op.inputs[0].elements == op.outputs[0].elements
        return is_scaling and all(tensor.elements == 1 for tensor in op.inputs[1:])
