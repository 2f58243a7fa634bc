"""The execution of each group of nodes: once over concatenated inputs, as a Super-Operator, or separately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuprof.merging.batch_rules import OpInput, UnmergeableError, concatenates
from gpuprof.merging.groups import Grouping, NodeGroup
from gpuprof.merging.shareable_constants import shareable_constants
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


def _decide_step(plan: MergePlan, group: NodeGroup, step: Step) -> None:
    nodes = [plan.sources[m].nodes[p] for m, p in sorted(group.nodes.items())]
    if group.operators and not _has_same_constants(plan, step):
        step.super_operator = plan_super_operator(plan.sources, group)
        step.concatenated_inputs = (_read_input(plan, step, 0).is_concatenated,)
        _check_super(plan, step)
        return
    inputs = [_read_input(plan, step, i) if name else None for i, name in enumerate(nodes[0].input)]
    if nodes[0].op_type == "Reshape":
        inputs = inputs[:1]
    step.is_concatenated = concatenates(nodes[0], inputs, plan.sources[step.models[0]].opset)
    step.concatenated_inputs = tuple(one is not None and one.is_concatenated for one in inputs)
    for i, name in enumerate(nodes[0].output):
        if name:
            values = [plan.sources[m].values[node.output[i]] for m, node in zip(step.models, nodes, strict=True)]
            _check_dims([value.dims for value in values], step.is_concatenated)
            if nodes[0].op_type == "Reshape" and any(dim.fixed == 0 for dim in values[0].dims[1:]):
                raise UnmergeableError("Reshape has an empty dimension")
    step.once = True


def _check_super(plan: MergePlan, step: Step) -> None:
    node = plan.sources[step.models[0]].nodes[step.node_positions[step.models[0]]]
    if not step.concatenated_inputs[0]:
        raise UnmergeableError("its models share the input but not the weights")
    if len(plan.sources[step.models[0]].values[node.input[0]].dims) < 2:
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
    tensors = [plan.sources[m].weights[operator.weight] for m, operator in group.operators.items()]
    return group.similarity == 1.0 and len({(tensor.data_type, tuple(tensor.dims)) for tensor in tensors}) == 1


def _share_weight(plan: MergePlan, group: NodeGroup, step: Step) -> None:
    step.shares_weight = _has_same_weight(plan, group)
    if step.shares_weight:
        first, *others = step.models
        kept = plan.shared.get((first, group.operators[first].weight), (first, group.operators[first].weight))
        plan.shared |= {(m, group.operators[m].weight): kept for m in others}


def _held_weights_by_model(plan: MergePlan, step: Step) -> dict[int, tuple[str, ...]]:
    held = {m: shareable_constants(plan.sources[m], plan.sources[m].nodes[p]) for m, p in step.node_positions.items()}
    return held if all(held.values()) else {}


def _read_input(plan: MergePlan, step: Step, position: int) -> OpInput:
    """Return an input of a group: shared, already concatenated, or to be concatenated."""
    names = [plan.sources[m].nodes[step.node_positions[m]].input[position] for m in step.models]
    pairs = list(zip([plan.sources[m] for m in step.models], names, strict=True))
    constant = [name in source.weights for source, name in pairs]
    if all(constant):
        dims = [tuple(source.weights[name].dims) for source, name in pairs]
        # The rules read dimensions, and small lists of numbers: large constants are not loaded.
        value = pairs[0][0].array(names[0]) if len(dims[0]) <= 1 else None
        return OpInput(False, tuple(tuple(map(Size, shape)) for shape in dims), value)
    if any(constant):
        raise UnmergeableError("one model has a constant where another computes")
    values = [source.values[name] for source, name in pairs]
    if len({value.dtype for value in values}) > 1 or len({len(value.dims) for value in values}) > 1:
        raise UnmergeableError("its inputs have different types or ranks")
    is_concatenated = _can_concatenate(plan, step.models, names)
    _check_dims([value.dims for value in values], is_concatenated)
    return OpInput(is_concatenated, tuple(value.dims for value in values))


def _can_concatenate(plan: MergePlan, models: Sequence[int], names: Sequence[str]) -> bool:
    """Return whether values are concatenated already, or can be; False where the models share a value."""
    placed = {plan.produced_once.get((m, name)) for m, name in zip(models, names, strict=True)}
    if len(placed) == 1 and (only := placed.pop()) is not None:
        return plan.steps[only[0]].is_concatenated
    dims = [plan.sources[m].values[name].dims for m, name in zip(models, names, strict=True)]
    has_fixed_batch = all(plan.sources[m].batch_input is None for m in models)
    if not dims[0] or not (has_fixed_batch or any(dim[0].per_batch for dim in dims)):
        raise UnmergeableError("its inputs have no batch along which they could be concatenated")
    return True


def _check_dims(shapes: Sequence[tuple[Size, ...]], is_concatenated: bool) -> None:
    """Refuse values that cannot be concatenated along the first axis, or cannot be the same for all models."""
    if len({dims[1:] if is_concatenated else dims for dims in shapes}) > 1:
        shown = " and ".join(str([dim.fixed or "batch" for dim in dims]) for dims in dict.fromkeys(shapes))
        raise UnmergeableError(f"shapes {shown} cannot be concatenated")
    if is_concatenated and any(dims[0].fixed and dims[0].per_batch for dims in shapes):
        raise UnmergeableError("a batch with something added to it cannot be taken apart again")
    if is_concatenated and any(dim.per_batch for dims in shapes for dim in dims[1:]):
        raise UnmergeableError("the batch shows in more than one axis")


def _record_outputs(plan: MergePlan, step: Step) -> None:
    if not step.once:
        return
    for m in step.models:
        node = plan.sources[m].nodes[step.node_positions[m]]
        for i, name in enumerate(node.output):
            if name:
                plan.produced_once[m, name] = (len(plan.steps), i)
