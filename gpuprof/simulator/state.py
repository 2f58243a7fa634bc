"""State of the compiled event loop: arrays in named tuples.

Letters in the shapes: M models, R replicas, P processes, B largest batch, N places for requests in the system, A and F
lengths of the stores of arrivals and of service times drawn ahead, W parts of the time line. Times are nanoseconds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuprof.rules.routing import RESERVE
from gpuprof.simulator.heap import Calendar
from gpuprof.simulator.histogram import COARSE_BITS, FINE_BITS, bins
from gpuprof.simulator.slowdown import Slowdown, no_slowdown

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

STAGES = ("router", "network", "batching", "queue", "service")
#: Why a request missed its SLO: the stage that made it late, or that it was never answered.
CAUSES = (*STAGES, "refused", "full", "failed")
#: Parts of the time line in an outcome.
WINDOWS = 60


class ClusterArrays(NamedTuple):
    """What is simulated; nothing of it changes between two changes of the cluster."""

    #: ``slo``, ``late_part``: Shape (M,). What a request may take, and which part of a model's requests may take
    #: longer.
    slo: Ints
    late_part: Floats
    #: ``request_leg``, ``answer_leg``: Shape (M,). The way of a request to its replica, and of its answer back.
    request_leg: Ints
    answer_leg: Ints
    #: ``choice``, ``choice_start``: Shape (R,), (M + 1,). The replicas of model m are
    #: ``choice[choice_start[m]:choice_start[m + 1]]``.
    choice_start: Ints
    choice: Ints
    #: ``replica_model``, ``batch``: Shape (R,).
    replica_model: Ints
    batch: Ints
    #: ``latency_ms``, ``turn_ms``: Shape (R, B). Mean time of a batch by how many are in it, with the longest wait for
    #: its turn, and without.
    latency_ms: Any
    turn_ms: Floats
    turns: Ints  #: Shape (R,). Replicas with one number run one batch at a time; -1: takes no turns.
    #: ``max_wait_ms``, ``cv``, ``pause_factor``, ``pause_cv``: Shape (R,). As in `gpuprof.domain.sojourn.BatchServer`.
    max_wait_ms: Floats
    cv: Floats
    pause_factor: Floats
    pause_cv: Floats
    #: ``first_process``, ``process_replica``: Shape (R + 1,), (P,). The processes of replica r are those from
    #: ``first_process[r]`` to before ``first_process[r + 1]``.
    first_process: Ints
    process_replica: Ints
    router_ns: int  #: Time of the router for a request.
    round_robin: bool  #: Each replica in turn instead of the fastest.
    refuse_hopeless: bool  #: See `gpuprof.simulator.cluster.SimulationOptions`.
    #: Shape (1,). What router and clients take of a CPU twice for a request, 0 where they slow no batch down.
    host_event: Ints
    #: ``core_start``, ``core_process``: The processes of core c are ``core_process[core_start[c]:core_start[c + 1]]``.
    core_start: Ints
    core_process: Ints


class State(NamedTuple):
    """Where the simulation stands.

    Requests in the system are places of a pool, chained by ``next``; -1 ends a chain. Times of events are nanoseconds;
    what ends in ``_ms`` are milliseconds, as `gpuprof.rules.routing` has them.
    """

    calendar: Calendar  #: The events to come.
    # The pool of requests.
    free: Ints  #: Shape (1,). Starts the chain of empty places.
    places_capped: Ints  #: Shape (1,). 1 when there may be no more places.
    #: ``next``, ``arrived``, ``joined``: Shape (N,). The place that follows in the chain; when the request was sent,
    #: and when it is with the replicas.
    next: NDArray[np.int32]
    arrived: Ints
    joined: Ints
    #: ``expected_ms``, ``expected_rows``: Shape (N,). When it was expected to be answered, after it was sent, in a
    #: batch of so many.
    expected_ms: Floats
    expected_rows: Ints
    losses: NDArray[np.int8]  #: Shape (N,). How often it was lost with a device that failed.
    # By model.
    #: ``pending_head``, ``pending_tail``: Shape (M,). The chain of requests on their way through router and network.
    pending_head: Ints
    pending_tail: Ints
    orphans: Ints  #: Shape (M,). Starts the chain of those that no living replica serves.
    #: ``living``, ``turn``: Shape (M,). How many of its replicas take requests, and whose turn it is where several
    #: would do.
    living: Ints
    turn: Ints
    #: ``reserve``, ``usual_reserve``, ``reserve_at``: Shape (M,). The part of an SLO that is kept in hand since
    #: ``reserve_at``, and that to which it relaxes.
    reserve: Floats
    usual_reserve: Floats
    reserve_at: Ints
    #: ``store``, ``store_position``, ``store_size``: Shape (M, A), (M,), (M,). Arrivals drawn ahead, which is next, and
    #: how many there are.
    store: Ints
    store_position: Ints
    store_size: Ints
    # By replica.
    #: ``queue_head``, ``queue_tail``, ``waiting``: Shape (R,). The chain of requests that wait, and how many do.
    queue_head: Ints
    queue_tail: Ints
    waiting: Ints
    behind: Ints  #: Shape (R,). The last of those that were put before a queue's head, -1: none.
    solo_requests: Ints  #: Shape (R,). How many in a queue were lost so often that they go alone.
    #: ``armed``, ``held``, ``wait_ms``: Shape (R,). Whether a timer is set, whether the next batch waits to be filled,
    #: and how long one does.
    armed: Ints
    held: Ints
    wait_ms: Floats
    #: ``arrival_count``, ``refused_count``, ``counted_at``: Shape (R,). Its arrivals as
    #: `gpuprof.rules.routing.decay_count` leaves them at ``counted_at``, and those of them that were refused.
    arrival_count: Floats
    refused_count: Floats
    counted_at: Ints
    #: ``joining``, ``left_ms``: Shape (R,). What its next batch is expected to hold, and how long arrivals wait for a
    #: process on average.
    joining: Ints
    left_ms: Floats
    #: ``alive``, ``idle_since``, ``free_processes``: Shape (R,). 1 takes requests, 0 takes none any more; since when
    #: some process has been free, and how many are.
    alive: Ints
    idle_since: Ints
    free_processes: Ints
    takes: Any  #: Shape (R,). ``alive`` in the order of `ClusterArrays.choice`.
    #: ``factors``, ``rested``, ``factor_position``: Shape (R, F), (R, F), (R,). Service times over their mean, those of
    #: batches that find their process at rest, and which is next.
    factors: Floats
    rested: Floats
    factor_position: Ints
    # By process.
    #: ``done_at``, ``freed_at``, ``started_at``: Shape (P,). When its batch ends, -1 while it is free; since when it is
    #: free; when its batch started.
    done_at: Ints
    freed_at: Ints
    started_at: Ints
    expected_at: Ints  #: Shape (P,). What the router believes of ``done_at``: it knows the means alone.
    idle_before: Ints  #: Shape (P,). ``idle_since`` of its replica when its batch started.
    #: ``flight``, ``batch_size``: Shape (P,). The first request of its batch, and how many are in it.
    flight: Ints
    batch_size: Ints
    turn_until: Ints  #: By number of ``turns``: when all batches that were sent to those replicas will be done.
    # Of the whole machine.
    router_until: Ints  #: Shape (1,). When the router has done all that it was given.
    #: Shape (3,). How many answers router and clients have to hand on now, the number that is drawn from, and the core
    #: on which they were last.
    host: Ints
    slowdown: Slowdown
    #: ``busy_ms``, ``finish_ms``: Room to work in, for the processes of one replica and the replicas of one model:
    #: compiled code makes no arrays.
    busy_ms: Any
    finish_ms: Any


class Tally(NamedTuple):
    """What has been counted, of requests that arrived from ``span[0]`` on."""

    span: Ints  #: Shape (2,). Begin and end of the time line.
    windows_per_ns: Floats  #: Shape (1,).
    #: ``arrived``, ``answered``, ``in_time``, ``longest``: Shape (M,). Requests; longest latency.
    arrived: Ints
    answered: Ints
    in_time: Ints
    missed: Ints  #: Shape (M, 8). By cause.
    stage_ns: Floats  #: Shape (M, 5). Sums.
    longest: Ints
    #: ``total``, ``stage``, ``by_replica``: Shape (M, fine bins), (M, 5, coarse bins), (R, coarse bins). Histograms: of
    #: latencies, of their stages, of latencies by replica.
    total: Ints
    stage: Ints
    by_replica: Ints
    #: ``replica_answered``, ``replica_in_time``, ``replica_by_end``: Shape (R,). Requests; ``replica_by_end`` those
    #: answered before the time line ended.
    replica_answered: Ints
    replica_in_time: Ints
    replica_by_end: Ints
    #: ``replica_batches``, ``replica_busy``: Shape (R,). Batches, and the time that processes were busy.
    replica_batches: Ints
    replica_busy: Ints
    #: Shape (W, M, 3). Of the requests that arrived in a part of the time line, all, the answered and those in time.
    windows: Ints
    window_ns: Floats  #: Shape (W, M, 5). Sums of their stages.


def new_state(cluster: ClusterArrays, places: int, store: int, factors: int) -> State:
    """Return the state of an empty cluster at time 0 with room for ``places`` requests; no replica lives yet."""
    models, replicas, processes = len(cluster.slo), len(cluster.batch), len(cluster.process_replica)
    # At most one event stands for each process, for each replica's timer, and two for each model.
    events = processes + replicas + 2 * models + 1
    ones = np.ones((replicas, factors))
    zeros = (
        (replicas, "waiting armed counted_at joining held solo_requests alive takes idle_since factor_position"),
        (models, "reserve_at living turn store_position store_size"),
        (processes, "expected_at started_at idle_before batch_size"),
        (places, "arrived joined"),
        (1, "free places_capped router_until"),
    )
    absent = (
        (replicas, "queue_head queue_tail behind"),
        (models, "pending_head pending_tail orphans"),
        (processes, "done_at freed_at flight"),
    )
    return State(
        **{name: np.zeros(size, np.int64) for size, names in zeros for name in names.split()},
        **{name: np.full(size, -1) for size, names in absent for name in names.split()},
        calendar=Calendar(np.zeros(events, np.int64), np.zeros(events, np.int64), np.zeros(1, np.int64)),
        next=link_free_places(0, places),
        expected_ms=np.zeros(places),
        expected_rows=np.ones(places, np.int64),
        arrival_count=np.zeros(replicas),
        refused_count=np.zeros(replicas),
        wait_ms=cluster.max_wait_ms.copy(),
        left_ms=np.zeros(replicas),
        reserve=np.full(models, RESERVE),
        usual_reserve=np.full(models, RESERVE),
        losses=np.zeros(places, np.int8),
        slowdown=no_slowdown(replicas),
        free_processes=np.diff(cluster.first_process),
        turn_until=np.zeros(int(cluster.turns.max(initial=-1)) + 1, np.int64),
        host=np.array([0, 1, 0], np.int64),
        store=np.zeros((models, store), np.int64),
        factors=ones,
        rested=ones if (cluster.cv == cluster.pause_cv).all() else np.ones_like(ones),
        busy_ms=np.zeros(max(1, int(np.diff(cluster.first_process).max(initial=1)))),
        finish_ms=np.zeros(max(1, replicas)),
    )


def link_free_places(first: int, last: int) -> NDArray[np.int32]:
    """Return the links of a chain of empty places from ``first`` to before ``last``."""
    links = np.arange(first + 1, last + 1, dtype=np.int32)
    links[-1] = -1
    return links


def new_tally(models: int, replicas: int, begin: int, end: int) -> Tally:
    """Return a tally of nothing."""

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
