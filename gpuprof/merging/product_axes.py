"""Rules of ops that multiply: matrices, sums of products, attention, recurrent layers; see `gpuprof.merging.axes`."""

from __future__ import annotations

from onnx import NodeProto

from gpuprof.merging.normalisation import attribute, whole
from gpuprof.merging.slots import Axes, Outputs, Rule, Slots, UnmergeableError, first_two_inputs, only_data_input
from gpuprof.merging.source import Size


def matmul_axes(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of matrix products: rows and the axes before them stay apart."""
    a, b = first_two_inputs(node, slots)
    out = len(outputs[0][0])
    if a.rank < 2 or b.rank < 2:
        raise UnmergeableError(f"{node.op_type} of a vector")
    if a.axis is not None and b.axis is not None:
        end = a.axis - a.rank
        if end != b.axis - b.rank or end >= -2 or a.sizes != b.sizes:
            raise UnmergeableError(f"{node.op_type} sums over what is concatenated")
        return (end + out,)
    stacked, shared = (a, b) if a.axis is not None else (b, a)
    end = (stacked.axis or 0) - stacked.rank
    free = -2 if stacked is a else -1  # rows of the left factor or columns of the right factor
    if end == free:
        return (end + out,)
    if end >= -2 or (shared.rank >= -end and shared.dims[0][end] != Size(1)):
        raise UnmergeableError(f"{node.op_type} sums over what is concatenated")
    return (end + out,)


def integer_matmul(first: int, second: int, of_rows: tuple[int, ...]) -> Rule:
    """Return the rule of integer products, given the input positions of factors and of scales per row."""

    def rule(node: NodeProto, slots: Slots, outputs: Outputs, opset: int) -> Axes:
        rest = [slot for i, slot in enumerate(slots) if slot is not None and i not in (first, second)]
        by_row = [slots[i] for i in of_rows if i < len(slots)]
        if any(slot.axis is not None for slot in rest):
            raise UnmergeableError(f"{node.op_type} takes its scale from each model")
        if any(slot is not None and slot.dims[0] not in ((), (Size(1),)) for slot in by_row):
            raise UnmergeableError(f"{node.op_type} has a scale for each part of the batch")
        return matmul_axes(node, [slots[first], slots[second]], outputs, opset)

    return rule


def einsum_axes(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of Einsum: the index of concatenation must be in the output and not in shared inputs."""
    equation = attribute(node, "equation")
    text = (equation.decode() if isinstance(equation, bytes) else str(equation)).replace(" ", "")
    given, arrow, result = text.partition("->")
    terms = given.split(",")
    if "." in text or not arrow or len(terms) != len(slots):
        raise UnmergeableError("Einsum does not name every axis")
    pairs = [(term, slot) for term, slot in zip(terms, slots, strict=True) if slot is not None]
    index = {term[slot.axis] for term, slot in pairs if slot.axis is not None}
    sizes = {slot.sizes for _, slot in pairs if slot.axis is not None}
    label = min(index)
    shared = any(label in term for term, slot in pairs if slot.axis is None)
    if len(index) > 1 or len(sizes) > 1 or shared or any(term.count(label) > 1 for term in terms):
        raise UnmergeableError("the inputs of Einsum are concatenated along different indices")
    if label not in result:
        raise UnmergeableError("Einsum sums over what is concatenated")
    return (result.index(label),)


def gemm_axes(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of Gemm: the rows of the first matrix stay apart."""
    a = slots[0]
    only_data_input(node, slots)
    if a is None or a.axis != whole(node, "transA", 0):
        raise UnmergeableError("Gemm sums over what is concatenated")
    c = slots[2] if len(slots) > 2 else None
    if c is not None and c.rank == 2 and c.dims[0][0] != Size(1):
        raise UnmergeableError("Gemm adds a value to each part of the batch that all models share")
    return (0,)


def attention_axes(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of ONNX Runtime's Attention: data and mask come from each model, the rest is shared."""
    first = slots[0]
    rest = [slot for i, slot in enumerate(slots) if slot is not None and i not in (0, 3)]
    mask = slots[3] if len(slots) > 3 else None
    if first is None or first.axis != 0 or any(slot.axis is not None for slot in rest) or len(node.output) > 1:
        raise UnmergeableError("Attention takes more than its data and mask from each model")
    if mask is not None and mask.axis != 0:
        raise UnmergeableError("Attention has a mask that all models share")
    return (0,)


def recurrent_axes(node: NodeProto, slots: Slots, outputs: Outputs, _: int) -> Axes:
    """Apply the rule of LSTM, GRU and RNN: the batch is the second axis."""
    if whole(node, "layout", 0) or (len(slots) > 4 and slots[4] is not None):
        raise UnmergeableError(f"{node.op_type} with lengths or its batch first")
    for i, slot in enumerate(slots):
        if slot is not None and slot.axis != (1 if i in (0, 5, 6) else None):
            raise UnmergeableError(f"{node.op_type} takes its weights or states from each model")
    return tuple(2 if len(dims[0]) == 4 else 1 for dims in outputs)
