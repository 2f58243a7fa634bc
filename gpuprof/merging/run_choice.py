"""Which merged steps to run once: the choice that saves most time, found exactly as a minimum cut.

Each step that could run once is worth something by itself, positive or negative. Between two of them that both run
once values stay end to end; where only one does, they are copied. Every such copy is a price on one side of a pair
that the other side alone avoids, so the best choice is the cut of least capacity between "once" and "apart" in a
graph of the steps and their values (Picard, 1976: closures; Greig et al., 1989: with pairs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from gpuprof.merging.branches import image_branches
from gpuprof.merging.crossing import Crossing, concat_gain, find_crossings, split_gain
from gpuprof.merging.gain import MergeGain
from gpuprof.merging.plan import MergePlan
from gpuprof.merging.step_gain import GainContext, step_gain

#: The finest step of capacities, in seconds; what all of them together make at most; and what no cut can pay.
_UNIT_S, _MOST, _NEVER = 1e-9, 2**29, 2**30

_Edge = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Region:
    """Groups that run once and hand each other concatenated values, or one Super-Operator, and what that is worth."""

    groups: tuple[int, ...]
    weighted: tuple[int, ...]  #: Those with weighted operators, or with ops that hold weights.
    gain: MergeGain
    is_constant: bool = False  #: Whether it works on constants alone, which all models then share without any copy.


class PlanGain:
    """What a plan is worth, and each part of it."""

    def __init__(self, plan: MergePlan, setting: GainContext) -> None:
        self._plan, self._setting = plan, setting
        self.steps = [i for i, step in enumerate(plan.steps) if step.is_merged]
        self.own = {i: step_gain(plan, plan.steps[i], setting) for i in self.steps}
        self.crossings = find_crossings(plan)
        self._concat = [concat_gain(plan, crossing, setting) for crossing in self.crossings]
        self._split = [split_gain(plan, crossing, setting) for crossing in self.crossings]
        every = (*self.own.values(), *self._concat, *self._split)
        self._unit_s = max(_UNIT_S, sum(abs(gain.seconds(setting.rates)) for gain in every) / _MOST)

    def gain(self, once: set[int]) -> MergeGain:
        """Return what running these steps once is worth."""
        total = sum((self.own[i] for i in once), MergeGain())
        for k, crossing in enumerate(self.crossings):
            total += self._copies(k, crossing, once)
        return total

    def best(self) -> set[int]:
        """Return the steps whose running once is worth most together; of equal choices the smallest."""
        place = {step: 2 + at for at, step in enumerate(self.steps)}
        edges = [*self._own_edges(place), *self._copy_edges(place)]
        if self._setting.rates.blocked_images:
            edges += self._image_edges(place)
        nodes = 1 + max((max(tail, head) for tail, head, _ in edges), default=1)
        kept = _side_of_source(edges, nodes)
        return {i for i in self.steps if place[i] in kept}

    def _own_edges(self, place: Mapping[int, int]) -> Iterator[_Edge]:
        """Yield what each step is worth by itself; node 0, the source, stands for once, node 1, the sink, for apart."""
        for i in self.steps:
            capacity = self._capacity(self.own[i])
            yield (0, place[i], capacity) if capacity > 0 else (place[i], 1, -capacity)

    def _copy_edges(self, place: Mapping[int, int]) -> Iterator[_Edge]:
        """Yield the prices of copies; a node of its own lets a value be copied once for all that need it."""
        free = 2 + len(self.steps)
        for k, crossing in enumerate(self.crossings):
            producer = 1 if crossing.producer is None else place[crossing.producer]
            users = [place[i] for i in crossing.consumers]
            if users:  # one of them once, its producer not: the value is concatenated
                yield from ((user, free, _NEVER) for user in users)
                yield free, producer, -self._capacity(self._concat[k])
                free += 1
            if crossing.producer is not None and (users or crossing.outside):
                yield from ((free, user, _NEVER) for user in ([1] if crossing.outside else users))
                yield producer, free, -self._capacity(self._split[k])
                free += 1

    def _image_edges(self, place: Mapping[int, int]) -> Iterator[_Edge]:
        for join, linked in image_branches(self._plan):
            joint = place.get(join, 1)
            for branch in (place.get(i, 1) for i in linked):
                yield from ((a, b, _NEVER) for a, b in ((joint, branch), (branch, joint)) if a != 1)

    def _capacity(self, gain: MergeGain) -> int:
        return round(gain.seconds(self._setting.rates) / self._unit_s)

    def regions(self) -> list[Region]:
        """Return what hangs together, when all merged steps run once."""
        root = self._components()
        members: dict[int, list[int]] = {}
        for i in self.steps:
            members.setdefault(root[i], []).append(i)
        costs: dict[int, MergeGain] = {}
        once = set(self.steps)
        for k, crossing in enumerate(self.crossings):
            owner = crossing.consumers[0] if crossing.producer is None else crossing.producer
            costs[root[owner]] = costs.get(root[owner], MergeGain()) + self._copies(k, crossing, once)
        regions = []
        for first, steps in sorted(members.items()):
            gain = sum((self.own[i] for i in steps), costs.get(first, MergeGain()))
            drawn = [self._plan.steps[i] for i in steps]
            weighted = tuple(step.group for step in drawn if step.held or self._plan.group(step).operators)
            constant = all(step.once and not any(axis is not None for axis in step.output_axes) for step in drawn)
            regions.append(Region(tuple(step.group for step in drawn), weighted, gain, constant))
        return regions

    def apart(self, once: set[int]) -> list[tuple[set[int], MergeGain]]:
        """Return what hangs together among the steps not in ``once``, with what it would be worth to run it, too."""
        root = self._components(set(self.steps) - once)
        sets: dict[int, set[int]] = {}
        for i in root:
            sets.setdefault(root[i], set()).add(i)
        base = self.gain(once)
        return [(steps, _subtract_gains(self.gain(once | steps), base)) for _, steps in sorted(sets.items())]

    def _copies(self, k: int, crossing: Crossing, once: set[int]) -> MergeGain:
        is_produced_once = crossing.producer in once
        users = [i in once for i in crossing.consumers]
        if is_produced_once and (crossing.outside or not all(users)):
            return self._split[k]
        return self._concat[k] if not is_produced_once and any(users) else MergeGain()

    def _components(self, among: set[int] | None = None) -> dict[int, int]:
        root = {i: i for i in self.steps if among is None or i in among}

        def find(i: int) -> int:
            while root[i] != i:
                root[i] = root[root[i]]
                i = root[i]
            return i

        for crossing in self.crossings:
            for user in crossing.consumers:
                # A Super-Operator stands alone: it can be left out without its surroundings.
                if crossing.producer in root and user in root and self._plan.steps[user].once:
                    a, b = sorted((find(user), find(crossing.producer)))
                    root[b] = a
        return {i: find(i) for i in root}


def _subtract_gains(a: MergeGain, b: MergeGain) -> MergeGain:
    return MergeGain(
        a.saved_bytes - b.saved_bytes,
        a.added_bytes - b.added_bytes,
        a.saved_launches - b.saved_launches,
        a.added_launches - b.added_launches,
        a.added_flops - b.added_flops,
        a.measured_s - b.measured_s,
    )


def _side_of_source(edges: Sequence[_Edge], nodes: int) -> set[int]:
    """Return the nodes that stay with node 0 in the least cut between 0 and 1 that keeps fewest there."""
    capacity: dict[tuple[int, int], int] = {}
    for tail, head, most in edges:
        if tail != head and most > 0:
            # SciPy's maximum flow takes 32-bit capacities: parallel edges become one, and what no cut can pay stays so.
            capacity[tail, head] = min(_NEVER, capacity.get((tail, head), 0) + most)
    if not capacity:
        return {0}
    ends = np.array(list(capacity), np.int32)
    most_of = np.array(list(capacity.values()), np.int32)
    graph: Any = csr_array((most_of, (ends[:, 0], ends[:, 1])), shape=(nodes, nodes))
    residual: Any = csr_array(graph.astype(np.int64) - maximum_flow(graph, 0, 1).flow)
    residual.data[residual.data < 0] = 0
    residual.eliminate_zeros()
    reached = breadth_first_order(residual, 0, directed=True, return_predecessors=False)
    return {int(node) for node in reached}
