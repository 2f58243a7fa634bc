"""What merging a part of the graphs is worth: time saved and added, from FLOPs, bytes and launches.

Running an op once for n models reads its weights once instead of n times and launches one kernel instead of n.
Against that stand the copies that lay inputs end to end and take results apart again, each a kernel that reads and
writes its data, and for a Super-Operator its cuts and sums. Multiplications are as many as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuprof.device import Device
from gpuprof.merging.plan import Plan, Step
from gpuprof.merging.super_operator import SuperOperator, bias_of


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a device is.

    Attributes
    ----------
    flops_per_s, bytes_per_s : float
        Of float32 arithmetic, and of memory.
    launch_s : float
        What an op costs beside its work.
    """

    flops_per_s: float
    bytes_per_s: float
    launch_s: float


#: A middling server core count and memory: used where no device is given.
TYPICAL_CPU = Rates(flops_per_s=2e11, bytes_per_s=2e10, launch_s=5e-6)


def rates_of(device: Device) -> Rates:
    """Return the rates of a device from its peaks."""
    return Rates(device.flops_per_s["float32"], device.dram_bytes_per_s, max(device.launch_overhead_us, 2.0) * 1e-6)


@dataclass(frozen=True, slots=True)
class Gain:
    """What merging some steps saves and adds at one call with every model present.

    Attributes
    ----------
    saved_bytes, added_bytes : int
        Weights read less often; copies.
    saved_launches, added_launches : int
    added_flops : int
        Sums that put results together.
    """

    saved_bytes: int = 0
    added_bytes: int = 0
    saved_launches: int = 0
    added_launches: int = 0
    added_flops: int = 0

    def __add__(self, other: Gain) -> Gain:
        return Gain(
            self.saved_bytes + other.saved_bytes,
            self.added_bytes + other.added_bytes,
            self.saved_launches + other.saved_launches,
            self.added_launches + other.added_launches,
            self.added_flops + other.added_flops,
        )

    def seconds(self, rates: Rates) -> float:
        """Return the time saved, negative where merging costs time."""
        moved = (self.saved_bytes - self.added_bytes) / rates.bytes_per_s
        launched = (self.saved_launches - self.added_launches) * rates.launch_s
        return moved + launched - self.added_flops / rates.flops_per_s


@dataclass(frozen=True, slots=True)
class Region:
    """Groups that run once and hand each other concatenated values, or one Super-Operator, and what that is worth.

    Attributes
    ----------
    groups : tuple of int
    weighted : tuple of int
        Those with weighted operators.
    gain : Gain
    is_constant : bool
        Whether it works on constants alone, which all models then share without any copy.
    """

    groups: tuple[int, ...]
    weighted: tuple[int, ...]
    gain: Gain
    is_constant: bool = False


def find_regions(plan: Plan, batches: Sequence[int]) -> list[Region]:
    """Return the regions of a plan with their gains when each model runs at its batch.

    Parameters
    ----------
    plan : Plan
    batches : sequence of int
        One a model.
    """
    component = _components(plan)
    members: dict[int, list[int]] = {}
    for index, root in component.items():
        members.setdefault(root, []).append(index)
    crossings = _crossings(plan, component, batches)
    regions = []
    for root in sorted(members):
        steps = [plan.steps[i] for i in members[root]]
        gain = crossings.get(root, Gain())
        for step in steps:
            gain += _own_gain(plan, step, batches)
        weighted = tuple(step.group for step in steps if plan.group(step).operators)
        constant = all(step.once and not any(axis is not None for axis in step.output_axes) for step in steps)
        regions.append(Region(tuple(step.group for step in steps), weighted, gain, constant))
    return regions


def _components(plan: Plan) -> dict[int, int]:
    """Return for each merged step the first step of its region."""
    root = {i: i for i, step in enumerate(plan.steps) if step.once or step.super_operator is not None}

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for i, step in enumerate(plan.steps):
        if not step.once:
            continue  # a Super-Operator stands alone: it can be left out without its surroundings
        for position, axis in enumerate(step.input_axes):
            place = _producer(plan, step, position)
            if axis is not None and place is not None and plan.steps[place[0]].models == step.models:
                a, b = sorted((find(i), find(place[0])))
                root[b] = a
    return {i: find(i) for i in root}


def _producer(plan: Plan, step: Step, position: int) -> tuple[int, int] | None:
    model = step.models[0]
    name = plan.sources[model].nodes[step.node_positions[model]].input[position]
    return plan.laid.get((model, name))


def _own_gain(plan: Plan, step: Step, batches: Sequence[int]) -> Gain:
    again = len(step.models) - 1
    if step.super_operator is not None:
        return _super_gain(plan, step, step.super_operator, batches)
    source = plan.sources[step.models[0]]
    node = source.nodes[step.node_positions[step.models[0]]]
    names = {name for name in node.input if name in source.weights}
    operator = plan.group(step).operators.get(step.models[0])
    if operator is not None:  # its weight may stand behind a DequantizeLinear
        names.add(operator.weight)
    weights = sum(source.weight_bytes(name) for name in names)
    return Gain(saved_bytes=again * weights, saved_launches=again)


def _super_gain(plan: Plan, step: Step, shared: SuperOperator, batches: Sequence[int]) -> Gain:
    group, n = plan.group(step), len(step.models)
    first = step.models[0]
    weight = group.operators[first].weight
    item = plan.sources[first].array(weight).dtype.itemsize
    per = max(1, plan.sources[first].array(weight)[0, 0].size)
    gain = Gain(saved_bytes=(n - 1) * shared.inputs * shared.outputs * item * per, saved_launches=n - 1)
    for m in step.models:
        node = group.operators[m].node
        source = plan.sources[m]
        given, made = (source.values[name].bytes_at(batches[m]) for name in (node.input[0], node.output[0]))
        out = made * shared.outputs // shared.totals[m][1]
        rest_in = given * (shared.totals[m][0] - shared.inputs) // shared.totals[m][0]
        if not shared.takes_all(m):  # cut, rest, sum
            gain += Gain(added_bytes=2 * given + 2 * rest_in + 3 * out, added_launches=5, added_flops=out // item)
        if not shared.gives_all(m):  # other outputs, put in place
            gain += Gain(added_bytes=2 * made, added_launches=2)
        if bias_of(source, group, m) is not None:
            gain += Gain(added_bytes=2 * made, added_launches=1, added_flops=made // item)
    return gain


def _crossings(plan: Plan, component: Mapping[int, int], batches: Sequence[int]) -> dict[int, Gain]:
    """Return for each region what its copies at the border cost."""
    found: dict[int, Gain] = {}
    seen: set[object] = set()

    def charge(root: int, key: object, nbytes: int, launches: int) -> None:
        if key not in seen:
            seen.add(key)
            found[root] = found.get(root, Gain()) + Gain(added_bytes=2 * nbytes, added_launches=launches)

    for i, step in enumerate(plan.steps):
        nodes = {m: plan.sources[m].nodes[p] for m, p in step.node_positions.items()}
        for position, axis in enumerate(step.input_axes if i in component else ()):
            names = tuple(nodes[m].input[position] for m in step.models)
            place = plan.laid.get((step.models[0], names[0]))
            direct = place is not None and plan.steps[place[0]].models == step.models
            if axis is not None and not direct:
                total = sum(
                    plan.sources[m].values[x].bytes_at(batches[m]) for m, x in zip(step.models, names, strict=True)
                )
                charge(component[i], ("in", names), total, 1)
        if step.super_operator is not None:
            for m in step.models:
                charge(component[i], ("part", i, m), plan.sources[m].values[nodes[m].output[0]].bytes_at(batches[m]), 1)
        for m, node in nodes.items():
            for position, name in enumerate(node.input):
                whole = step.once and position < len(step.input_axes)
                _charge_exit(plan, component, step if whole else None, m, name, batches, charge)
    for m, source in enumerate(plan.sources):
        for name in source.outputs:
            _charge_exit(plan, component, None, m, name, batches, charge)
    return found


def _charge_exit(
    plan: Plan,
    component: Mapping[int, int],
    step: Step | None,
    model: int,
    name: str,
    batches: Sequence[int],
    charge: object,
) -> None:
    """Charge the region that computes a value for taking out one model's part, if that is what is used."""
    place = plan.laid.get((model, name))
    if place is None or plan.steps[place[0]].output_axes[place[1]] is None:
        return
    if step is not None and plan.steps[place[0]].models == step.models:
        return
    assert callable(charge)
    charge(component[place[0]], ("out", model, name), plan.sources[model].values[name].bytes_at(batches[model]), 1)
