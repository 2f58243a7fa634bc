"""Values between steps, and the cost of concatenating or splitting them where only one side is merged."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuprof.merging.gain import MergeGain
from gpuprof.merging.plan import MergePlan, Step
from gpuprof.merging.step_gain import CONVOLUTIONS, GainContext, absorbed_input, is_absorbed, source_node


@dataclass(slots=True)
class Crossing:
    """Corresponding values of several models, which can be concatenated."""

    models: tuple[int, ...]
    names: tuple[str, ...]  #: The value's name in each model.
    producer: int | None  #: The step that produces the value for all models; None if each model computes its own.
    consumers: list[int] = field(default_factory=list)  #: Steps that would take the concatenated value.
    outside: bool = False  #: True if models need their own parts, too: as an output, or for an op that runs apart.


def find_crossings(plan: MergePlan) -> list[Crossing]:
    """Return all values consumed or produced by merged steps of a plan."""
    crossings: dict[object, Crossing] = {}
    for i, step in enumerate(plan.steps):
        for position, axis in enumerate(step.input_axes if step.is_merged else ()):
            if axis is not None:
                _record_reader(plan, crossings, step, position).consumers.append(i)
    for step in plan.steps:
        for m in step.models:
            for position, name in enumerate(source_node(plan, step, m).input):
                inside = step.is_merged and position < len(step.input_axes) and step.input_axes[position] is not None
                _record_separate_use(plan, crossings, m, name, step if inside else None)
    for m, source in enumerate(plan.sources):
        for name in source.outputs:
            _record_separate_use(plan, crossings, m, name, None)
    return list(crossings.values())


def concat_gain(plan: MergePlan, crossing: Crossing, setting: GainContext) -> MergeGain:
    """Return the cost of concatenating a value."""
    return _copies(plan, crossing, setting, 1)


def split_gain(plan: MergePlan, crossing: Crossing, setting: GainContext) -> MergeGain:
    """Return the cost of splitting a value."""
    return _copies(plan, crossing, setting, len(crossing.models))


def _record_reader(plan: MergePlan, crossings: dict[object, Crossing], step: Step, position: int) -> Crossing:
    names = tuple(source_node(plan, step, m).input[position] for m in step.models)
    place = plan.produced_once.get((step.models[0], names[0]))
    direct = place is not None and plan.steps[place[0]].models == step.models
    same = direct and {plan.produced_once.get((m, name)) for m, name in zip(step.models, names, strict=True)} == {place}
    if same and place is not None:
        return crossings.setdefault(place, Crossing(step.models, names, place[0]))
    return crossings.setdefault((step.models, names), Crossing(step.models, names, None))


def _record_separate_use(
    plan: MergePlan, crossings: dict[object, Crossing], model: int, name: str, step: Step | None
) -> None:
    """Record that a model needs its own part of a concatenated value."""
    place = plan.produced_once.get((model, name))
    if place is None or plan.steps[place[0]].output_axes[place[1]] is None:
        return
    maker = plan.steps[place[0]]
    if step is not None and maker.models == step.models:
        return
    names = tuple(source_node(plan, maker, m).output[place[1]] for m in maker.models)
    crossings.setdefault(place, Crossing(maker.models, names, place[0])).outside = True


def _copies(plan: MergePlan, crossing: Crossing, setting: GainContext, launches: int) -> MergeGain:
    """Return the cost of copying a value, including changes of layout and fusions prevented by the copy."""
    total = sum(
        plan.sources[m].values[name].bytes_at(setting.batches[m])
        for m, name in zip(crossing.models, crossing.names, strict=True)
    )
    passes = 1
    if setting.rates.blocked_images and _is_between_images(plan, crossing):
        passes += 2
    if _breaks_fusion(plan, crossing):
        passes += 1
    return MergeGain(
        added_bytes=round(passes * setting.rates.copied_bytes(total)), added_launches=launches + (passes - 1)
    )


def _is_between_images(plan: MergePlan, crossing: Crossing) -> bool:
    """Return whether a convolution produces or consumes the value."""
    source, name = plan.sources[crossing.models[0]], crossing.names[0]
    maker = source.maker(name)
    is_image = maker is not None and (maker.op_type in CONVOLUTIONS or is_absorbed(source, maker))
    return is_image or any(user.op_type in CONVOLUTIONS for user in source.users(name))


def _breaks_fusion(plan: MergePlan, crossing: Crossing) -> bool:
    """Return whether some consumer is fused into the op that produces the value."""
    source, name = plan.sources[crossing.models[0]], crossing.names[0]
    return any(absorbed_input(source, user) == name for user in source.users(name))
