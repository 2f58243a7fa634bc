"""Runs a deployment map under arrivals: feeds the compiled kernel, and applies failures and switches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.arrival_process import NS_PER_S, ArrivalProcess
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.errors import InputError
from gpuprof.simulator import changes, kernel
from gpuprof.simulator.changes import changes_of
from gpuprof.simulator.choice import set_alive
from gpuprof.simulator.cluster import PlacedInstance, SimulationOptions, build_cluster, places_of
from gpuprof.simulator.compilation import EventLoop
from gpuprof.simulator.heap import ARRIVAL, code_of, push
from gpuprof.simulator.interference import Interference, NeighbourSlowdowns
from gpuprof.simulator.load import arrival_streams
from gpuprof.simulator.outcome import SimulationOutcome, outcome_of
from gpuprof.simulator.state import ClusterArrays, State, Tally, new_state, new_tally

#: Number of arrivals drawn ahead for all models together, and of service times for all replicas together.
_STORED = 2**20
#: Number of parts of the duration after each of which progress is reported.
_SLICES = 200
#: A time in nanoseconds after every event.
_FOREVER = int(np.iinfo(np.int64).max)


def simulate(
    deployment: DeploymentMap,
    arrivals: Mapping[str, ArrivalProcess],
    options: SimulationOptions,
    progress: Callable[[float], None] | None = None,
    interference: Interference | None = None,
) -> SimulationOutcome:
    """Simulate the map; the same arguments give the same outcome, bit for bit.

    Raises `InputError` for arrivals of a model that the map lacks, or a map that cannot be simulated (see `places_of`).
    ``arrivals``: by model; other models of the map get no requests; ``progress``: called with the fraction done;
    ``interference``: slowdown of batches by running neighbours, see `gpuprof.simulator.interference`; None: the map's
    times, which assume that all neighbours always run.
    """
    tally = simulate_to_tally(deployment, arrivals, options, progress, interference)
    return outcome_of(deployment, places_of(deployment), tally, options)


def simulate_to_tally(
    deployment: DeploymentMap,
    arrivals: Mapping[str, ArrivalProcess],
    options: SimulationOptions,
    progress: Callable[[float], None] | None = None,
    interference: Interference | None = None,
) -> Tally:
    """Simulate, and return the raw counts; see `simulate`."""
    places = places_of(deployment)
    if unknown := sorted(set(arrivals) - set(deployment.models)):
        raise InputError(f"the map has no model {unknown[0]!r}", f"it has {', '.join(sorted(deployment.models))}")
    neighbours = None if interference is None else NeighbourSlowdowns(places, interference)
    run = _SimulationRun(deployment, places, arrivals, options, neighbours)
    run.run_to_end(progress or (lambda fraction: None))
    return run.tally


class _SimulationRun:
    def __init__(
        self,
        deployment: DeploymentMap,
        places: tuple[PlacedInstance, ...],
        arrivals: Mapping[str, ArrivalProcess],
        options: SimulationOptions,
        neighbours: NeighbourSlowdowns | None,
    ) -> None:
        models, replicas = len(deployment.models), len(places)
        self.end = round(options.duration_s * NS_PER_S)
        begin = min(round(options.warmup_s * NS_PER_S), self.end - 1)
        self.cluster: ClusterArrays = build_cluster(deployment, places, options)
        self.tally: Tally = new_tally(models + len(deployment.chains), replicas, begin, self.end)
        store, factors = _share(_STORED, models), _share(_STORED, replicas)
        self.state: State = new_state(self.cluster, options.max_in_system, store, factors)
        self._neighbours = neighbours
        if neighbours is not None:
            self.state = self.state._replace(slowdown=neighbours.table())
        # The first child draws the arrivals (`arrival_streams`), so that they do not depend on service times.
        _, for_factors = np.random.SeedSequence(options.seed).spawn(2)
        self._streams = arrival_streams(deployment, arrivals, options.seed)
        for replica in sorted(set(range(replicas)) - set(options.absent)):
            set_alive(self.cluster, self.state, replica, 1)
        self._factors = [np.random.Generator(np.random.PCG64(seed)) for seed in for_factors.spawn(replicas)]
        self._changes = changes_of(options, places)
        self._loop = EventLoop()
        self.state.turn[:] = -1 if options.routing == "round-robin" else 0  # initial turn of `gpuprof.rules.routing`
        # All factors are marked as used, so that the next line draws the first.
        self.state.factor_position[_has_variable_times(self.cluster)] = factors
        self._refill_factors()
        for model in range(models):
            self._refill_arrivals(model)

    def run_to_end(self, progress: Callable[[float], None]) -> None:
        """Run until every request has left."""
        ends = {self.end * part // _SLICES for part in range(1, _SLICES)}
        by_time: dict[int, list[changes.Change]] = {time: [] for time in ends | {_FOREVER}}
        for change in self._changes:
            by_time.setdefault(change.time, []).append(change)
        for time in sorted(by_time):
            self._run_until(time)
            for change in by_time[time]:
                self._change(change)
            progress(min(1.0, time / self.end))
        changes.fail_all_orphans(self.cluster, self.state, self.tally)

    def _run_until(self, time: int) -> None:
        while self._loop.run(self.cluster, self.state, self.tally, time) not in (
            kernel.TIME_UP,
            kernel.EMPTY,
        ):
            # An event may exhaust several stores, and the status names a single store, so all are checked.
            self._refill_factors()
            for model in np.flatnonzero(self.state.store_position >= self.state.store_size):
                self._refill_arrivals(int(model))
            self._find_slowdowns()

    def _change(self, change: changes.Change) -> None:
        for replica in changes.apply_change(change, self.cluster, self.state, self.tally):
            kernel.dispatch(self.cluster, self.state, replica, change.time)
            self._find_slowdowns()
            self._refill_factors()

    def _find_slowdowns(self) -> None:
        """Query missing slowdowns until the batches that need them have started."""
        while self._neighbours is not None and (replica := int(self.state.slowdown.missing[0])) >= 0:
            now = int(self.state.slowdown.missing[2])
            runs = self.state.free_processes < np.diff(self.cluster.first_process)
            self.state = self.state._replace(slowdown=self._neighbours.fill(self.state.slowdown, runs))
            kernel.dispatch(self.cluster, self.state, replica, now)

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
        # The kernel removed this model's arrival from the calendar when the store was exhausted.
        if len(times):
            push(state.calendar, times[0], code_of(ARRIVAL, model))

    def _refill_factors(self) -> None:
        """Draw service times: gamma with mean 1, as the queueing models assume."""
        state, cluster = self.state, self.cluster
        count = state.factors.shape[1]
        for replica in np.flatnonzero((state.factor_position >= count) & _has_variable_times(cluster)):
            for store, cv in ((state.factors, cluster.cv[replica]), (state.rested, cluster.pause_cv[replica])):
                if cv > 0.0:
                    scv = float(cv) ** 2
                    store[replica] = scv * self._factors[replica].standard_gamma(1.0 / scv, count)
                # Both stores are the same array if variations are equal (see `new_state`): drawing again overwrites it.
                if state.rested is state.factors:
                    break
            state.factor_position[replica] = 0


def _has_variable_times(cluster: ClusterArrays) -> NDArray[np.bool_]:
    return (cluster.cv > 0) | (cluster.pause_cv > 0)


def _share(total: int, parts: int) -> int:
    return max(64, min(2**16, total // parts))
