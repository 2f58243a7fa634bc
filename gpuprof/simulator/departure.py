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
    """Count an answered request of ``process``'s finished batch, and the answer of its chain after the last step."""
    replica = cluster.process_replica[process]
    model = cluster.replica_model[replica]
    arrived, joined, started = state.arrived[place], state.joined[place], state.started_at[process]
    network = cluster.request_leg[model] + cluster.answer_leg[model]
    router = joined - arrived - cluster.request_leg[model]
    # While a process was free, the request waited for its batch to fill; before, for a process.
    batching = started - max(joined, state.idle_before[process])
    queue, service = started - joined - batching, now - started
    stages = router, network, batching, queue, service
    latency = router + network + batching + queue + service
    if arrived >= tally.span[0]:
        tally.replica_by_end[replica] += now <= tally.span[1]
        tally.replica_answered[replica] += 1
        tally.by_replica[replica, bin_of(latency, COARSE_BITS)] += 1
        tally.replica_in_time[replica] += latency <= cluster.slo[model]
        _count_answer(tally, model, arrived, cluster.slo[model], stages)
    chain = cluster.chain[model]
    if chain < 0 or state.entered[place] < tally.span[0]:
        return
    for stage in range(5):
        state.spent[place, stage] += stages[stage]
    if cluster.following[model] < 0:
        whole = (
            state.spent[place, 0],
            state.spent[place, 1],
            state.spent[place, 2],
            state.spent[place, 3],
            state.spent[place, 4],
        )
        _count_answer(tally, chain, state.entered[place], cluster.chain_slo[chain - len(cluster.chain)], whole)


def _count_answer(tally: Tally, row: int, arrived: int, slo: int, stages: tuple[int, int, int, int, int]) -> None:
    """Count an answer of a model or chain."""
    router, network, batching, queue, service = stages
    latency = router + network + batching + queue + service
    window = window_of(tally, arrived)
    tally.answered[row] += 1
    tally.windows[window, row, 1] += 1
    tally.longest[row] = max(tally.longest[row], latency)
    tally.total[row, bin_of(latency, FINE_BITS)] += 1
    for stage, stage_ns in enumerate(stages):
        tally.stage_ns[row, stage] += stage_ns
        tally.window_ns[window, row, stage] += stage_ns
        tally.stage[row, stage, bin_of(stage_ns, COARSE_BITS)] += 1
    if latency <= slo:
        tally.in_time[row] += 1
        tally.windows[window, row, 2] += 1
    else:
        tally.missed[row, _find_miss_cause(slo, router, network, batching, queue, service)] += 1


def record_arrival(tally: Tally, row: int, time: int) -> None:
    """Count a request of a model or chain."""
    if time >= tally.span[0]:
        tally.arrived[row] += 1
        tally.windows[window_of(tally, time), row, 0] += 1


def free_place(state: State, place: int) -> None:
    """Free the slot of a request."""
    state.losses[place] = 0
    state.next[place] = state.free[0]
    state.free[0] = place


def give_up(cluster: ClusterArrays, state: State, tally: Tally, model: int, place: int, cause: int) -> None:
    """Count an unanswered request, and free its place."""
    if state.arrived[place] >= tally.span[0]:
        tally.missed[model, cause] += 1
    if cluster.chain[model] >= 0 and state.entered[place] >= tally.span[0]:
        tally.missed[cluster.chain[model], cause] += 1
    free_place(state, place)
