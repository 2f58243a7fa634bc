"""Runs a deployment map under arrivals: feeds the event loop, and applies failures and switches.

Requests of failed replicas are rerouted like in the server (`gpuprof.serving.router.served_model`). Running and queued
requests go to live replicas of the model, chosen by the routing rule, ahead of the requests already queued there and in
order of acceptance. Without a live replica they wait until a replica starts; new requests are turned away meanwhile. A
request lost too often is given up (`gpuprof.rules.routing`); the server also gives it a batch of its own before that.

The event loop runs as plain Python at first, as machine code once available: simulations of few requests end before
numba is imported, and compiling takes a while. Both versions give the same outcome, bit for bit, so a longer run
continues in machine code from its current state. ``python -m gpuprof.simulator.engine`` compiles it, and keeps the
machine code on disk for other processes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.arrival_process import NS_PER_S, ArrivalProcess
from gpuprof.domain.deployment import DeploymentMap, parse_map
from gpuprof.errors import InputError
from gpuprof.machine.machine_code import compile_function, is_machine_code_cached
from gpuprof.rules.routing import is_retry_limit_reached
from gpuprof.runtime.module_command import module_command
from gpuprof.simulator import kernel
from gpuprof.simulator.cluster import PlacedInstance, SimulationOptions, build_cluster, places_of
from gpuprof.simulator.kernel import FAILED, choose_replica, give_up, set_alive
from gpuprof.simulator.outcome import SimulationOutcome, outcome_of
from gpuprof.simulator.state import (
    ARRIVAL,
    COMPLETION,
    WINDOWS,
    Calendar,
    ClusterArrays,
    Ints,
    State,
    Tally,
    code_of,
    ident_of,
    new_state,
    new_tally,
    priority_of,
    push,
)
from gpuprof.simulator.trace import arrival_streams

#: Number of arrivals drawn ahead for all models together, and of service times for all replicas together.
_STORED = 2**20
#: A time in nanoseconds after every event.
_FOREVER = int(np.iinfo(np.int64).max)


def simulate(
    deployment: DeploymentMap,
    arrivals: Mapping[str, ArrivalProcess],
    options: SimulationOptions,
    progress: Callable[[float], None] | None = None,
) -> SimulationOutcome:
    """Simulate the map; the same arguments give the same outcome, bit for bit.

    Raises `InputError` for arrivals of a model that the map lacks, or a map that cannot be simulated (see `places_of`).
    ``arrivals``: by model; other models of the map get no requests; ``progress``: called with the fraction done.
    """
    places = places_of(deployment)
    if unknown := sorted(set(arrivals) - set(deployment.models)):
        raise InputError(f"the map has no model {unknown[0]!r}", f"it has {', '.join(sorted(deployment.models))}")
    run = _SimulationRun(deployment, places, arrivals, options)
    run.run_to_end(progress or (lambda fraction: None))
    return outcome_of(deployment, places, run.tally, options)


class _SimulationRun:
    def __init__(
        self,
        deployment: DeploymentMap,
        places: tuple[PlacedInstance, ...],
        arrivals: Mapping[str, ArrivalProcess],
        options: SimulationOptions,
    ) -> None:
        models, replicas = len(deployment.models), len(places)
        self.end = round(options.duration_s * NS_PER_S)
        begin = min(round(options.warmup_s * NS_PER_S), self.end - 1)
        self.cluster: ClusterArrays = build_cluster(deployment, places, options)
        self.tally: Tally = new_tally(models + len(deployment.chains), replicas, begin, self.end)
        store, factors = _share(_STORED, models), _share(_STORED, replicas)
        self.state: State = new_state(self.cluster, options.max_in_system, store, factors)
        # The first child draws the arrivals (`arrival_streams`), so that they do not depend on service times.
        _, for_factors = np.random.SeedSequence(options.seed).spawn(2)
        self._streams = arrival_streams(deployment, arrivals, options.seed)
        for replica in sorted(set(range(replicas)) - set(options.absent)):
            set_alive(self.cluster, self.state, replica, 1)
        self._factors = [np.random.Generator(np.random.PCG64(seed)) for seed in for_factors.spawn(replicas)]
        self._changes = _changes_of(options, places)
        self._loop = EventLoop()
        # All factors are marked as used, so that the next line draws the first.
        self.state.factor_position[_has_variable_times(self.cluster)] = factors
        self._refill_factors()
        for model in range(models):
            self._refill_arrivals(model)

    def run_to_end(self, progress: Callable[[float], None]) -> None:
        """Run until every request has left."""
        ends = {self.end * part // WINDOWS for part in range(1, WINDOWS)}
        by_time: dict[int, list[_Change]] = {time: [] for time in ends | {_FOREVER}}
        for change in self._changes:
            by_time.setdefault(change.time, []).append(change)
        for now in sorted(by_time):
            self._run_until(now)
            for change in by_time[now]:
                self._change(change)
            progress(min(1.0, now / self.end))
        _fail_all_orphans(self.cluster, self.state, self.tally)

    def _run_until(self, time: int) -> None:
        while self._loop.run(self.cluster, self.state, self.tally, time) not in (
            kernel.TIME_UP,
            kernel.EMPTY,
        ):
            # An event may exhaust several stores, and the status names a single store, so all are checked.
            self._refill_factors()
            for model in np.flatnonzero(self.state.store_position >= self.state.store_size):
                self._refill_arrivals(int(model))

    def _change(self, change: _Change) -> None:
        for replica in _apply_change(change, self.cluster, self.state, self.tally):
            kernel.dispatch(self.cluster, self.state, replica, change.time)
            self._refill_factors()

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
        """Draw service times: gamma-distributed with mean 1, as in the queueing models."""
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


@dataclass(frozen=True, slots=True)
class _Change:
    """Replicas that start or stop accepting requests at ``time``; failing replicas do not finish their requests."""

    time: int
    alive: int
    replicas: tuple[int, ...]
    fails: bool = False


def _changes_of(options: SimulationOptions, places: tuple[PlacedInstance, ...]) -> list[_Change]:
    """Return the changes in the options by time; failures come before recoveries and starts of the same instant."""
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
    return sorted(changes, key=lambda change: (change.time, not change.fails))


def _apply_change(change: _Change, cluster: ClusterArrays, state: State, tally: Tally) -> list[int]:
    """Apply the change, and return the replicas that have taken over requests and must be dispatched.

    All failing replicas are down before any of their requests is rerouted.
    """
    for replica in change.replicas:
        set_alive(cluster, state, replica, change.alive)
        if change.alive:
            state.idle_since[replica] = max(change.time, int(state.idle_since[replica]))
    displaced = np.empty(len(state.next), np.int64)
    if change.fails:
        _forget_completions(state.calendar, cluster, frozenset(change.replicas))
        for replica in change.replicas:
            count = _take_all_requests(cluster, state, tally, replica, displaced)
            model = int(cluster.replica_model[replica])
            _reroute_requests(cluster, state, model, displaced[:count], change.time)
    elif change.alive:
        for model in sorted({int(cluster.replica_model[replica]) for replica in change.replicas}):
            count = _take_orphans(state, model, displaced)
            _reroute_requests(cluster, state, model, displaced[:count], change.time)
    replicas = [int(replica) for replica in np.flatnonzero(state.behind >= 0)]
    state.behind[replicas] = -1
    return replicas


def _fail_all_orphans(cluster: ClusterArrays, state: State, tally: Tally) -> None:
    """Count requests still waiting for a live replica at the end as failed."""
    displaced = np.empty(len(state.next), np.int64)
    for model in range(len(state.orphans)):
        for place in displaced[: _take_orphans(state, model, displaced)]:
            give_up(cluster, state, tally, model, place, FAILED)


def _forget_completions(calendar: Calendar, cluster: ClusterArrays, replicas: frozenset[int]) -> None:
    size = int(calendar.size[0])
    events = list(zip(calendar.times[:size].tolist(), calendar.codes[:size].tolist(), strict=True))
    calendar.size[0] = 0
    for due, code in events:
        ends = priority_of(code) == COMPLETION and int(cluster.process_replica[ident_of(code)]) in replicas
        if not ends:
            push(calendar, due, code)


def _take_all_requests(cluster: ClusterArrays, state: State, tally: Tally, replica: int, displaced: Ints) -> int:
    """Move the requests of a failed replica into ``displaced`` and return their number.

    Running requests come first, process by process, then queued requests.
    """
    taken_count, model = 0, cluster.replica_model[replica]
    for process in range(cluster.first_process[replica], cluster.first_process[replica + 1]):
        place = state.flight[process]
        while place >= 0:
            following = state.next[place]
            state.losses[place] += 1
            if is_retry_limit_reached(state.losses[place]):
                give_up(cluster, state, tally, model, place, FAILED)
            else:
                displaced[taken_count] = place
                taken_count += 1
            place = following
        state.flight[process], state.done_at[process], state.expected_at[process] = -1, -1, 0
    place = state.queue_head[replica] if state.waiting[replica] > 0 else -1
    while place >= 0:
        displaced[taken_count] = place
        taken_count += 1
        place = state.next[place]
    state.queue_head[replica] = -1
    state.waiting[replica] = 0
    count = cluster.first_process[replica + 1] - cluster.first_process[replica]
    state.free_processes[replica] = count
    return taken_count


def _reroute_requests(cluster: ClusterArrays, state: State, model: int, displaced: Ints, now: int) -> None:
    """Queue requests of a model at its live replicas, or as orphans without a live replica; start no batch."""
    last = -1
    for place in displaced:
        replica, _ = choose_replica(cluster, state, model, now)
        if replica >= 0:
            _take_over(state, replica, place)
            continue
        state.next[place] = -1
        if last >= 0:
            state.next[last] = place
        else:
            _append_orphan(state, model, place)
        last = place


def _take_over(state: State, replica: int, place: int) -> None:
    """Put a request at the head of a replica's queue, behind requests taken over at the same instant."""
    before = state.behind[replica]
    following = state.queue_head[replica] if before < 0 else state.next[before]
    if state.waiting[replica] == 0:
        following = -1
    state.next[place] = following
    if before < 0:
        state.queue_head[replica] = place
    else:
        state.next[before] = place
    if following < 0:
        state.queue_tail[replica] = place
    state.behind[replica] = place
    state.waiting[replica] += 1


def _append_orphan(state: State, model: int, place: int) -> None:
    last = state.orphans[model]
    if last < 0:
        state.orphans[model] = place
        return
    while state.next[last] >= 0:
        last = state.next[last]
    state.next[last] = place


def _take_orphans(state: State, model: int, displaced: Ints) -> int:
    """Move the orphans of a model into ``displaced``, and return their number."""
    count, place = 0, state.orphans[model]
    while place >= 0:
        displaced[count] = place
        count += 1
        place = state.next[place]
    state.orphans[model] = -1
    return count


#: Time in plain Python after which a run looks for machine code, again and again.
_PLAIN_S = 1.0

_compiled: Any = None
_child: int | None = None  # process id


class EventLoop:
    """The event loop of a run."""

    def __init__(self) -> None:
        self._next_look = time.monotonic() + _PLAIN_S
        self._reached, self._step = 0, 1

    def run(self, cluster: ClusterArrays, state: State, tally: Tally, until: int) -> int:
        """Process all events before ``until``; return the reason for stopping, like `kernel.run`."""
        while _compiled is None and not self._finds_machine_code():
            stop, began = min(until, self._reached + self._step), time.monotonic()
            status = kernel.run(view(cluster), view(state), view(tally), stop)
            is_short = time.monotonic() - began < _PLAIN_S / 10
            self._step = self._step * 2 if is_short else max(1, self._step // 2)
            if status != kernel.TIME_UP:
                return status
            self._reached = stop
            if stop == until:
                return status
        return int(_compiled(cluster, state, tally, until))

    def _finds_machine_code(self) -> bool:
        """Return whether machine code is available, checked about once a second."""
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _PLAIN_S
        return _prepare_machine_code()


def view(arrays: Any) -> Any:
    """Return the named tuple with memory views of its arrays, which plain Python reads several times faster."""
    return type(arrays)(*(_view(name, value) for name, value in arrays._asdict().items()))


def _view(name: str, value: Any) -> Any:
    if hasattr(value, "_fields"):
        return view(value)
    if not isinstance(value, np.ndarray):
        return value
    return value.tolist() if name == "latency_ms" else value.data


def use_machine_code() -> None:
    """Load the event loop's machine code from the cache or compile it, for all further runs."""
    global _compiled
    if _compiled is None:
        _compiled = compile_function(kernel.run_compiled)


def stop_compiling() -> None:
    """End the compiling process, if any: before a measurement, or at the end of a test."""
    global _child
    if _child is not None:
        with suppress(OSError):  # over already
            os.kill(_child, signal.SIGTERM)
            os.waitpid(_child, 0)
        _child = None


def _prepare_machine_code() -> bool:
    """Return whether machine code of the event loop is available; if not, start a process that compiles it."""
    global _child
    if is_machine_code_cached(kernel.run_compiled):
        use_machine_code()
        return True
    if _child is None:
        command = module_command("gpuprof.simulator.engine")
        file_actions = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (0, 1, 2)]
        # The compiling process outlives this process, so that the next long run finds the machine code.
        with suppress(OSError):
            _child = os.posix_spawn(command[0], command, os.environ, file_actions=file_actions, setsid=True)
    return False


def main() -> None:
    """Simulate a replica without requests in machine code, which compiles it for the types of all simulations."""
    use_machine_code()
    predicted = {"latency_ms": 1.0, "throughput_rps": 1.0, "goodput_rps": 1.0}
    replica = {"model": "m", "batch": 1, "rate_rps": 1.0, "batch_latency_ms": [1.0], "predicted": predicted}
    gpu = {"index": 0, "device": "cpu", "partitions": [{"replicas": [replica]}]}
    document = {
        "schema": "gpuprof.deployment/1",
        "policy": "none",
        "models": {"m": {"rate_rps": 1.0, "slo_ms": 1.0}},
        "nodes": [{"name": "here", "gpus": [gpu]}],
        "predicted": {"gpus": 1, "goodput_rps": 1.0},
    }
    simulate(parse_map(document, "the map of one replica"), {}, SimulationOptions(1.0))


if __name__ == "__main__":
    main()
