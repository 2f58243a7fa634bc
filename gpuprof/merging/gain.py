"""The time that merged steps save, and the choice of the steps that save most.

Running an op once for n models reads its weights once instead of n times and launches a single kernel instead of n.
The costs are copies that concatenate inputs and split results, the cuts and sums of a Super-Operator, and cache misses:
values that fit into the cache for a single model may not fit for all models together. The number of multiplications
stays the same.

Values between two steps that both run once stay concatenated; if only one step of the pair runs once, the values are
copied. Such pairwise costs make the best choice the minimum cut between "once" and "apart" in a graph of the steps and
their values (Picard, 1976: closures; Greig et al., 1989: with pairs).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import networkx as nx

from gpuprof.domain.device import Device
from gpuprof.merging.plan import MergePlan, Step, SuperOperator, bias_of
from gpuprof.merging.similarity import is_lookup

_Edge = tuple[object, object, float | None]
_ONCE, _APART = "once", "apart"


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of a device."""

    bytes_per_s: float  #: Memory bandwidth.
    launch_s: float  #: Overhead of launching an op.
    cache_bytes: float = float(2**25)  #: Size of the last-level cache.

    def moved_bytes(self, nbytes: float, working_bytes: float) -> float:
        """Return the bytes moved from memory when an op touches ``nbytes`` while ``working_bytes`` are in use.

        The part that misses the cache grows gradually, as with caches of several levels and sets.
        """
        return nbytes * working_bytes / (working_bytes + self.cache_bytes) if nbytes else 0.0

    def copy_s(self, nbytes: float, launches: int) -> float:
        """Return the time of copying ``nbytes`` by ``launches`` ops: read, fetched before writing, and written."""
        return self.moved_bytes(3.0 * nbytes, 2.0 * nbytes) / self.bytes_per_s + launches * self.launch_s


#: A medium server CPU, the default if no device is given.
TYPICAL_CPU = Rates(bytes_per_s=2e10, launch_s=5e-6)


def device_rates(device: Device) -> Rates:
    """Return the rates of a device."""
    launch_s = device.launch_overhead_us * 1e-6 or TYPICAL_CPU.launch_s
    return Rates(device.dram_bytes_per_s, launch_s, float(device.l2_bytes))


@dataclass(frozen=True, slots=True)
class GainContext:
    """Parameters of the gain of a merge: batches and device speeds."""

    batches: Sequence[int]  #: Batch of each model.
    rates: Rates


@dataclass(slots=True)
class _Crossing:
    """Corresponding values of several models, which can be concatenated."""

    models: tuple[int, ...]
    names: tuple[str, ...]  #: The value's name in each model.
    producer: int | None  #: The step that produces the value for all models; None if each model computes its own.
    consumers: list[int] = field(default_factory=list)  #: Steps that would take the concatenated value.
    outside: bool = False  #: True if models need their own parts, too: as an output, or for an op that runs apart.


class PlanGain:
    """The gain of a plan and of its parts."""

    def __init__(self, plan: MergePlan, setting: GainContext) -> None:
        self._plan, self._setting = plan, setting
        self.steps = {i for i, step in enumerate(plan.steps) if step.is_merged}
        self.step_gains_s = {i: _step_gain_s(plan, plan.steps[i], setting) for i in sorted(self.steps)}
        self._crossings = _find_crossings(plan)

    def gain_s(self, once: Collection[int]) -> float:
        """Return the time saved by running these steps once."""
        total_s = sum(self.step_gains_s[i] for i in once)
        for crossing in self._crossings:
            is_produced_once = crossing.producer in once
            users = [i in once for i in crossing.consumers]
            if is_produced_once and (crossing.outside or not all(users)):
                total_s -= self._copy_s(crossing, len(crossing.models))
            elif not is_produced_once and any(users):
                total_s -= self._copy_s(crossing, 1)
        return total_s

    def best(self) -> set[int]:
        """Return the set of steps with the largest gain when run once; the smallest set of equal gain."""
        graph = nx.DiGraph()
        graph.add_nodes_from((_ONCE, _APART, *self.steps))
        # All edges are reversed: of several minimum cuts, networkx returns that with most nodes beside its source.
        for tail, head, seconds in (*self._step_edges(), *self._copy_edges()):
            if seconds is None:
                graph.add_edge(head, tail)
            else:
                graph.add_edge(head, tail, capacity=round(seconds * 1e12))
        _, (_, chosen) = nx.minimum_cut(graph, _APART, _ONCE)
        return {i for i in self.steps if i in chosen}

    def components(self, among: set[int]) -> list[set[int]]:
        """Return the sets of these steps that pass concatenated values to one another."""
        graph = nx.Graph()
        graph.add_nodes_from(sorted(among))
        for crossing in self._crossings:
            for user in crossing.consumers:
                # A Super-Operator stands alone, because leaving it out does not affect its neighbours.
                if crossing.producer in among and user in among and self._plan.steps[user].once:
                    graph.add_edge(crossing.producer, user)
        return [set(steps) for steps in nx.connected_components(graph)]

    def _step_edges(self) -> Iterator[_Edge]:
        for i, seconds in self.step_gains_s.items():
            yield (_ONCE, i, seconds) if seconds > 0 else (i, _APART, -seconds)

    def _copy_edges(self) -> Iterator[_Edge]:
        """Yield the costs of copies; an extra node per value lets a single copy serve all its consumers."""
        for k, crossing in enumerate(self._crossings):
            producer = _APART if crossing.producer is None else crossing.producer
            concat, split = ("concat", k), ("split", k)
            if crossing.consumers:  # a consumer runs once and the producer apart: the value is concatenated
                yield from ((user, concat, None) for user in crossing.consumers)
                yield concat, producer, self._copy_s(crossing, 1)
            if crossing.producer is not None and (crossing.consumers or crossing.outside):
                yield from ((split, user, None) for user in ([_APART] if crossing.outside else crossing.consumers))
                yield producer, split, self._copy_s(crossing, len(crossing.models))

    def _copy_s(self, crossing: _Crossing, launches: int) -> float:
        sources, batches = self._plan.sources, self._setting.batches
        pairs = zip(crossing.models, crossing.names, strict=True)
        total = sum(sources[m].values[name].bytes_at(batches[m]) for m, name in pairs)
        return self._setting.rates.copy_s(total, launches)


def count_saved_bytes(plan: MergePlan, step: Step) -> int:
    """Return the bytes of weights that a merged step reads less often, in a call with every model present."""
    extra_models = len(step.models) - 1
    if step.super_operator is not None:
        return extra_models * step.super_operator.shared_bytes
    return extra_models * _weight_bytes(plan, step) if step.is_concatenated else 0


def _step_gain_s(plan: MergePlan, step: Step, setting: GainContext) -> float:
    """Return the time saved by running a merged step once, without copies at its borders."""
    rates = setting.rates
    gain_s = count_saved_bytes(plan, step) / rates.bytes_per_s + (len(step.models) - 1) * rates.launch_s
    if step.super_operator is not None:
        return gain_s - _divide_s(plan, step, step.super_operator, setting)
    if not step.is_concatenated:  # all inputs are constants or a value shared by all models
        return gain_s
    sizes = [_touched_bytes(plan, step, m, setting.batches[m]) for m in step.models]
    added_bytes = rates.moved_bytes(sum(sizes), sum(sizes)) - sum(rates.moved_bytes(size, size) for size in sizes)
    return gain_s - added_bytes / rates.bytes_per_s


def _find_crossings(plan: MergePlan) -> list[_Crossing]:
    """Return all values at the borders of merged steps of a plan."""
    crossings: dict[object, _Crossing] = {}
    for i, step in enumerate(plan.steps):
        for position, is_concatenated in enumerate(step.concatenated_inputs if step.is_merged else ()):
            if is_concatenated:
                _record_reader(plan, crossings, step, position).consumers.append(i)
    for step in plan.steps:
        for m in step.models:
            for position, name in enumerate(plan.node(step, m).input):
                inside = step.is_merged and any(step.concatenated_inputs[position : position + 1])
                _record_separate_use(plan, crossings, m, name, step if inside else None)
    for m, source in enumerate(plan.sources):
        for name in source.outputs:
            _record_separate_use(plan, crossings, m, name, None)
    return list(crossings.values())


def _record_reader(plan: MergePlan, crossings: dict[object, _Crossing], step: Step, position: int) -> _Crossing:
    names = tuple(plan.node(step, m).input[position] for m in step.models)
    places = {plan.produced_once.get((m, name)) for m, name in zip(step.models, names, strict=True)}
    place = places.pop() if len(places) == 1 else None
    if place is not None and plan.steps[place[0]].models == step.models:
        return crossings.setdefault(place, _Crossing(step.models, names, place[0]))
    return crossings.setdefault((step.models, names), _Crossing(step.models, names, None))


def _record_separate_use(
    plan: MergePlan, crossings: dict[object, _Crossing], model: int, name: str, step: Step | None
) -> None:
    """Record that a model uses its own part of a concatenated value."""
    place = plan.produced_once.get((model, name))
    if place is None or not plan.steps[place[0]].is_concatenated:
        return
    maker = plan.steps[place[0]]
    if step is not None and maker.models == step.models:
        return
    names = tuple(plan.node(maker, m).output[place[1]] for m in maker.models)
    crossings.setdefault(place, _Crossing(maker.models, names, place[0])).outside = True


def _weight_bytes(plan: MergePlan, step: Step) -> int:
    first = step.models[0]
    source, node = plan.sources[first], plan.node(step, first)
    if is_lookup(node):
        return 0
    names = {name for name in node.input if name in source.weights}
    operator = plan.group(step).operators.get(first)
    if operator is not None:  # the weight may be the input of a DequantizeLinear
        names.add(operator.weight)
    return sum(source.weight_bytes(name) for name in names)


def _touched_bytes(plan: MergePlan, step: Step, model: int, batch: int) -> float:
    """Return the bytes of activations that an op reads and writes."""
    source, node = plan.sources[model], plan.node(step, model)
    names = {name for name in (*node.input, *node.output) if name in source.values and name not in source.weights}
    return sum(source.values[name].bytes_at(batch) for name in names)


def _divide_s(plan: MergePlan, step: Step, shared: SuperOperator, setting: GainContext) -> float:
    """Return the extra time of a Super-Operator: cutting its product, joining the other outputs, adding biases."""
    group, total_s = plan.group(step), 0.0
    for m in step.models:
        output_bytes = plan.sources[m].values[group.operators[m].node.output[0]].bytes_at(setting.batches[m])
        copied_bytes = [output_bytes * shared.outputs / shared.totals[m]]  # the model's part of the product
        if not shared.is_complete(m):  # the other outputs, joined to the product
            copied_bytes += [output_bytes, 0.0]
        if bias_of(group, m) is not None:
            copied_bytes.append(output_bytes)
        total_s += sum(setting.rates.copy_s(nbytes, 1) for nbytes in copied_bytes)
    return total_s
