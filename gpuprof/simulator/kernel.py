"""The compiled event loop of the simulator.

The routing and batching decisions are compiled from the functions of the serving runtime, `gpuprof.rules.routing` and
`gpuprof.rules.batching`.
"""

from __future__ import annotations

import numpy as np

from gpuprof.rules.batching import batch_size_now
from gpuprof.rules.host_work import STAYS
from gpuprof.rules.routing import (
    adapt_reserve,
    argmin_in_turn,
    correct_expected_ms,
    decay_count,
    expect_rows,
    extend_wait_ms,
    finish_ms,
    forecast_joining,
    is_refused,
    makes_oldest_late,
    relax_reserve,
    update_mean_left_ms,
)
from gpuprof.simulator.state import (
    ARRIVAL,
    COARSE_BITS,
    COMPLETION,
    FINE_BITS,
    JOIN,
    MS,
    NS_PER_MS,
    TIMER,
    WINDOWS,
    ClusterArrays,
    State,
    Tally,
    bin_of,
    code_of,
    drop_first,
    ident_of,
    priority_of,
    push,
    replace_first,
)

#: Reasons for `run` to return: time is up, the calendar is empty, arrivals or service times must be drawn.
TIME_UP, EMPTY, NEEDS_ARRIVALS, NEEDS_FACTORS = range(4)


def run(cluster: ClusterArrays, state: State, tally: Tally, until: int) -> int:
    """Process all events before ``until``; return the reason for stopping."""
    calendar, last = state.calendar, state.factors.shape[1]
    while calendar.size[0] > 0:
        # The event stays in the heap, because its successor mostly replaces it by a single sift instead of two.
        now, code = calendar.times[0], calendar.codes[0]
        if now >= until:
            return TIME_UP
        priority, ident = priority_of(code), ident_of(code)
        place = replica = -1
        if priority == COMPLETION:
            replica = _complete_batch(cluster, state, tally, ident, now)
        elif priority == ARRIVAL:
            place = _handle_arrival(cluster, state, tally, ident, now)
        elif priority == JOIN:
            place = _end_network_delay(state, ident)
        else:
            drop_first(calendar)
            state.armed[ident] = 0
            replica = ident
        # Every event ends here, so that each function is called, and compiled inline, once.
        if place >= 0:
            replica = _join_queue(cluster, state, tally, ident, place, now)
        if replica >= 0:
            dispatch(cluster, state, replica, now)
        if state.host[0] > 0:
            run_host_work(cluster, state, state.host[0])
            state.host[0] = 0
        # Random numbers are drawn between events, because half an event cannot be resumed.
        if replica >= 0 and state.factor_position[replica] >= last:
            return NEEDS_FACTORS
        if priority == ARRIVAL and state.store_position[ident] == state.store_size[ident]:
            return NEEDS_ARRIVALS
    return EMPTY


def run_compiled(cluster: ClusterArrays, state: State, tally: Tally, until: int) -> int:
    """Call `run`: the function to compile, since callees of compiled functions count no references."""
    return run(cluster, state, tally, until)


def _handle_arrival(cluster: ClusterArrays, state: State, tally: Tally, model: int, now: int) -> int:
    """Handle the arrival of a request; return its place if it reaches the replicas without network delay, else -1."""
    if cluster.host_event[0] > 0:
        run_host_work(cluster, state, 1)  # runs first, so as not to disturb the batch started by this request
    position = state.store_position[model] + 1
    state.store_position[model] = position
    if position < state.store_size[model]:
        replace_first(state.calendar, state.store[model, position], code_of(ARRIVAL, model))
    else:
        drop_first(state.calendar)
    chain = cluster.chain[model]
    record_arrival(tally, model, now)
    if chain >= 0:
        record_arrival(tally, chain, now)
    place: int = state.free[0]
    if place < 0:
        if now >= tally.span[0]:
            tally.missed[model, FULL] += 1
            if chain >= 0:
                tally.missed[chain, FULL] += 1
        return -1
    state.free[0] = state.next[place]
    if chain >= 0:
        state.entered[place] = now
        state.spent[place, 0] = state.spent[place, 1] = state.spent[place, 2] = state.spent[place, 3] = 0
    state.arrived[place] = now
    state.joined[place] = now + cluster.request_leg[model]
    if state.joined[place] == now:
        return place
    _await_replicas(state, model, place)
    return -1


def _await_replicas(state: State, model: int, place: int) -> None:
    """Schedule a request to reach the replicas after its network delay."""
    # Requests of a model join in order of arrival, so the calendar holds only the first of them and stays as short as
    # the number of models.
    state.next[place] = -1
    if state.pending_head[model] < 0:
        state.pending_head[model] = place
        push(state.calendar, state.joined[place], code_of(JOIN, model))
    else:
        state.next[state.pending_tail[model]] = place
    state.pending_tail[model] = place


def _pass_on(cluster: ClusterArrays, state: State, tally: Tally, model: int, place: int, now: int) -> None:
    """Send the output of a chain's step to the next step, ``model``, as the client does."""
    record_arrival(tally, model, now)
    state.losses[place] = 0
    state.arrived[place] = now
    state.joined[place] = now + cluster.request_leg[model]
    _await_replicas(state, model, place)


def _end_network_delay(state: State, model: int) -> int:
    """Take the model's next request off the network; return its place."""
    place: int = state.pending_head[model]
    following = state.next[place]
    state.pending_head[model] = following
    if following < 0:
        drop_first(state.calendar)
    else:
        replace_first(state.calendar, state.joined[following], code_of(JOIN, model))
    return place


def _join_queue(cluster: ClusterArrays, state: State, tally: Tally, model: int, place: int, now: int) -> int:
    """Put a request into a replica's queue or refuse it; return the chosen replica, -1 if no replica is alive."""
    replica, finish = choose_replica(cluster, state, model, now)
    if replica < 0:
        give_up(cluster, state, tally, model, place, FAILED)
        return -1
    is_refusal, waited_ms = False, (now - state.arrived[place]) * MS
    if cluster.refuse_hopeless:
        slo, reserve = cluster.slo[model] * MS, _reserve_now(state, model, now)
        allowed = (1.0 - reserve) * slo
        spoils = makes_oldest_late_at(cluster, state, replica, now, allowed)
        if spoils:
            harmless, harmless_finish = choose_harmless(cluster, state, model, now, allowed, waited_ms)
            if harmless >= 0:
                replica, finish, spoils = harmless, harmless_finish, False
        idle = state.free_processes[replica]
        is_refusal = spoils or is_refused(state.waiting[replica], idle, finish, waited_ms, slo, reserve)
    _count_arrival(cluster, state, replica, now, is_refusal)
    if is_refusal:
        give_up(cluster, state, tally, model, place, REFUSED)
        return replica  # its batch may now be held longer
    if cluster.refuse_hopeless:
        state.expected_ms[place], state.expected_rows[place] = (
            waited_ms + finish,
            expected_batch_of(cluster, state, replica),
        )
    state.next[place] = -1
    if state.waiting[replica] == 0:
        state.queue_head[replica] = place
    else:
        state.next[state.queue_tail[replica]] = place
    state.queue_tail[replica] = place
    state.waiting[replica] += 1
    return replica


def _count_arrival(cluster: ClusterArrays, state: State, replica: int, now: int, is_refusal: bool) -> None:
    """Count a request sent to a replica, admitted or refused."""
    full_ms = cluster.latency_ms[replica][cluster.batch[replica] - 1]
    elapsed_ms = (now - state.counted_at[replica]) * MS
    state.arrival_count[replica] = 1.0 + decay_count(state.arrival_count[replica], elapsed_ms, full_ms)
    state.refused_count[replica] = decay_count(state.refused_count[replica], elapsed_ms, full_ms) + is_refusal
    state.counted_at[replica] = now
    if state.refused_count[replica] > 0.0:
        model, usual_ms = cluster.replica_model[replica], cluster.max_wait_ms[replica]
        allowed_ms = (1.0 - _reserve_now(state, model, now)) * cluster.slo[model] * MS
        counts = state.refused_count[replica], state.arrival_count[replica]
        latency = cluster.latency_ms[replica][: cluster.batch[replica]]
        state.wait_ms[replica] = extend_wait_ms(usual_ms, counts[0], counts[1], allowed_ms, latency)
    if state.free_processes[replica] == 0:
        first = cluster.first_process[replica]
        next_finish = state.expected_at[first]
        for process in range(first, cluster.first_process[replica + 1]):
            next_finish = min(next_finish, state.expected_at[process])
        count, before = state.arrival_count[replica], state.left_ms[replica]
        state.left_ms[replica] = update_mean_left_ms(before, max(0, next_finish - now) * MS, count)


def _forecast(cluster: ClusterArrays, state: State, replica: int, mean_ms: float, now: int) -> None:
    """Forecast the next batch of a replica when a batch of ``mean_ms`` begins."""
    batch = cluster.batch[replica]
    latency = cluster.latency_ms[replica][:batch]
    processes = cluster.first_process[replica + 1] - cluster.first_process[replica]
    count = decay_count(state.arrival_count[replica], (now - state.counted_at[replica]) * MS, latency[batch - 1])
    allowed_ms = np.inf
    if cluster.refuse_hopeless:
        model = cluster.replica_model[replica]
        allowed_ms = (1.0 - _reserve_now(state, model, now)) * cluster.slo[model] * MS
    state.joining[replica] = forecast_joining(count, mean_ms, latency, processes, state.left_ms[replica], allowed_ms)


def _reserve_now(state: State, model: int, now: int) -> float:
    """Return the part of the SLO held in reserve."""
    elapsed_ms = (now - state.reserve_at[model]) * MS
    reserve: float = relax_reserve(state.reserve[model], elapsed_ms)
    return reserve


def _learn_reserve(cluster: ClusterArrays, state: State, process: int, place: int, now: int) -> None:
    """Adapt the reserved part of the SLO to an answer."""
    replica = cluster.process_replica[process]
    model, latency = cluster.replica_model[replica], cluster.latency_ms[replica][: cluster.batch[replica]]
    slo_ms, latency_ms = cluster.slo[model] * MS, (now - state.arrived[place]) * MS
    before = _reserve_now(state, model, now)
    rows = state.batch_size[process]
    expected_ms = correct_expected_ms(state.expected_ms[place], state.expected_rows[place], rows, latency)
    after = adapt_reserve(before, expected_ms, latency_ms, slo_ms, cluster.late_part[model], rows)
    if after != before:
        state.reserve[model], state.reserve_at[model] = after, now


def dispatch(cluster: ClusterArrays, state: State, replica: int, now: int) -> None:
    """Start as many batches as the rule allows, and set a timer for its next evaluation."""
    while state.free_processes[replica] > 0 and state.waiting[replica] > 0:
        size = _batch_size_or_set_timer(cluster, state, replica, now)
        if size == 0:
            break
        _start_batch(cluster, state, replica, size, now)


def _batch_size_or_set_timer(cluster: ClusterArrays, state: State, replica: int, now: int) -> int:
    """Return the size of the batch to start now; if 0, set the timer."""
    head = state.queue_head[replica]
    oldest = state.joined[head]
    waited_ms = (now - oldest) * MS
    limit_ms = state.wait_ms[replica]
    limit = int(limit_ms * NS_PER_MS + 0.5)
    if now - oldest >= limit:
        waited_ms = max(waited_ms, limit_ms)  # `limit` is `limit_ms` rounded
    size = batch_size_now(state.waiting[replica], cluster.batch[replica], waited_ms, limit_ms)
    if size == 0:
        state.held[replica] = 1
    # A replica has a single timer, never moved; when it ends, the rule is applied to the then oldest request.
    if size == 0 and state.armed[replica] == 0:
        state.armed[replica] = 1
        push(state.calendar, oldest + limit, code_of(TIMER, replica))
    return size


def _start_batch(cluster: ClusterArrays, state: State, replica: int, size: int, now: int) -> None:
    """Start a batch of the ``size`` oldest requests on the first free process."""
    process = cluster.first_process[replica]
    while state.done_at[process] >= 0:
        process += 1
    _take_batch(state, replica, process, size)
    if state.held[replica] > 0:
        _forget_holding(state, process, size, cluster.latency_ms[replica][size - 1], now)
        state.held[replica] = 0
    expected = cluster.latency_ms[replica][size - 1] * NS_PER_MS
    _forecast(cluster, state, replica, cluster.latency_ms[replica][size - 1], now)
    factor = _draw_time_factor(cluster, state, replica, now > state.freed_at[process])
    batch_ns, turns, begin = (
        int(cluster.turn_ms[replica, size - 1] * NS_PER_MS * factor + 0.5),
        cluster.turns[replica],
        now,
    )
    if turns >= 0 and cluster.slice_ns[replica] == 0:  # after all batches sent earlier
        begin = max(now, state.turn_until[turns])
        state.turn_until[turns] = begin + batch_ns
    due = done = begin + batch_ns
    if cluster.slice_ns[replica] > 0:
        due = _join_rotation(cluster, state, process, batch_ns, now)
    state.idle_before[process] = state.idle_since[replica]
    state.started_at[process], state.done_at[process], state.batch_size[process] = now, done, size
    # The router expects the mean time, not this batch's.
    state.expected_at[process] = now + int(expected + 0.5)
    state.free_processes[replica] -= 1
    if due > 0:
        push(state.calendar, due, code_of(COMPLETION, process))


def _join_rotation(cluster: ClusterArrays, state: State, process: int, batch_ns: int, now: int) -> int:
    """Put a process with a new batch at the end of its group's rotation; return the end of its slice, 0 if it waits."""
    group = cluster.turns[cluster.process_replica[process]]
    head, tail = state.slice_head[group], state.slice_tail[group]
    state.left_ns[process], state.slice_tail[group] = batch_ns, process
    if head < 0 or state.done_at[head] < 0:  # none, or lost with its device
        return _begin_slice(cluster, state, process, now)
    state.slice_next[tail] = process
    return 0


def _begin_slice(cluster: ClusterArrays, state: State, process: int, now: int) -> int:
    """Run the batch of a process; return the end of the batch or slice."""
    replica = cluster.process_replica[process]
    group = cluster.turns[replica]
    until: int = now + cluster.slice_ns[replica]
    done: int = now + state.left_ns[process]
    state.slice_head[group], state.slice_until[group], state.done_at[process] = process, until, done
    return min(until, done)


def _end_slice(cluster: ClusterArrays, state: State, process: int, now: int) -> tuple[int, int]:
    """Return the process whose batch runs from now on, and the end of the batch or slice."""
    group = cluster.turns[cluster.process_replica[process]]
    if now < state.slice_until[group]:  # host work delayed the batch
        return process, min(state.slice_until[group], state.done_at[process])
    state.left_ns[process] = state.done_at[process] - now
    state.slice_next[state.slice_tail[group]] = process
    state.slice_tail[group] = process
    following = state.slice_next[process]
    return following, _begin_slice(cluster, state, following, now)


def _leave_rotation(cluster: ClusterArrays, state: State, process: int, now: int) -> None:
    """Take the process of an ended batch out of its group's rotation."""
    group = cluster.turns[cluster.process_replica[process]]
    if process == state.slice_tail[group]:
        state.slice_head[group] = -1
    else:
        following = state.slice_next[process]
        push(state.calendar, _begin_slice(cluster, state, following, now), code_of(COMPLETION, following))


def _take_batch(state: State, replica: int, process: int, size: int) -> None:
    """Move a batch from the queue to its process."""
    place = state.queue_head[replica]
    state.flight[process] = place
    for _ in range(size - 1):
        place = state.next[place]
    state.queue_head[replica] = state.next[place]
    state.next[place] = -1
    state.waiting[replica] -= size


def _forget_holding(state: State, process: int, size: int, mean_ms: float, now: int) -> None:
    """Reset the expected times of the requests of a batch that waited to be filled, at the batch's start."""
    place = state.flight[process]
    while place >= 0:
        waited_ms = (now - state.arrived[place]) * MS
        state.expected_ms[place] = waited_ms + mean_ms
        state.expected_rows[place] = size
        place = state.next[place]


def _draw_time_factor(cluster: ClusterArrays, state: State, replica: int, rested: bool) -> float:
    """Return the ratio of the next batch's time to its mean; a rested process has cold caches."""
    factor: float = cluster.pause_factor[replica] if rested else 1.0
    if cluster.cv[replica] > 0.0 or cluster.pause_cv[replica] > 0.0:
        position = state.factor_position[replica]
        state.factor_position[replica] = position + 1
        # An event may start several batches, and factors are drawn only after events: meanwhile the oldest are reused.
        position %= state.factors.shape[1]
        factor *= state.rested[replica, position] if rested else state.factors[replica, position]
    return factor


def _complete_batch(cluster: ClusterArrays, state: State, tally: Tally, process: int, now: int) -> int:
    """Complete a batch and return its replica; -1 if host work delayed the batch's end."""
    replica: int = cluster.process_replica[process]
    if state.done_at[process] > now:
        due = state.done_at[process]
        if cluster.slice_ns[replica] > 0:
            process, due = _end_slice(cluster, state, process, now)
        replace_first(state.calendar, due, code_of(COMPLETION, process))
        return -1
    drop_first(state.calendar)
    model = cluster.replica_model[replica]
    next_step = cluster.following[model]
    begin, end = tally.span[0], tally.span[1]
    start = max(begin, state.started_at[process])
    if start < min(now, end):
        tally.replica_busy[replica] += min(now, end) - start
    state.done_at[process] = -1
    if cluster.slice_ns[replica] > 0:
        _leave_rotation(cluster, state, process, now)
    state.freed_at[process] = state.expected_at[process] = now
    place = state.flight[process]
    tally.replica_batches[replica] += state.arrived[place] >= begin
    while place >= 0:
        following = state.next[place]
        record_answer(cluster, state, tally, process, place, now)
        # The router, too, ignores requests sent twice, because their times depend on the failure.
        if cluster.refuse_hopeless and state.losses[place] == 0:
            _learn_reserve(cluster, state, process, place, now)
        state.host[0] += cluster.host_event[0] > 0
        if next_step >= 0:
            _pass_on(cluster, state, tally, next_step, place, now + cluster.answer_leg[model])
            state.host[0] += cluster.host_event[0] > 0
        else:
            free_place(state, place)
        place = following
    state.flight[process] = -1
    if state.free_processes[replica] == 0:
        state.idle_since[replica] = now
    state.free_processes[replica] += 1
    return replica


def choose_replica(cluster: ClusterArrays, state: State, model: int, now: int) -> tuple[int, float]:
    """Return the replica for the next request of a model and the ms until its answer; -1 if no replica is alive."""
    first, last = cluster.choice_start[model], cluster.choice_start[model + 1]
    live_processes = state.living[model]
    if live_processes == 0:
        return -1, 0.0
    if last - first == 1:
        only = cluster.choice[first]
        return only, finish_of(cluster, state, only, now) if cluster.refuse_hopeless else 0.0
    # Like `FastestFirst`, the turn moves only if there is a choice.
    if live_processes > 1:
        state.turn[model] += 1
    for position in range(first, last):
        state.finish_ms[position - first] = finish_of(cluster, state, cluster.choice[position], now)
    index = argmin_in_turn(state.finish_ms[: last - first], state.turn[model])
    return cluster.choice[first + index], state.finish_ms[index]


def finish_of(cluster: ClusterArrays, state: State, replica: int, now: int) -> float:
    """Return the ms until the answer to a request that joins this replica now."""
    count = _fill_busy(cluster, state, replica, now)
    waiting = state.waiting[replica]
    waited_ms = (now - state.joined[state.queue_head[replica]]) * MS if waiting > 0 else 0.0
    latency = cluster.latency_ms[replica][: cluster.batch[replica]]
    rows = expected_batch_of(cluster, state, replica)
    return finish_ms(waiting, waited_ms, state.busy_ms[:count], rows, latency, state.wait_ms[replica])


def _fill_busy(cluster: ClusterArrays, state: State, replica: int, now: int) -> int:
    """Fill ``busy_ms`` with the time until each process is free; return their number, 0 for a dead replica."""
    first = cluster.first_process[replica]
    count: int = (cluster.first_process[replica + 1] - first) * state.alive[replica]
    for i in range(count):
        state.busy_ms[i] = max(0, state.expected_at[first + i] - now) * MS
    return count


def expected_batch_of(cluster: ClusterArrays, state: State, replica: int) -> int:
    """Return the expected batch size for a request joining this replica now."""
    joining = 0 if state.free_processes[replica] > 0 else state.joining[replica]
    return expect_rows(state.waiting[replica], joining, cluster.batch[replica])


def makes_oldest_late_at(cluster: ClusterArrays, state: State, replica: int, now: int, allowed_ms: float) -> bool:
    """Return whether another request in its batch would make the oldest request miss ``allowed_ms``."""
    waiting = state.waiting[replica]
    if waiting == 0:
        return False
    count = _fill_busy(cluster, state, replica, now)
    # The SLO counts from sending; the batching delay in `finish_of` counts from joining the queue.
    waited_ms = (now - state.arrived[state.queue_head[replica]]) * MS
    latency = cluster.latency_ms[replica][: cluster.batch[replica]]
    wait_ms = state.wait_ms[replica]
    return makes_oldest_late(waiting, waited_ms, state.busy_ms[:count], latency, wait_ms, allowed_ms)


def choose_harmless(
    cluster: ClusterArrays, state: State, model: int, now: int, allowed_ms: float, waited_ms: float
) -> tuple[int, float]:
    """Return the replica that answers first and its time in ms, among those that answer in time and delay no other.

    A replica delays another request if it makes the oldest request of the batch late. The replica is -1 if there is
    none.
    """
    best, best_finish = -1, allowed_ms - waited_ms
    for position in range(cluster.choice_start[model], cluster.choice_start[model + 1]):
        replica = cluster.choice[position]
        if state.alive[replica] == 0:
            continue
        finish = finish_of(cluster, state, replica, now)
        if finish > best_finish or (best >= 0 and finish == best_finish):
            continue
        if not makes_oldest_late_at(cluster, state, replica, now, allowed_ms):
            best, best_finish = replica, finish
    return best, best_finish


def set_alive(cluster: ClusterArrays, state: State, replica: int, alive: int) -> None:
    """Set whether a replica takes requests from now on."""
    model = cluster.replica_model[replica]
    state.living[model] += alive - state.alive[replica]
    state.alive[replica] = alive


#: Positions in `gpuprof.simulator.state.CAUSES`.
_NETWORK, _BATCHING, _QUEUE, _SERVICE, REFUSED, FULL, FAILED = range(7)


def window_of(tally: Tally, time: int) -> int:
    """Return the window of the time line that contains a time."""
    return min(WINDOWS - 1, max(0, int((time - tally.span[0]) * tally.windows_per_ns[0])))


def _find_miss_cause(slo: int, network: int, batching: int, queue: int, service: int) -> int:
    """Return the stage that made a request late: the longest wait, or service or network if these exceed the SLO."""
    if network + service > slo:
        return _SERVICE if service >= network else _NETWORK
    return _QUEUE if queue >= batching else _BATCHING


def record_answer(cluster: ClusterArrays, state: State, tally: Tally, process: int, place: int, now: int) -> None:
    """Count an answered request of ``process``'s finished batch, and the answer of its chain after the last step."""
    replica = cluster.process_replica[process]
    model = cluster.replica_model[replica]
    arrived, joined, started = state.arrived[place], state.joined[place], state.started_at[process]
    network = cluster.request_leg[model] + cluster.answer_leg[model]
    # While a process was free, the request waited for its batch to fill; before, for a process.
    batching = started - max(joined, state.idle_before[process])
    queue, service = started - joined - batching, now - started
    stages = network, batching, queue, service
    latency = network + batching + queue + service
    if arrived >= tally.span[0]:
        tally.replica_by_end[replica] += now <= tally.span[1]
        tally.replica_answered[replica] += 1
        tally.by_replica[replica, bin_of(latency, COARSE_BITS)] += 1
        tally.replica_in_time[replica] += latency <= cluster.slo[model]
        _count_answer(tally, model, arrived, cluster.slo[model], stages)
    chain = cluster.chain[model]
    if chain < 0 or state.entered[place] < tally.span[0]:
        return
    for stage in range(4):
        state.spent[place, stage] += stages[stage]
    if cluster.following[model] < 0:
        whole = (
            state.spent[place, 0],
            state.spent[place, 1],
            state.spent[place, 2],
            state.spent[place, 3],
        )
        _count_answer(tally, chain, state.entered[place], cluster.chain_slo[chain - len(cluster.chain)], whole)


def _count_answer(tally: Tally, row: int, arrived: int, slo: int, stages: tuple[int, int, int, int]) -> None:
    """Count an answer of a model or chain."""
    network, batching, queue, service = stages
    latency = network + batching + queue + service
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
        tally.missed[row, _find_miss_cause(slo, network, batching, queue, service)] += 1


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


# Linear congruential generator (Park and Miller's multiplier) of cores, reproducible and equal in compiled code.
_MULTIPLIER, _MODULUS = 48271, int(np.iinfo(np.int32).max)
_STAYS = int(STAYS * _MODULUS)


def run_host_work(cluster: ClusterArrays, state: State, requests: int) -> None:
    """Do the host work of this many requests or answers, on an idle core if any."""
    cores = len(cluster.core_start) - 1
    for turn in range(cores):
        core = (state.host[2] + turn) % cores
        runs = False
        for i in range(cluster.core_start[core], cluster.core_start[core + 1]):
            runs = runs or state.done_at[cluster.core_process[i]] >= 0
        if not runs:
            state.host[2] = core
            return
    state.host[1] = state.host[1] * _MULTIPLIER % _MODULUS
    core = state.host[2] if state.host[1] < _STAYS else state.host[1] % cores
    for i in range(cluster.core_start[core], cluster.core_start[core + 1]):
        process = cluster.core_process[i]
        if state.done_at[process] >= 0:
            replica = cluster.process_replica[process]
            state.done_at[process] += requests * cluster.host_delay[replica]
            turns = cluster.turns[replica]
            if turns >= 0:
                state.turn_until[turns] = max(state.turn_until[turns], state.done_at[process])
