"""The choice of merged steps to run once that saves most time, computed exactly as a minimum cut.

Each mergeable step has a gain of its own, positive or negative. Values between two steps that both run once stay
concatenated; if only one step of the pair runs once, the values are copied. Such pairwise costs make the best choice
the minimum cut between "once" and "apart" in a graph of the steps and their values (Picard, 1976: closures; Greig et
al., 1989: with pairs).
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

#: Finest unit of capacities, in seconds; upper bound of the sum of all capacities; capacity that no cut can contain.
_UNIT_S, _MOST, _NEVER = 1e-9, 2**29, 2**30

_Edge = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Region:
    """Connected groups that run once and pass concatenated values, or a single Super-Operator, and their gain."""

    groups: tuple[int, ...]
    weighted: tuple[int, ...]  #: Groups with weighted operators, or with ops that hold weights.
    gain: MergeGain
    is_constant: bool = False  #: Whether all values are constants, which models share without copies.


class PlanGain:
    """The gain of a plan and of its parts."""

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
        """Return the gain of running these steps once."""
        total = sum((self.own[i] for i in once), MergeGain())
        for k, crossing in enumerate(self.crossings):
            total += self._copies(k, crossing, once)
        return total

    def best(self) -> set[int]:
        """Return the set of steps with the largest gain when run once; the smallest set of equal gain."""
        place = {step: 2 + at for at, step in enumerate(self.steps)}
        edges = [*self._own_edges(place), *self._copy_edges(place)]
        if self._setting.rates.blocked_images:
            edges += self._image_edges(place)
        nodes = 1 + max((max(tail, head) for tail, head, _ in edges), default=1)
        kept = _side_of_source(edges, nodes)
        return {i for i in self.steps if place[i] in kept}

    def _own_edges(self, place: Mapping[int, int]) -> Iterator[_Edge]:
        """Yield an edge with each step's own gain; node 0, the source, means once, node 1, the sink, apart."""
        for i in self.steps:
            capacity = self._capacity(self.own[i])
            yield (0, place[i], capacity) if capacity > 0 else (place[i], 1, -capacity)

    def _copy_edges(self, place: Mapping[int, int]) -> Iterator[_Edge]:
        """Yield the costs of copies; an extra node per value lets a single copy serve all its consumers."""
        free = 2 + len(self.steps)
        for k, crossing in enumerate(self.crossings):
            producer = 1 if crossing.producer is None else place[crossing.producer]
            users = [place[i] for i in crossing.consumers]
            if users:  # a consumer runs once and the producer apart: the value is concatenated
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
        """Return the connected regions when all merged steps run once."""
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
        """Return the connected sets of steps not in ``once``, with the additional gain of running each set once."""
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
                # A Super-Operator forms a region of its own, because leaving it out does not affect its neighbours.
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
    """Return the nodes on node 0's side of the minimum cut between 0 and 1 with the fewest nodes on that side."""
    capacity: dict[tuple[int, int], int] = {}
    for tail, head, most in edges:
        if tail != head and most > 0:
            # SciPy's maximum flow takes 32-bit capacities: parallel edges are joined and their sums capped.
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
