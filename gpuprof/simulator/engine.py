"""Runs a deployment map under arrivals: feeds the compiled kernel, and changes the cluster where failures are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from gpuprof.deployment import DeploymentMap
from gpuprof.errors import InputError
from gpuprof.simulator import kernel
from gpuprof.simulator.arrivals import NS_PER_S, Arriving
from gpuprof.simulator.cluster import Options, Place, build_cluster, places_of
from gpuprof.simulator.heap import ARRIVAL, COMPLETION, code_of, ident_of, priority_of, push
from gpuprof.simulator.outcome import Outcome, outcome_of
from gpuprof.simulator.state import Cluster, State, Tally, chain, new_state, new_tally
from gpuprof.simulator.streams import arrival_streams

_FIRST_PLACES = 2**14
_STORED = 2**20  # arrivals, and service times, drawn ahead for all models or replicas together
_SLICES = 200  # of the duration, after each of which progress is told
_FOREVER = 2**62


def simulate(
    deployment: DeploymentMap,
    arrivals: Mapping[str, Arriving],
    options: Options,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Simulate the map; the same arguments give the same outcome, bit for bit.

    Parameters
    ----------
    deployment : DeploymentMap
    arrivals : mapping of str to Arriving
        By model of the map; one that is not named gets no requests.
    options : Options
    progress : callable, optional
        Told the fraction done, now and then.

    Raises
    ------
    InputError
        For arrivals of a model that the map lacks, or a map that cannot be simulated (see `places_of`).
    """
    tally = simulate_to_tally(deployment, arrivals, options, progress)
    return outcome_of(deployment, places_of(deployment), tally, options)


def simulate_to_tally(
    deployment: DeploymentMap,
    arrivals: Mapping[str, Arriving],
    options: Options,
    progress: Callable[[float], None] | None = None,
) -> Tally:
    """Simulate, and return the counts as they are; see `simulate`."""
    places = places_of(deployment)
    if unknown := sorted(set(arrivals) - set(deployment.models)):
        raise InputError(f"the map has no model {unknown[0]!r}", f"it has {', '.join(sorted(deployment.models))}")
    run = _Run(deployment, places, arrivals, options)
    run.to_end(progress or (lambda fraction: None))
    return run.tally


@dataclass(frozen=True, slots=True)
class _Change:
    """At ``time`` these replicas begin to take requests or cease to; those that fail do not finish what they have."""

    time: int
    alive: int
    replicas: tuple[int, ...]
    fails: bool = False


class _Run:
    """One simulation under way."""

    def __init__(
        self, deployment: DeploymentMap, places: tuple[Place, ...], arrivals: Mapping[str, Arriving], options: Options
    ) -> None:
        models, replicas = len(deployment.models), len(places)
        self.end = round(options.duration_s * NS_PER_S)
        begin = min(round(options.warmup_s * NS_PER_S), self.end - 1)
        self.cluster: Cluster = build_cluster(deployment, places, options)
        self.tally: Tally = new_tally(models, replicas, begin, self.end)
        store, factors = _share(_STORED, models), _share(_STORED, replicas)
        self.state: State = new_state(self.cluster, min(_FIRST_PLACES, options.max_in_system), store, factors)
        _, for_factors = np.random.SeedSequence(options.seed).spawn(2)
        self._streams = arrival_streams(deployment, arrivals, options.seed)
        self.state.alive[list(options.absent)] = 0
        self._factors = [np.random.Generator(np.random.PCG64(seed)) for seed in for_factors.spawn(replicas)]
        self._changes = _changes(options, places)
        self._most_places = options.max_in_system
        self.state.turn[:] = -1 if options.routing == "round-robin" else 0  # as the rules of `gpuprof.routing` begin
        self.state.factor_position[self.cluster.cv > 0] = factors
        self._refill_factors()
        for model in range(models):
            self._refill_arrivals(model)

    def to_end(self, progress: Callable[[float], None]) -> None:
        """Run until every request has left."""
        ends = {self.end * part // _SLICES for part in range(1, _SLICES)}
        for time in sorted(ends | {change.time for change in self._changes} | {_FOREVER}):
            self._run_until(time)
            for change in self._changes:
                if change.time == time:
                    self._apply(change)
            progress(min(1.0, time / self.end))

    def _run_until(self, time: int) -> None:
        while (status := kernel.run(self.cluster, self.state, self.tally, time)) not in (kernel.TIME_UP, kernel.EMPTY):
            if status == kernel.NEEDS_PLACES:
                self._grow()
            self._refill_factors()
            for model in np.flatnonzero(self.state.store_position >= self.state.store_size):
                self._refill_arrivals(int(model))

    def _refill_arrivals(self, model: int) -> None:
        state, stream = self.state, self._streams[model]
        if stream is None:
            return
        times = stream.take(state.store.shape[1])
        times = times[times < self.end]
        if len(times) < state.store.shape[1]:
            self._streams[model] = None
        state.store[model, : len(times)] = times
        state.store_position[model], state.store_size[model] = 0, len(times)
        if len(times):
            push(state.calendar, times[0], code_of(ARRIVAL, model))

    def _refill_factors(self) -> None:
        """Draw service times: gamma with mean 1, as the queueing models assume."""
        state, cluster = self.state, self.cluster
        count = state.factors.shape[1]
        for replica in np.flatnonzero((state.factor_position >= count) & (cluster.cv > 0)):
            scv = float(cluster.cv[replica]) ** 2
            state.factors[replica] = scv * self._factors[replica].standard_gamma(1.0 / scv, count)
            state.factor_position[replica] = 0

    def _grow(self) -> None:
        """Make room for twice as many requests; at the limit, let the kernel turn away what has no room."""
        state = self.state
        had = len(state.next)
        have = min(2 * had, self._most_places)
        if have == had:
            self.cluster.settings[3] = 1
            return
        more = np.zeros(have - had, np.int64)
        self.state = state._replace(
            next=np.concatenate([state.next, chain(had, have)]),
            arrived=np.concatenate([state.arrived, more]),
            joined=np.concatenate([state.joined, more]),
        )
        self.state.free[0] = had

    def _apply(self, change: _Change) -> None:
        for replica in change.replicas:
            self.state.alive[replica] = change.alive
            if change.alive:
                self.state.idle_since[replica] = max(change.time, int(self.state.idle_since[replica]))
        if change.fails:
            homeless = [(replica, place) for replica in change.replicas for place in self._empty(replica)]
            for replica, place in homeless:
                model = int(self.cluster.replica_model[replica])
                kernel.join(self.cluster, self.state, self.tally, model, place, change.time)
                self._refill_factors()

    def _empty(self, replica: int) -> list[int]:
        """Take everything from a replica: what was running starts anew elsewhere, before what was waiting."""
        state, cluster = self.state, self.cluster
        first, last = int(cluster.first_process[replica]), int(cluster.first_process[replica + 1])
        found = [place for process in range(first, last) for place in self._chain(int(state.flight[process]))]
        if state.waiting[replica]:
            found += self._chain(int(state.queue_head[replica]))
        state.queue_head[replica] = -1
        state.waiting[replica] = 0
        state.flight[first:last] = -1
        state.done_at[first:last] = -1
        state.expected_at[first:last] = 0
        state.free_processes[replica] = last - first
        self._forget_completions(first, last)
        return found

    def _forget_completions(self, first: int, last: int) -> None:
        """Take the ends of batches that will not end from the calendar."""
        calendar = self.state.calendar
        size = int(calendar.size[0])
        events = list(zip(calendar.times[:size].tolist(), calendar.codes[:size].tolist(), strict=True))
        calendar.size[0] = 0
        for time, code in events:
            if not (priority_of(code) == COMPLETION and first <= ident_of(code) < last):
                push(calendar, time, code)

    def _chain(self, place: int) -> list[int]:
        found = []
        while place >= 0:
            found.append(place)
            place = int(self.state.next[place])
        return found


def _share(total: int, among: int) -> int:
    return max(64, min(2**16, total // among))


def _changes(options: Options, places: tuple[Place, ...]) -> list[_Change]:
    changes = []
    for failure in options.failures:
        hit = tuple(
            position
            for position, place in enumerate(places)
            if place.node.name == failure.node and failure.gpu in (None, place.gpu.index)
        )
        changes.append(_Change(round(failure.at_s * NS_PER_S), 0, hit, fails=True))
        if failure.lasts_s is not None:
            changes.append(_Change(round((failure.at_s + failure.lasts_s) * NS_PER_S), 1, hit))
    for switch in options.switches:
        time = round(switch.at_s * NS_PER_S)
        changes += [_Change(time, 1, switch.begin), _Change(time, 0, switch.end)]
    return sorted(changes, key=lambda change: change.time)
