"""The execution of each group of nodes: once over concatenated inputs, as a Super-Operator, or separately.

A Super-Operator (USHER §3.4.3) stands for operators that share only a part of their weights. The weights of output
features that all models have are multiplied once with the inputs of all models. Each model multiplies the rest of its
weights alone, and both results are joined in the order of that model's output features (the repositioning).

The paper keeps W^s and each W^R at full size, padded with zeros, which helps the cache but adds as many multiplications
as are shared and holds more weights than before. Here the weights are divided between output features, so no
multiplication is done twice, and the paper's padding of operators of different sizes is unnecessary. A common block
that lacks some of the input features is not shared: cutting inputs and adding products costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from onnx import NodeProto, helper

from gpuprof.domain.model import Op, Tensor
from gpuprof.graph.element_types import dtype_name
from gpuprof.graph.item_independence import BatchedTensors, keeps_items_apart
from gpuprof.merging.groups import NodeGroup
from gpuprof.merging.similarity import WeightedOperator, shareable_constants, weight_matrix
from gpuprof.merging.source import Array, Size, SourceModel, attribute, whole


@dataclass(slots=True)
class Step:
    """The planned execution of a group."""

    group: int
    models: tuple[int, ...]
    node_positions: dict[int, int]
    once: bool = False  #: Whether a single op runs for all models.
    super_operator: SuperOperator | None = None  #: Set if only a part of the weights is shared.
    concatenated_inputs: tuple[bool, ...] = ()  #: For each input, whether it is concatenated; else shared, or absent.
    is_concatenated: bool = False  #: Whether its outputs are concatenated.
    reason: str = ""  #: Reason for running apart, else empty.
    #: Whether the models' weights are equal and stored as a single initializer, even if the ops run apart.
    shares_weight: bool = False
    #: Model → weights held by its op, if worth sharing.
    held: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_merged(self) -> bool:
        """Whether the step runs once for several models, at least in part."""
        return self.once or self.super_operator is not None


@dataclass(slots=True)
class MergePlan:
    """The planned execution of all groups of operators that share weights."""

    sources: Sequence[SourceModel]
    groups: Sequence[NodeGroup]
    steps: list[Step]  #: Steps in topological order.
    #: (model, value name) → (step, output) that produces the value, for values computed once.
    produced_once: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    #: (model, weight) → the equal (model, weight) stored in its place.
    shared: dict[tuple[int, str], tuple[int, str]] = field(default_factory=dict)

    def node(self, step: Step, model: int) -> NodeProto:
        """Return the node of a model in a step."""
        return self.sources[model].nodes[step.node_positions[model]]

    def group(self, step: Step) -> NodeGroup:
        """Return the group of a step."""
        return self.groups[step.group]


def make_plan(
    sources: Sequence[SourceModel], groups: Sequence[NodeGroup], left_out: dict[int, str] | None = None
) -> MergePlan:
    """Return the plan of all groups; groups in ``left_out`` (group → reason) run apart.

    Steps are ordered by moment, which grows along every edge.
    """
    plan = MergePlan(sources, groups, [])
    order = sorted(range(len(groups)), key=lambda i: (groups[i].moment, i))
    for index in order:
        group = groups[index]
        step = Step(index, tuple(sorted(group.nodes)), dict(group.nodes))
        if len(step.models) > 1:
            try:
                if left_out and index in left_out:
                    raise UnmergeableError(left_out[index])
                _decide_step(plan, group, step)
            except UnmergeableError as error:
                step = Step(index, step.models, step.node_positions, reason=str(error))
        step.held = _held_weights_by_model(plan, step)
        if group.operators and len(step.models) > 1:
            _share_weight(plan, group, step)
        elif step.held:  # nodes without large weights share a group only if their constants are equal
            step.shares_weight = len(step.models) > 1
        _record_outputs(plan, step)
        plan.steps.append(step)
    return plan


def _decide_step(plan: MergePlan, group: NodeGroup, step: Step) -> None:
    nodes = [plan.sources[m].nodes[p] for m, p in sorted(group.nodes.items())]
    pairs = list(zip(step.models, nodes, strict=True))
    if group.operators and not _has_same_constants(plan, step):
        step.super_operator = plan_super_operator(plan.sources, group)
        step.concatenated_inputs = (_can_concatenate(plan, step, 0),)
        _check_super(plan, step)
        return
    node = nodes[0]
    if not any(node.input) or node.op_type.startswith("Random") or node.op_type in {"Bernoulli", "Multinomial"}:
        raise UnmergeableError(f"{node.op_type} has nothing to concatenate")
    inputs = node.input[:1] if node.op_type == "Reshape" else node.input
    step.concatenated_inputs = tuple(bool(name) and _can_concatenate(plan, step, i) for i, name in enumerate(inputs))
    step.is_concatenated = any(step.concatenated_inputs)
    for i, name in enumerate(node.output):
        if name:
            _check_dims([plan.sources[m].values[n.output[i]].dims for m, n in pairs], step.is_concatenated)
    if step.is_concatenated and not all(
        _keeps_batch_apart(plan.sources[m], n, step.concatenated_inputs) for m, n in pairs
    ):
        raise UnmergeableError(f"{node.op_type} is not known to keep the parts of a batch apart")
    step.once = True


def _check_super(plan: MergePlan, step: Step) -> None:
    node = plan.node(step, step.models[0])
    if not step.concatenated_inputs[0]:
        raise UnmergeableError("its models share the input but not the weights")
    if len(plan.sources[step.models[0]].values[node.input[0]].dims) < 2:
        raise UnmergeableError(f"{node.op_type} sums over what is concatenated")


def _keeps_batch_apart(source: SourceModel, node: NodeProto, concatenated: Sequence[bool]) -> bool:
    """Return whether a node's outputs have one row, or the same number of rows, for each item of its inputs.

    The rules compare shapes at a batch of two with those of one item.
    """
    inputs = [name for name, _ in zip(node.input, concatenated, strict=False) if name]
    inputs += node.input[len(concatenated) :] if node.op_type != "Reshape" else []
    names = (*inputs, *(name for name in node.output if name))
    tensors = {name: _tensor_at(source, name, 2) for name in names}
    lists = {name: source.array(name) for name in inputs if name in source.weights and len(tensors[name].shape) <= 1}
    items = {name for name, is_item in zip(node.input, concatenated, strict=False) if is_item}
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    op = Op(
        name=node.name,
        op_type=node.op_type,
        domain=node.domain,
        inputs=tuple(tensors[name] for name in inputs),
        outputs=tuple(tensors[name] for name in node.output if name),
        weights=tuple(tensors[name] for name in inputs if name not in items),
        attributes={name: tuple(value) if isinstance(value, list) else value for name, value in attributes.items()},
        flops=None,
        bytes_read=0,
        bytes_written=0,
    )
    of_one = {name: _tensor_at(source, name, 1).shape for name in names}
    return not node.domain and keeps_items_apart(op, BatchedTensors(2, lists, of_one, items))


def _tensor_at(source: SourceModel, name: str, batch: int) -> Tensor:
    if name in source.weights:
        tensor = source.weights[name]
        return Tensor(name, dtype_name(tensor.data_type), tuple(tensor.dims))
    value = source.values[name]
    return Tensor(name, value.dtype, tuple(dim.at(batch) for dim in value.dims))


def _has_same_constants(plan: MergePlan, step: Step) -> bool:
    """Return whether the nodes' constant inputs are equal, weights within the tolerance of the common blocks."""
    group = plan.group(step)
    nodes = {m: plan.sources[m].nodes[p] for m, p in group.nodes.items()}
    first = step.models[0]
    if len({tuple(map(bool, node.input)) for node in nodes.values()}) > 1:
        return False
    for i, name in enumerate(nodes[first].input):
        names = {m: nodes[m].input[i] for m in step.models}
        constant = [m for m in step.models if names[m] in plan.sources[m].weights]
        if not constant:
            continue
        if len(constant) < len(step.models):
            return False
        if name == group.operators[first].weight:
            if not _has_same_weight(plan, group):
                return False
        elif len({plan.sources[m].digest(names[m]) for m in step.models}) > 1:
            return False
    return True


def _has_same_weight(plan: MergePlan, group: NodeGroup) -> bool:
    """Return whether the weights of a group's members are equal within the tolerance."""
    tensors = [plan.sources[m].weights[operator.weight] for m, operator in group.operators.items()]
    return group.similarity == 1.0 and len({(tensor.data_type, tuple(tensor.dims)) for tensor in tensors}) == 1


def _share_weight(plan: MergePlan, group: NodeGroup, step: Step) -> None:
    step.shares_weight = _has_same_weight(plan, group)
    if step.shares_weight:
        first, *later_models = step.models
        source_weight = plan.shared.get((first, group.operators[first].weight), (first, group.operators[first].weight))
        plan.shared |= {(m, group.operators[m].weight): source_weight for m in later_models}


def _held_weights_by_model(plan: MergePlan, step: Step) -> dict[int, tuple[str, ...]]:
    held = {m: shareable_constants(plan.sources[m], plan.sources[m].nodes[p]) for m, p in step.node_positions.items()}
    return held if all(held.values()) else {}


def _can_concatenate(plan: MergePlan, step: Step, position: int) -> bool:
    """Return whether an input of a group is, or can be, concatenated; False if the models share the value."""
    names = [plan.node(step, m).input[position] for m in step.models]
    pairs = list(zip([plan.sources[m] for m in step.models], names, strict=True))
    constant = [name in source.weights for source, name in pairs]
    if all(constant):
        return False
    if any(constant):
        raise UnmergeableError("one model has a constant where another computes")
    values = [source.values[name] for source, name in pairs]
    if len({value.dtype for value in values}) > 1 or len({len(value.dims) for value in values}) > 1:
        raise UnmergeableError("its inputs have different types or ranks")
    places = {plan.produced_once.get((m, name)) for m, name in zip(step.models, names, strict=True)}
    place = places.pop() if len(places) == 1 else None
    is_shared = place is not None and not plan.steps[place[0]].is_concatenated
    if not is_shared and not all(value.dims and value.dims[0].per_batch for value in values):
        raise UnmergeableError("its inputs have no batch along which they could be concatenated")
    _check_dims([value.dims for value in values], not is_shared)
    return not is_shared


def _check_dims(shapes: Sequence[tuple[Size, ...]], is_concatenated: bool) -> None:
    """Refuse values that cannot be concatenated along the first axis, nor be common to all models."""
    if len({dims[1:] if is_concatenated else dims for dims in shapes}) > 1:
        dims_text = " and ".join(str([dim.fixed or "batch" for dim in dims]) for dims in dict.fromkeys(shapes))
        raise UnmergeableError(f"shapes {dims_text} cannot be concatenated")
    if is_concatenated and any(dims[0].fixed or any(dim.per_batch for dim in dims[1:]) for dims in shapes):
        raise UnmergeableError("its first dimension is not a number of rows for each part of the batch")


def _record_outputs(plan: MergePlan, step: Step) -> None:
    if not step.once:
        return
    for m in step.models:
        node = plan.node(step, m)
        for i, name in enumerate(node.output):
            if name:
                plan.produced_once[m, name] = (len(plan.steps), i)


class UnmergeableError(Exception):
    """Raised when an op cannot run once for several models; the message, the reason, is part of the report."""


@dataclass(frozen=True, slots=True)
class SuperOperator:
    """The common output features (filters) of several weighted operators."""

    outputs: int  #: Number of common output features.
    begins: dict[int, int]  #: Model → its first common output feature.
    totals: dict[int, int]  #: Model → number of its output features.
    shared_bytes: int  #: Weights of the common output features.

    def is_complete(self, model: int) -> bool:
        """Return whether all output features of a model are common."""
        return self.totals[model] == self.outputs


def bias_of(group: NodeGroup, model: int) -> str | None:
    """Return the name of the operator's bias; None without a bias."""
    node = group.operators[model].node
    return node.input[2] if node.op_type != "MatMul" and len(node.input) > 2 and node.input[2] else None


def weight_part(source: SourceModel, operator: WeightedOperator, begin: int, end: int) -> Array:
    """Return the weight of some output features, a Gemm's in MatMul's layout."""
    if operator.kind == "conv":
        return source.array(operator.weight)[begin:end]
    return weight_matrix(source, operator)[:, begin:end]


def plan_super_operator(sources: Sequence[SourceModel], group: NodeGroup) -> SuperOperator:
    """Return the common output features of the members of ``group``.

    Raises `UnmergeableError` when the op cannot be divided, or the common block does not cover whole output features.
    """
    _check_divisible(sources, group)
    first, *later_models = sorted(group.operators)
    is_conv = group.operators[first].kind == "conv"
    shapes = {m: weight_matrix(sources[m], operator).shape for m, operator in group.operators.items()}
    totals = {m: shape[0] if is_conv else shape[1] for m, shape in shapes.items()}
    low, high, shifts = 0, totals[first], {first: 0}
    for model in later_models:
        block = group.blocks[first, model]
        inputs = {shapes[m][1] if is_conv else shapes[m][0] for m in (first, model)}
        if inputs != {block.columns if is_conv else block.rows}:
            raise UnmergeableError("it shares no whole feature")
        begin, count = (block.a_row, block.rows) if is_conv else (block.a_column, block.columns)
        low, high = max(low, begin), min(high, begin + count)
        shifts[model] = (block.b_row - block.a_row) if is_conv else (block.b_column - block.a_column)
    if high <= low:
        raise UnmergeableError("it shares no whole feature")
    shared_bytes = weight_part(sources[first], group.operators[first], low, high).nbytes
    return SuperOperator(high - low, {m: low + shift for m, shift in shifts.items()}, totals, shared_bytes)


def _check_divisible(sources: Sequence[SourceModel], group: NodeGroup) -> None:
    for model, operator in group.operators.items():
        node, source = operator.node, sources[model]
        is_scaled = node.op_type == "Gemm" and (
            attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0 or whole(node, "transA", 0)
        )
        direct = operator.weight in node.input  # not behind a DequantizeLinear
        plain = source.array(operator.weight).dtype.kind == "f" and direct and not node.domain
        if node.op_type not in ("MatMul", "Gemm", "Conv") or is_scaled or not plain or whole(node, "group", 1) != 1:
            raise UnmergeableError(f"its weights or other constants differ, and this {node.op_type} cannot be divided")
        if node.op_type != "Conv" and len(source.weights[operator.weight].dims) != 2:
            raise UnmergeableError("its weights differ, and a product of many matrices cannot be divided")
        bias = bias_of(group, model)
        if bias is not None and bias not in source.weights:
            raise UnmergeableError("it adds something computed")
    kernels = {tuple(sources[m].weights[operator.weight].dims[2:]) for m, operator in group.operators.items()}
    if len(kernels) > 1:
        raise UnmergeableError("its weights have different kernels")
