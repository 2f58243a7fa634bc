"""State of the compiled event loop: arrays in named tuples.

Letters in the shapes: M models, R replicas, P processes, B largest batch, N places for requests in the system, A and F
lengths of the stores of arrivals and of service times drawn ahead, W parts of the time line. Times are nanoseconds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.arrival_process import NS_PER_S
from gpuprof.rules.routing import RESERVE

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Milliseconds in a nanosecond, and nanoseconds in a millisecond.
MS, NS_PER_MS = 1e3 / NS_PER_S, NS_PER_S / 1e3

STAGES = ("network", "batching", "queue", "service")
#: Causes of missing the SLO: the stage that delayed the request, or the reason for having no answer.
CAUSES = (*STAGES, "refused", "full", "failed")
#: Parts of the time line in an outcome.
WINDOWS = 60


class ClusterArrays(NamedTuple):
    """The simulated cluster, constant between two changes."""

    #: ``slo``, ``late_part``: Shape (M,). Objective of the latency, and the fraction of requests allowed to exceed the
    #: objective.
    slo: Ints
    late_part: Floats
    #: ``following``, ``chain``: Shape (M,). Next step of the model's chain; row of the chain in the tally; -1: none.
    following: Ints
    chain: Ints
    chain_slo: Ints  #: Shape (chains,). Objective of each chain's latency.
    #: ``request_leg``, ``answer_leg``: Shape (M,). Network time of a request to its replica, and of its answer back.
    request_leg: Ints
    answer_leg: Ints
    #: ``choice``, ``choice_start``: Shape (R,), (M + 1,). The replicas of model m are
    #: ``choice[choice_start[m]:choice_start[m + 1]]``.
    choice_start: Ints
    choice: Ints
    #: ``replica_model``, ``batch``: Shape (R,).
    replica_model: Ints
    batch: Ints
    #: ``latency_ms``, ``turn_ms``: Shape (R, B). Mean time of a batch by its size, with the mean wait for its turn, and
    #: without.
    latency_ms: Any
    turn_ms: Floats
    turns: Ints  #: Shape (R,). Group number: replicas of a group run a single batch at a time; -1: no turns.
    slice_ns: Ints  #: Shape (R,). Time slice of replicas whose group runs its batches in rotation, 0: to their ends.
    #: ``max_wait_ms``, ``cv``, ``pause_factor``, ``pause_cv``: Shape (R,). See `gpuprof.domain.sojourn.BatchServer`.
    max_wait_ms: Floats
    cv: Floats
    pause_factor: Floats
    pause_cv: Floats
    #: ``first_process``, ``process_replica``: Shape (R + 1,), (P,). The processes of replica r are those from
    #: ``first_process[r]`` to before ``first_process[r + 1]``.
    first_process: Ints
    process_replica: Ints
    refuse_hopeless: bool  #: See `gpuprof.simulator.cluster.SimulationOptions`.
    #: Shape (1,). CPU time of router and clients, twice per request; 0 if no batch is slowed.
    host_event: Ints
    #: Shape (R,). Delay of a replica's batch by that time on one of its cores.
    host_delay: Ints
    #: ``core_start``, ``core_process``: The processes of core c are ``core_process[core_start[c]:core_start[c + 1]]``.
    core_start: Ints
    core_process: Ints


class State(NamedTuple):
    """The current state of the simulation.

    Requests in the system are places of a pool, chained by ``next``; -1 ends a chain. Event times are nanoseconds;
    names with ``_ms`` hold milliseconds, as in `gpuprof.rules.routing`.
    """

    calendar: Calendar  #: Future events.
    # The pool of requests.
    free: Ints  #: Shape (1,). Head of the chain of empty places.
    #: ``next``, ``arrived``, ``joined``: Shape (N,). Next place in the chain; times at which the request was sent and
    #: reaches the replicas.
    next: NDArray[np.int32]
    arrived: Ints
    joined: Ints
    #: ``expected_ms``, ``expected_rows``: Shape (N,). Expected latency since sending, and expected batch size.
    expected_ms: Floats
    expected_rows: Ints
    #: ``entered``, ``spent``: Shape (N,), (N, 4), empty without chains. Arrival at the chain's first step; time in each
    #: stage of the steps before.
    entered: Ints
    spent: Ints
    losses: NDArray[np.int8]  #: Shape (N,). Number of times the request was lost with a failing device.
    # State by model.
    #: ``pending_head``, ``pending_tail``: Shape (M,). Chain of requests on the network.
    pending_head: Ints
    pending_tail: Ints
    orphans: Ints  #: Shape (M,). Head of the chain of requests without a live replica.
    #: ``living``, ``turn``: Shape (M,). Number of live replicas; turn among equally good replicas.
    living: Ints
    turn: Ints
    #: ``reserve``, ``reserve_at``: Shape (M,). Part of the SLO held in reserve at ``reserve_at``.
    reserve: Floats
    reserve_at: Ints
    #: ``store``, ``store_position``, ``store_size``: Shape (M, A), (M,), (M,). Arrivals drawn ahead, position of the
    #: next, and their number.
    store: Ints
    store_position: Ints
    store_size: Ints
    # State by replica.
    #: ``queue_head``, ``queue_tail``, ``waiting``: Shape (R,). Chain of queued requests, and their number.
    queue_head: Ints
    queue_tail: Ints
    waiting: Ints
    behind: Ints  #: Shape (R,). Last of the requests inserted before a queue's head by failover; -1: none.
    #: ``armed``, ``held``, ``wait_ms``: Shape (R,). Whether a timer is set; whether the next batch is held to be
    #: filled; the current batching delay.
    armed: Ints
    held: Ints
    wait_ms: Floats
    #: ``arrival_count``, ``refused_count``, ``counted_at``: Shape (R,). Decayed counts of arrivals and of refused
    #: arrivals at ``counted_at``; see `gpuprof.rules.routing.decay_count`.
    arrival_count: Floats
    refused_count: Floats
    counted_at: Ints
    #: ``joining``, ``left_ms``: Shape (R,). Expected size of the next batch; mean time until a process is free, over
    #: arrivals.
    joining: Ints
    left_ms: Floats
    #: ``alive``, ``idle_since``, ``free_processes``: Shape (R,). 1 if the replica takes requests, else 0; time since
    #: which some process is free; number of free processes.
    alive: Ints
    idle_since: Ints
    free_processes: Ints
    #: ``factors``, ``rested``, ``factor_position``: Shape (R, F), (R, F), (R,). Service times over their mean, the same
    #: for batches on a process at rest, and the position of the next.
    factors: Floats
    rested: Floats
    factor_position: Ints
    # State by process.
    #: ``done_at``, ``freed_at``, ``started_at``: Shape (P,). End of the batch, -1 for a free process; time since which
    #: the process is free; start of the batch.
    done_at: Ints
    freed_at: Ints
    started_at: Ints
    expected_at: Ints  #: Shape (P,). The router's estimate of ``done_at``, by mean times.
    idle_before: Ints  #: Shape (P,). ``idle_since`` of the replica at the start of the batch.
    #: ``flight``, ``batch_size``: Shape (P,). First request of the running batch, and the batch's size.
    flight: Ints
    batch_size: Ints
    turn_until: Ints  #: Shape (groups,). End of all batches sent to the replicas of each group in ``turns``.
    #: ``slice_head``, ``slice_tail``, ``slice_until``: Shape (groups,). Process whose batch runs, last process of the
    #: rotation, and end of the slice.
    slice_head: Ints
    slice_tail: Ints
    slice_until: Ints
    #: ``slice_next``, ``left_ns``: Shape (P,). Next process of the rotation; rest of an interrupted batch's time.
    slice_next: Ints
    left_ns: Ints
    # State of the whole machine.
    #: Shape (3,). Number of answers to be handed on now, state of the random generator, and the last core of the host
    #: work.
    host: Ints
    #: ``busy_ms``, ``finish_ms``: Scratch arrays for a replica's processes and a model's replicas, since compiled code
    #: creates no arrays.
    busy_ms: Any
    finish_ms: Any


class Tally(NamedTuple):
    """The counts of requests that arrived from ``span[0]`` on; chains have their rows after the M models."""

    span: Ints  #: Shape (2,). Begin and end of the time line.
    windows_per_ns: Floats  #: Shape (1,).
    #: ``arrived``, ``answered``, ``in_time``, ``longest``: Shape (M,). Numbers of requests; longest latency.
    arrived: Ints
    answered: Ints
    in_time: Ints
    missed: Ints  #: Shape (M, 7). By cause.
    stage_ns: Floats  #: Shape (M, 4). Sums.
    longest: Ints
    #: ``total``, ``stage``, ``by_replica``: Shape (M, fine bins), (M, 4, coarse bins), (R, coarse bins). Histograms of
    #: latencies, of their stages, and of latencies by replica.
    total: Ints
    stage: Ints
    by_replica: Ints
    #: ``replica_answered``, ``replica_in_time``, ``replica_by_end``: Shape (R,). Numbers of requests;
    #: ``replica_by_end``: answered before the end of the time line.
    replica_answered: Ints
    replica_in_time: Ints
    replica_by_end: Ints
    #: ``replica_batches``, ``replica_busy``: Shape (R,). Number of batches; busy time of processes.
    replica_batches: Ints
    replica_busy: Ints
    #: Shape (W, M, 3). Requests by window of arrival: all, answered, and in time.
    windows: Ints
    window_ns: Floats  #: Shape (W, M, 4). Sums of their stages.


def new_state(cluster: ClusterArrays, places: int, store: int, factors: int) -> State:
    """Return the state of an empty cluster at time 0 with room for ``places`` requests; no replica is alive yet."""
    models, replicas, processes = len(cluster.slo), len(cluster.batch), len(cluster.process_replica)
    workers = int(cluster.turns.max(initial=-1)) + 1
    # The calendar holds at most an event per process, an event per replica's timer, and two events per model.
    events = processes + replicas + 2 * models + 1
    ones = np.ones((replicas, factors))
    of_chains = places if (cluster.chain >= 0).any() else 0
    zeros = (
        (of_chains, "entered"),
        (replicas, "waiting armed counted_at joining held alive idle_since factor_position"),
        (models, "reserve_at living turn store_position store_size"),
        (processes, "expected_at started_at idle_before batch_size slice_next left_ns"),
        (workers, "turn_until slice_tail slice_until"),
        (places, "arrived joined"),
        (1, "free"),
    )
    absent = (
        (replicas, "queue_head queue_tail behind"),
        (models, "pending_head pending_tail orphans"),
        (processes, "done_at freed_at flight"),
        (workers, "slice_head"),
    )
    return State(
        **{name: np.zeros(size, np.int64) for size, names in zeros for name in names.split()},
        **{name: np.full(size, -1) for size, names in absent for name in names.split()},
        calendar=Calendar(np.zeros(events, np.int64), np.zeros(events, np.int64), np.zeros(1, np.int64)),
        next=np.append(np.arange(1, places, dtype=np.int32), np.int32(-1)),
        expected_ms=np.zeros(places),
        expected_rows=np.zeros(places, np.int64),
        arrival_count=np.zeros(replicas),
        refused_count=np.zeros(replicas),
        wait_ms=cluster.max_wait_ms.copy(),
        left_ms=np.zeros(replicas),
        reserve=np.full(models, RESERVE),
        spent=np.zeros((of_chains, len(STAGES)), np.int64),
        losses=np.zeros(places, np.int8),
        free_processes=np.diff(cluster.first_process),
        host=np.array([0, 1, 0], np.int64),
        store=np.zeros((models, store), np.int64),
        factors=ones,
        rested=ones if (cluster.cv == cluster.pause_cv).all() else np.ones_like(ones),
        busy_ms=np.zeros(max(1, int(np.diff(cluster.first_process).max(initial=1)))),
        finish_ms=np.zeros(max(1, replicas)),
    )


def new_tally(models: int, replicas: int, begin: int, end: int) -> Tally:
    """Return an empty tally."""

    def zeros(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    of_replicas = ("replica_answered", "replica_in_time", "replica_by_end", "replica_batches", "replica_busy")
    return Tally(
        **{name: zeros(models) for name in ("arrived", "answered", "in_time", "longest")},
        **{name: zeros(replicas) for name in of_replicas},
        span=np.array([begin, end], np.int64),
        windows_per_ns=np.array([WINDOWS / (end - begin)]),
        missed=zeros(models, len(CAUSES)),
        stage_ns=np.zeros((models, len(STAGES))),
        total=zeros(models, bins(FINE_BITS)),
        stage=zeros(models, len(STAGES), bins(COARSE_BITS)),
        by_replica=zeros(replicas, bins(COARSE_BITS)),
        windows=zeros(WINDOWS, models, 3),
        window_ns=np.zeros((WINDOWS, models, len(STAGES))),
    )


#: Bits of the id in a code; the priority has the higher bits and is compared first.
_ID_BITS = 40

#: Priorities. At the same instant processes become free before requests need them, and requests join before the
#: batching delay ends. Changes of the cluster (see `engine`) come before all events.
COMPLETION, ARRIVAL, JOIN, TIMER = range(1, 5)


class Calendar(NamedTuple):
    """Future events: ``times`` and ``codes`` of shape (capacity,); the first ``size[0]`` are in use."""

    times: NDArray[np.int64]
    codes: NDArray[np.int64]
    size: NDArray[np.int64]


def code_of(priority: int, ident: int) -> int:
    """Return the code of an event."""
    return (priority << _ID_BITS) + ident


def priority_of(code: int) -> int:
    """Return the priority in a code."""
    return code >> _ID_BITS


def ident_of(code: int) -> int:
    """Return the id of the object in a code."""
    return code & ((1 << _ID_BITS) - 1)


def push(calendar: Calendar, time: int, code: int) -> None:
    """Add an event."""
    times, codes = calendar.times, calendar.codes
    position = calendar.size[0]
    calendar.size[0] = position + 1
    while position > 0:
        parent = (position - 1) >> 1
        if times[parent] < time or (times[parent] == time and codes[parent] < code):
            break
        times[position], codes[position] = times[parent], codes[parent]
        position = parent
    times[position], codes[position] = time, code


def replace_first(calendar: Calendar, time: int, code: int) -> None:
    """Replace the first event by another: a single sift-down instead of two sifts."""
    times, codes = calendar.times, calendar.codes
    size = calendar.size[0]
    position = 0
    while True:
        child = 2 * position + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            times[right] < times[child] or (times[right] == times[child] and codes[right] < codes[child])
        ):
            child = right
        if time < times[child] or (time == times[child] and code < codes[child]):
            break
        times[position], codes[position] = times[child], codes[child]
        position = child
    times[position], codes[position] = time, code


def drop_first(calendar: Calendar) -> None:
    """Remove the first event."""
    last = calendar.size[0] - 1
    calendar.size[0] = last
    if last > 0:
        replace_first(calendar, calendar.times[last], calendar.codes[last])


#: Longest time of the last bin, 19 hours; longer times are counted there.
LONGEST_NS = 2**46 - 1
#: Bins of 1/256 of their value, for a model's latencies; of 1/32, for the many stages and replicas.
FINE_BITS, COARSE_BITS = 9, 6

Counts = NDArray[np.int64]


def bin_of(value_ns: int, bits: int) -> int:
    """Return the bin of a time, in a histogram of ``2**(bits - 1)`` bins per doubling."""
    value = min(value_ns, LONGEST_NS)
    shift = max(0, math.frexp(value)[1] - bits)
    return (shift << (bits - 1)) + (value >> shift)


def bins(bits: int) -> int:
    """Return the number of bins."""
    return ((46 - bits) << (bits - 1)) + (1 << bits)


def edges_ns(bits: int) -> Counts:
    """Return the lower edges of all bins and the upper edge of the last: an ndarray of shape (bins + 1,)."""
    half = 1 << (bits - 1)
    index = np.arange(bins(bits) + 1)
    shift = np.maximum(index // half - 1, 0)
    return np.asarray((index - shift * half) << shift, dtype=np.int64)


def percentile_ms(counts: Counts, bits: int, percent: float) -> float | None:
    """Return the percentile in milliseconds, for ``percent`` from 0 to 100; None of an empty histogram.

    Times are assumed to be uniform within a bin.
    """
    total = int(counts.sum())
    if total == 0:
        return None
    target = percent / 100.0 * total
    cumulative = np.cumsum(counts)
    position = int(np.searchsorted(cumulative, target, side="left"))
    edges = edges_ns(bits)
    low, high = int(edges[position]), int(edges[position + 1])
    into = (target - (int(cumulative[position]) - int(counts[position]))) / int(counts[position])
    return (low + into * (high - 1 - low)) / 1e6


def cdf_ms(counts: Counts, bits: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the upper ends in ms of non-empty bins, and the cumulative fractions."""
    bins = np.flatnonzero(counts)
    if len(bins) == 0:
        return np.zeros(0), np.zeros(0)
    return (edges_ns(bits)[bins + 1] - 1) / 1e6, np.cumsum(counts[bins]) / counts.sum()
