"""Departures of requests: answered, refused or lost, and their counts."""

from __future__ import annotations

from gpuprof.simulator.histogram import COARSE_BITS, FINE_BITS, bin_of
from gpuprof.simulator.state import WINDOWS, ClusterArrays, State, Tally

#: Positions in `gpuprof.simulator.state.CAUSES`.
_ROUTER, _NETWORK, _BATCHING, _QUEUE, _SERVICE, REFUSED, FULL, FAILED = range(8)


def window_of(tally: Tally, time: int) -> int:
    """Return the window of the time line that contains a time."""
    return min(WINDOWS - 1, max(0, int((time - tally.span[0]) * tally.windows_per_ns[0])))


def _find_miss_cause(slo: int, router: int, network: int, batching: int, queue: int, service: int) -> int:
    """Return the stage that made a request late: the longest wait, or service or network if these exceed the SLO."""
    if network + service > slo:
        return _SERVICE if service >= network else _NETWORK
    if queue >= batching and queue >= router:
        return _QUEUE
    return _BATCHING if batching >= router else _ROUTER


def record_answer(cluster: ClusterArrays, state: State, tally: Tally, process: int, place: int, now: int) -> None:
    """Count an answered request of ``process``'s finished batch."""
    replica = cluster.process_replica[process]
    model = cluster.replica_model[replica]
    arrived, joined, started = state.arrived[place], state.joined[place], state.started_at[process]
    network = cluster.request_leg[model] + cluster.answer_leg[model]
    router = joined - arrived - cluster.request_leg[model]
    # While a process was free, the request waited for its batch to fill; before, for a process.
    batching = started - max(joined, state.idle_before[process])
    queue, service = started - joined - batching, now - started
    latency = router + network + batching + queue + service
    window = window_of(tally, arrived)
    tally.answered[model] += 1
    tally.replica_answered[replica] += 1
    tally.windows[window, model, 1] += 1
    tally.longest[model] = max(tally.longest[model], latency)
    tally.total[model, bin_of(latency, FINE_BITS)] += 1
    tally.by_replica[replica, bin_of(latency, COARSE_BITS)] += 1
    for stage, stage_ns in enumerate((router, network, batching, queue, service)):
        tally.stage_ns[model, stage] += stage_ns
        tally.window_ns[window, model, stage] += stage_ns
        tally.stage[model, stage, bin_of(stage_ns, COARSE_BITS)] += 1
    if latency <= cluster.slo[model]:
        tally.in_time[model] += 1
        tally.replica_in_time[replica] += 1
        tally.windows[window, model, 2] += 1
    else:
        tally.missed[model, _find_miss_cause(cluster.slo[model], router, network, batching, queue, service)] += 1


def free_place(state: State, place: int) -> None:
    """Free the slot of a request."""
    state.losses[place] = 0
    state.next[place] = state.free[0]
    state.free[0] = place


def give_up(state: State, tally: Tally, model: int, place: int, cause: int) -> None:
    """Count an unanswered request, and free its place."""
    if state.arrived[place] >= tally.span[0]:
        tally.missed[model, cause] += 1
    free_place(state, place)
