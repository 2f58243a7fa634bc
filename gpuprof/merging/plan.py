"""The execution of each group of nodes: once over concatenated inputs, as a Super-Operator, or separately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuprof.merging.axes import output_axes
from gpuprof.merging.groups import Grouping, NodeGroup
from gpuprof.merging.shareable_constants import shareable_constants
from gpuprof.merging.slots import Axes, OpInput, UnmergeableError
from gpuprof.merging.source import Size, SourceModel
from gpuprof.merging.super_operator import SuperOperator, plan_super_operator


@dataclass(slots=True)
class Step:
    """The planned execution of a group."""

    group: int
    models: tuple[int, ...]
    node_positions: dict[int, int]
    once: bool = False  #: Whether a single op runs for all models.
    super_operator: SuperOperator | None = None  #: Set if only a part of the weights is shared.
    input_axes: Axes = ()  #: Axis of concatenation of each input; None: shared, or absent.
    output_axes: Axes = ()
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
    """The planned execution of all groups."""

    sources: Sequence[SourceModel]
    grouping: Grouping
    steps: list[Step]  #: Steps in topological order.
    #: (model, value name) → (step, output) that produces the value, for values computed once.
    produced_once: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    #: (model, weight) → the equal (model, weight) stored in its place.
    shared: dict[tuple[int, str], tuple[int, str]] = field(default_factory=dict)

    def group(self, step: Step) -> NodeGroup:
        """Return the group of a step."""
        return self.grouping.groups[step.group]


def make_plan(sources: Sequence[SourceModel], grouping: Grouping, left_out: dict[int, str] | None = None) -> MergePlan:
    """Return the plan of all groups; groups in ``left_out`` (group → reason) run apart.

    Steps are ordered by moment, which grows along every edge.
    """
    plan = MergePlan(sources, grouping, [])
    order = sorted(
        range(len(grouping.groups)), key=lambda i: (grouping.groups[i].moment.level, grouping.groups[i].moment.depth, i)
    )
    for index in order:
        group = grouping.groups[index]
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


def batch_axis(plan: MergePlan, models: Sequence[int], names: Sequence[str]) -> int | None:
    """Return the axis along which separately computed values would be concatenated; None: no such axis."""
    values = [plan.sources[m].values[name] for m, name in zip(models, names, strict=True)]
    for value in values:
        for axis, dim in enumerate(value.dims):
            if dim.per_batch:
                return axis
    fixed = all(plan.sources[m].batch_input is None for m in models)
    return 0 if fixed and values[0].dims else None


def _decide_step(plan: MergePlan, group: NodeGroup, step: Step) -> None:
    nodes = [plan.sources[m].nodes[p] for m, p in sorted(group.nodes.items())]
    if group.operators and not _has_same_constants(plan, step):
        step.super_operator = plan_super_operator(plan.sources, group)
        step.input_axes = (_slot(plan, step, 0).axis,)
        _check_super(plan, step)
        return
    slots = [_slot(plan, step, i) if name else None for i, name in enumerate(nodes[0].input)]
    if nodes[0].op_type == "Reshape":
        slots = slots[:1]
    outputs = [
        tuple(plan.sources[m].values[node.output[i]].dims for m, node in zip(step.models, nodes, strict=True))
        for i, name in enumerate(nodes[0].output)
        if name
    ]
    opset = plan.sources[step.models[0]].opset
    step.output_axes = output_axes(nodes[0], slots, outputs, opset)
    step.input_axes = tuple(slot.axis if slot else None for slot in slots)
    for dims, axis in zip(outputs, step.output_axes, strict=False):
        _check_rest([tuple(dim) for dim in dims], axis)
        if nodes[0].op_type in {"Reshape", "Flatten"} and axis is not None:
            _check_target(dims[0], axis)
    step.once = True


def _check_target(dims: tuple[Size, ...], axis: int) -> None:
    if any(dim.per_batch or dim.fixed == 0 for i, dim in enumerate(dims) if i != axis):
        raise UnmergeableError("Reshape spreads the batch over two axes")


def _check_super(plan: MergePlan, step: Step) -> None:
    node = plan.sources[step.models[0]].nodes[step.node_positions[step.models[0]]]
    axis, rank = step.input_axes[0], len(plan.sources[step.models[0]].values[node.input[0]].dims)
    if axis is None:
        raise UnmergeableError("its models share the input but not the weights")
    features = 1 if node.op_type == "Conv" else rank - 1
    if axis == features or (node.op_type != "MatMul" and axis != 0):
        raise UnmergeableError(f"{node.op_type} sums over what is concatenated")


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
    # A common block as large as either weight covers both entirely.
    if any(block.area * 2 != _entries(plan, group, pair) for pair, block in group.blocks.items()):
        return False
    tensors = [plan.sources[m].weights[operator.weight] for m, operator in group.operators.items()]
    return len({(tensor.data_type, tuple(tensor.dims)) for tensor in tensors}) == 1


def _share_weight(plan: MergePlan, group: NodeGroup, step: Step) -> None:
    step.shares_weight = _has_same_weight(plan, group)
    if step.shares_weight:
        first, *others = step.models
        kept = plan.shared.get((first, group.operators[first].weight), (first, group.operators[first].weight))
        plan.shared |= {(m, group.operators[m].weight): kept for m in others}


def _held_weights_by_model(plan: MergePlan, step: Step) -> dict[int, tuple[str, ...]]:
    held = {m: shareable_constants(plan.sources[m], plan.sources[m].nodes[p]) for m, p in step.node_positions.items()}
    return held if all(held.values()) else {}


def _entries(plan: MergePlan, group: NodeGroup, pair: tuple[int, int]) -> int:
    total = 0
    for m in pair:
        count = 1
        for dim in plan.sources[m].weights[group.operators[m].weight].dims:
            count *= dim
        total += count
    return total


def _slot(plan: MergePlan, step: Step, position: int) -> OpInput:
    """Return an input of a group: shared, already concatenated, or to be concatenated."""
    names = [plan.sources[m].nodes[step.node_positions[m]].input[position] for m in step.models]
    values = [
        plan.sources[m].values[name]
        for m, name in zip(step.models, names, strict=True)
        if name in plan.sources[m].values
    ]
    constant = [name in plan.sources[m].weights for m, name in zip(step.models, names, strict=True)]
    if all(constant):
        first = plan.sources[step.models[0]]
        tensor = first.weights[names[0]]
        dims = tuple(
            tuple(Size(d) for d in plan.sources[m].weights[name].dims)
            for m, name in zip(step.models, names, strict=True)
        )
        # The rules read axes, sizes and scales only, so large constants are not loaded.
        small = len(tensor.dims) <= 1 or sum(tensor.dims) < 64
        return OpInput(None, dims, first.array(names[0]) if small else None)
    if any(constant):
        raise UnmergeableError("one model has a constant where another computes")
    if len({value.dtype for value in values}) > 1 or len({len(value.dims) for value in values}) > 1:
        raise UnmergeableError("its inputs have different types or ranks")
    axis = _axis_of(plan, step.models, names)
    slot = OpInput(axis, tuple(value.dims for value in values))
    _check_rest([value.dims for value in values], axis)
    return slot


def _axis_of(plan: MergePlan, models: Sequence[int], names: Sequence[str]) -> int | None:
    """Return the axis along which the values are concatenated already, else the axis along which they can be."""
    placed = {plan.produced_once.get((m, name)) for m, name in zip(models, names, strict=True)}
    if len(placed) == 1 and (only := placed.pop()) is not None:
        step = plan.steps[only[0]]
        return step.output_axes[only[1]]
    axis = batch_axis(plan, models, names)
    if axis is None:
        raise UnmergeableError("its inputs have no batch along which they could be concatenated")
    return axis


def _check_rest(shapes: Sequence[tuple[Size, ...]], axis: int | None) -> None:
    rest = {tuple(dim for i, dim in enumerate(dims) if i != axis) for dims in shapes}
    if len(rest) > 1:
        shown = " and ".join(str([dim.fixed or "batch" for dim in dims]) for dims in dict.fromkeys(shapes))
        raise UnmergeableError(f"shapes {shown} cannot be concatenated")
    if axis is not None and any(dims[axis].fixed and dims[axis].per_batch for dims in shapes):
        raise UnmergeableError("a batch with something added to it cannot be taken apart again")
    if axis is not None and any(dim.per_batch for dims in shapes for i, dim in enumerate(dims) if i != axis):
        raise UnmergeableError("the batch shows in more than one axis")


def _record_outputs(plan: MergePlan, step: Step) -> None:
    if not step.once:
        return
    for m in step.models:
        node = plan.sources[m].nodes[step.node_positions[m]]
        for i, name in enumerate(node.output):
            if name:
                plan.produced_once[m, name] = (len(plan.steps), i)
