"""Replicas that share a stream of requests, simulated request by request with an analytical tail.

The random numbers are fixed, so that the result is a function of its arguments, and neighbouring arguments give
comparable results. A plain simulation would need millions of requests near capacity, because a backlog persists for
thousands of batches. So requests with gamma gaps are stratified by the backlog of a single server with all replicas'
capacity and full batches only, whose law is known exactly (`batch_chain`): the simulation only estimates the
requests' times *given* that backlog, which vary little and are forgotten within a few batches. Other arrival processes
are simulated for longer instead.

The server's own rules, `gpuprof.rules.routing` and `gpuprof.rules.batching`, decide the replica of a request and the
size of a batch; numba compiles them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainccinv, gammaincinv, ndtr, ndtri

from gpuprof.domain.arrival_process import MmppArrivals, RecordedArrivals, scale_to_rate
from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, ServedPart, Sojourn
from gpuprof.estimators.queueing.batch_chain import Backlog, backlog_law, limit_threads
from gpuprof.estimators.queueing.scaling import pair_quantiles, scale_server, scale_sojourn
from gpuprof.machine.machine_code import compile_untimed
from gpuprof.rules.batching import batch_size_now
from gpuprof.rules.routing import decay_count, expect_rows, finish_ms, forecast_joining

Array = NDArray[Any]
#: Kinds of replicas and their counts.
Kinds = tuple[tuple[BatchServer, int], ...]

_SEED = 20240229
#: Maximum simulated replicas; larger pools are treated as this many at the same load, since waits hardly shrink
#: further.
_MOST_REPLICAS = 96
#: Least number of requests with gamma gaps, and of full batches.
_REQUESTS, _GROUPS = 1 << 15, 1 << 12
#: Number of requests of other arrival processes, whose law is not known.
_UNWEIGHTED = 1 << 21
#: Reductions for a coarse answer: of the requests; of the replicas, and of the requests left out at the begin. Its
#: callers solve the whole pool where it is late by little. Without a law, all requests are reduced by both.
_COARSER, _COARSER_BEGIN = 8, 4
#: Number of longest full batches left out of the statistics, and seen at least. Many replicas of large batches that all
#: begin idle stay synchronised for this time, and the router's counts of arrivals must fill.
_SETTLING = 40.0
_SETTLED = 4.0 * _SETTLING
#: Number of random numbers, drawn once: a power of two.
_SCORES = 1 << 19
#: Bins of the histogram of the times, equal in logarithm.
_BINS = 1 << 11
#: Least number of groups observed in a stratum.
_ENOUGH = 10
#: Quantile levels of the backlog between which the strata lie.
_STRATA = np.concatenate([np.linspace(0.04, 0.96, 24), 1.0 - np.geomspace(0.03, 1e-4, 12)])
_PROBABILITIES = np.unique(
    np.concatenate([np.linspace(0.0, 0.95, 77), 1.0 - np.geomspace(0.05, 1e-5, 36), [0.9, 0.99, 0.999, 0.9999]])
)
#: A row of an array, which the rules take for a sequence of numbers.
Row = Any

#: Range of the standard normal scores at which the quantiles of a law are tabulated, and number of entries per score.
SCORE_REACH = 5.5
ENTRIES_PER_SCORE = 40
ENTRIES = int(2 * SCORE_REACH * ENTRIES_PER_SCORE) + 1

_NEVER = np.inf


def solve_pool(arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
    """Return the times in a stable pool. ``coarse``: simulate a small part of the requests only."""
    # Pools with proportional times share a solution, except under a process in absolute times.
    unit_ms = 1.0 if arrivals.process is not None else min(server.latency_ms[server.batch - 1] for server in servers)
    scaled = [scale_server(server, unit_ms) for server in servers]
    counts = Counter(scaled)
    kinds = _reduce_counts(counts, _MOST_REPLICAS // _COARSER_BEGIN if coarse else _MOST_REPLICAS)
    load = float(f"{arrivals.rate_rps / math.fsum(server.capacity_rps for server in servers):.5g}")
    rate_rps, process = load * _capacity_rps(kinds), arrivals.process
    process = None if process is None else scale_to_rate(process, rate_rps)
    whole, *parts = _simulate(Arrivals(rate_rps, round(arrivals.scv, 4), process), kinds, coarse)
    each = {server: part.rate_rps / count for (server, count), part in zip(kinds, parts, strict=True)}
    sojourns = {server: part.sojourn for (server, _), part in zip(kinds, parts, strict=True)}
    pairs = list(zip(scaled, (server.overhead_ms for server in servers), strict=True))
    laws = {(alike, added_ms): scale_sojourn(sojourns[alike], unit_ms, added_ms) for alike, added_ms in set(pairs)}
    # In a reduced pool, rounding may over-represent small kinds.
    total = math.fsum(each[server] for server in scaled)
    return PoolSojourn(
        scale_sojourn(whole.sojourn, unit_ms, max(server.overhead_ms for server in servers)),
        tuple(ServedPart(arrivals.rate_rps * each[pair[0]] / total, laws[pair]) for pair in pairs),
    )


def _capacity_rps(kinds: Kinds) -> float:
    return math.fsum(server.capacity_rps * count for server, count in kinds)


def _reduce_counts(counts: Counter[BatchServer], most: int) -> Kinds:
    """Return the kinds of replicas in a fixed order; larger pools are scaled down to the simulated size."""
    scale = min(1.0, most / counts.total())
    return tuple((server, max(1, round(scale * counts[server]))) for server in sorted(counts, key=repr))


@lru_cache(maxsize=20_000)
def _simulate(arrivals: Arrivals, kinds: Kinds, coarse: bool) -> tuple[ServedPart, ...]:
    """Return the rate and the times of all requests together, then those of each kind of replica."""
    capacity = _capacity_rps(kinds)
    settling = round(_SETTLING / 1000.0 * max(server.latency_ms[-1] for server, _ in kinds) * arrivals.rate_rps)
    group = max(1, round(math.fsum(server.batch * server.capacity_rps * count for server, count in kinds) / capacity))
    requests = max(_REQUESTS, _GROUPS * group, round(settling * _SETTLED / _SETTLING))
    if coarse:
        settling, requests = settling // _COARSER_BEGIN, requests // _COARSER
    if arrivals.process is not None:
        requests = _UNWEIGHTED // (_COARSER * _COARSER_BEGIN) if coarse else _UNWEIGHTED
    arrivals_ms = _draw_arrivals(arrivals, settling + requests)
    group = min(group, len(arrivals_ms))
    groups = len(arrivals_ms) // group
    draws = Draws(*_draw_scores(), group)
    law = None
    # The variation of a service time, weighted by the capacity.
    cv = math.fsum(server.latency_cv * server.capacity_rps * count for server, count in kinds) / capacity
    if arrivals.process is None:
        law = _scaled_backlog(float(f"{arrivals.rate_rps * group / capacity:.6g}"), arrivals.scv, group, round(cv, 4))
    strata, mass = np.zeros(groups, np.int64), np.ones(1)
    if law is not None:
        mean = 1000.0 * group / capacity
        services = mean * _value_at(_quantiles(cv**2), draws.groups[: groups - 1])
        backlog = _find_backlogs(arrivals_ms[group - 1 :: group], services)
        labels, mass = _label_cells(law)
        strata = labels[np.minimum((backlog / mean / law.step + 0.5).astype(np.int64), len(labels) - 1)]
        law = Backlog(law.step * mean, law.mass)
    replicas = _tabulate(kinds)
    state = new_state(replicas, len(arrivals_ms), group)
    spent, served_by = np.empty(len(arrivals_ms)), np.zeros(len(arrivals_ms), np.int64)
    _compile_serve()(replicas, state, draws, arrivals_ms, spent, served_by)
    begin = min(settling // group, groups // 2)
    part = slice(begin * group, groups * group)
    times = _weigh(spent[part], served_by[part], group, strata[begin:], mass, len(kinds))
    return _summarize(times, law, kinds, state, served_by, arrivals.rate_rps, float(arrivals_ms[-1]))


@lru_cache(maxsize=4_000)
def _scaled_backlog(rate: float, scv: float, group: int, cv: float) -> Backlog | None:
    with limit_threads():
        return backlog_law(rate, scv, group, 1.0, cv)


def _find_backlogs(arrivals_ms: Array, services: Array) -> Array:
    """Return the backlog found by each group of requests, by Lindley's recursion."""
    changes = np.resize(services, len(arrivals_ms) - 1) - np.diff(arrivals_ms)
    path = np.concatenate([[0.0], np.cumsum(changes)])
    return np.asarray(path - np.minimum.accumulate(path))


def _draw_arrivals(arrivals: Arrivals, requests: int) -> Array:
    """Return the arrival times in ms of ``requests`` requests at exactly the rate, to which waiting is sensitive."""
    process = arrivals.process
    if isinstance(process, RecordedArrivals):
        return _pick_pieces(process.times * 1e-6, requests)
    if isinstance(process, MmppArrivals):
        times = _draw_bursts(process, requests)
    elif process is not None:
        times = process.stream(np.random.default_rng(_SEED)).take(requests) * 1e-6
    else:
        times = _unit_arrivals(arrivals.scv, 1 << (requests - 1).bit_length())[:requests]
    return np.asarray(times * (1000.0 / arrivals.rate_rps * requests / times[-1]))


@lru_cache(maxsize=8)
def _unit_arrivals(scv: float, requests: int) -> Array:
    """Return the arrivals for gamma gaps with a mean of 1."""
    scores = np.random.default_rng(_SEED).standard_normal(min(requests, _SCORES))
    return np.asarray(np.cumsum(np.resize(_value_at(_quantiles(scv), scores), requests)))


def _draw_bursts(process: MmppArrivals, requests: int) -> Array:
    """Return arrivals in bursts and calm periods, whose few durations are spread evenly over their distribution."""
    random = np.random.default_rng(_SEED)
    burst_ms, calm_ms = 1000.0 * process.burst_s, 1000.0 * process.calm_s
    calm_rate = process.rate_rps / 1000.0 * (burst_ms + calm_ms) / (process.ratio * burst_ms + calm_ms)
    count = max(1, round(1000.0 * requests / process.rate_rps / (burst_ms + calm_ms)))
    lengths = -np.log1p(-(np.arange(count) + 0.5) / count)
    stays = np.array([mean * random.permutation(lengths) for mean in (calm_ms, burst_ms)]).T.ravel()
    expected = np.cumsum(stays * np.tile([calm_rate, process.ratio * calm_rate], count))
    events = np.cumsum(random.standard_exponential(requests))
    times = np.interp(events * (expected[-1] / events[-1]), np.append(0.0, expected), np.append(0.0, np.cumsum(stays)))
    return np.asarray(times)


def _pick_pieces(times: Array, requests: int) -> Array:
    """Return a recording, or ``requests`` of its requests: pieces from all its parts in sequence."""
    if len(times) <= requests:
        return np.asarray(times, dtype=np.float64)
    length = math.isqrt(requests)
    starts = np.linspace(0, len(times) - length, requests // length).astype(np.int64)
    gaps = np.diff(times, prepend=0.0)
    return np.cumsum(np.concatenate([gaps[start : start + length] for start in starts]))


def _tabulate(kinds: Kinds) -> Any:
    servers = [(number, server) for number, (server, count) in enumerate(kinds) for _ in range(count)]
    largest = max(server.batch for _, server in servers)
    means = np.array([(*row.latency_ms, *[row.latency_ms[-1]] * (largest - row.batch)) for _, row in servers])
    laws: dict[tuple[float, float], int] = {}
    running = [laws.setdefault((1.0, server.latency_cv), len(laws)) for _, server in servers]
    rested = [laws.setdefault((server.pause_factor, server.pause_cv or 0.0), len(laws)) for _, server in servers]
    processes = [server.processes for _, server in servers]
    return Replicas(
        means,
        np.array([server.batch for _, server in servers]),
        np.array([server.max_wait_ms for _, server in servers], np.float64),
        np.array([number for number, _ in servers]),
        np.cumsum([0, *processes]),
        np.repeat(np.arange(len(servers)), processes),
        np.array(running),
        np.array(rested),
        np.array([factor * _quantiles(cv**2) for factor, cv in laws]),
    )


def _label_cells(law: Backlog) -> tuple[Array, Array]:
    """Return the stratum of each cell of the backlog, and the probability of each stratum."""
    labels = 1 + np.searchsorted(_STRATA, np.cumsum(law.mass) - 0.5 * law.mass)
    labels[0] = 0
    labels = np.unique(labels, return_inverse=True)[1]
    return labels, np.bincount(labels, law.mass)


@dataclass(frozen=True, slots=True)
class _Times:
    """Cumulative distributions of the times by kind and in total, and the masses of all and of rare backlogs."""

    edges: Array
    below: Array
    part: Array
    mean: Array
    unseen: float


def _weigh(spent: Array, served_by: Array, group: int, strata: Array, mass: Array, kinds: int) -> _Times:
    """Return the distribution of the times, each stratum weighted by its exact probability."""
    counts = np.bincount(strata, minlength=len(mass)).astype(np.float64)
    merged, top = _merge_rare(counts)
    weights = np.bincount(merged, mass, top + 1) / np.maximum(np.bincount(merged, counts, top + 1), 1.0)
    each = np.repeat(weights[merged][strata], group)
    high = float(spent.max())
    spent = np.maximum(spent, high * np.finfo(np.float64).eps)  # 0 where the difference of end and begin was rounded
    low = float(spent.min())
    # Equal in the logarithm of the time: with bursts, some requests take a thousand times as long as others.
    scale = _BINS / max(math.log(high / low), 1e-9)
    cells = np.minimum((np.log(spent / low) * scale).astype(np.int64), _BINS - 1)
    histogram = np.bincount(served_by * _BINS + cells, each, kinds * _BINS).reshape(kinds, _BINS)
    sums = np.bincount(served_by, each * spent, kinds)
    histogram = np.vstack([histogram.sum(axis=0), histogram])
    total = np.maximum(histogram.sum(axis=1), 1e-300)
    below = np.hstack([np.zeros((kinds + 1, 1)), np.cumsum(histogram, axis=1) / total[:, None]])
    mean = np.append(sums.sum(), sums) / total
    unseen = float(mass[np.arange(len(counts)) > top].sum())
    return _Times(low * np.exp(np.arange(_BINS + 1) / scale), below, total / total[0], mean, unseen)


def _merge_rare(counts: Array) -> tuple[Array, int]:
    """Return for each stratum the stratum that represents it, and the last stratum with enough observations.

    Rarely observed strata join the next lower sufficient stratum, the lowest the next higher.
    """
    often = np.flatnonzero(counts >= _ENOUGH)
    lowest, top = (int(often[0]), int(often[-1])) if len(often) else (0, 0)
    labels = np.maximum.accumulate(np.where(counts >= _ENOUGH, np.arange(len(counts)), lowest))
    return np.minimum(labels, top), top


def _summarize(
    times: _Times, law: Backlog | None, kinds: Kinds, state: Any, served_by: Array, rate_rps: float, duration_ms: float
) -> tuple[ServedPart, ...]:
    counts = [count for _, count in kinds]
    kind = np.repeat(np.arange(len(kinds)), counts)
    answered = _with_total(np.bincount(served_by, minlength=len(kinds)).astype(np.float64))
    batches = _with_total(np.bincount(kind, state.batches, len(kinds)))
    # The strata's weights change the part of the requests that a kind answers, and with it the kind's busy time.
    busy = np.bincount(kind, state.busy, len(kinds)) * times.part[1:] * answered[0] / np.maximum(answered[1:], 1.0)
    processes = _with_total(np.array([server.processes * count for server, count in kinds], np.float64))
    utilization = np.minimum(_with_total(busy) / duration_ms / processes, 1.0)
    return tuple(
        ServedPart(
            rate_rps * float(times.part[row]),
            Sojourn(
                float(utilization[row]),
                float(answered[row] / max(batches[row], 1.0)),
                float(times.mean[row]),
                pair_quantiles(_PROBABILITIES, _quantiles_of(times, times.below[row], law)),
            ),
        )
        for row in range(len(kinds) + 1)
    )


def _with_total(by_kind: Array) -> Array:
    """Return the sum of the values over kinds, followed by the values."""
    return np.asarray(np.append(by_kind.sum(), by_kind))


def _quantiles_of(times: _Times, below: Array, law: Backlog | None) -> Array:
    """Return the quantiles; in the unobserved tail they rise at least as much as the backlog's."""
    quantiles: Array = np.interp(_PROBABILITIES, below, times.edges)
    if law is None or times.unseen <= 0.0:
        return quantiles
    last = np.array([1.0 - min(3.0 * times.unseen, 0.5)])
    further = float(np.interp(last, below, times.edges)[0]) + law.quantile(_PROBABILITIES) - law.quantile(last)
    return np.asarray(np.where(last < _PROBABILITIES, np.maximum(quantiles, further), quantiles))


@cache
def _quantiles(scv: float) -> Array:
    """Return the quantiles of a gamma distribution of mean 1 at the standard normal scores of the table."""
    scores = np.linspace(-SCORE_REACH, SCORE_REACH, ENTRIES)
    if scv < 1e-8:
        return np.ones(len(scores))
    half = len(scores) // 2
    # Each half from its own end: a probability just below 1 has no digits left for the tail.
    low, high = gammaincinv(1.0 / scv, ndtr(scores[:half])), gammainccinv(1.0 / scv, ndtr(-scores[half:]))
    return np.asarray(scv * np.concatenate([low, high]), dtype=np.float64)


def _value_at(law: Array, scores: Array) -> Array:
    """Return the quantiles at standard normal scores."""
    return np.interp(scores, np.linspace(-SCORE_REACH, SCORE_REACH, len(law)), law)


@cache
def _draw_scores() -> tuple[Array, Array]:
    """Return normal scores: random ones for batches, evenly spread ones for the reported times.

    These are multiples of the golden section, of which any stretch is nearly uniform.
    """
    groups = np.random.default_rng(_SEED + 1).standard_normal(_SCORES, np.float32)
    even = ndtri((np.arange(1, _SCORES + 1) * 0.6180339887498949) % 1.0).astype(np.float32)
    return groups, even


class Replicas(NamedTuple):
    """Constants of the pool: K replicas of batches up to B, P processes in all, Q service time distributions."""

    means: Array  #: Shape (K, B). Mean time of a batch of 1, 2, … requests.
    #: ``batch``, ``max_wait``, ``kind``: Shape (K,). ``kind``: replicas of the same kind are reported together.
    batch: Array
    max_wait: Array
    kind: Array
    first: Array  #: Shape (K + 1,). First process of each replica.
    owner: Array  #: Shape (P,).
    #: ``running``, ``rested``: Shape (K,). Rows of ``laws``: for a batch directly after another, and for a batch on an
    #: idle process.
    running: Array
    rested: Array
    laws: Array  #: Shape (Q, ENTRIES). Quantiles of a service time over its mean, by standard normal score.


class PoolState(NamedTuple):
    """Mutable state; times are absolute, and infinite without a pending event."""

    #: ``waiting``, ``head``, ``tail``, ``free``: Shape (K,). Number of queued requests, the first and the last of them,
    #: and idle processes.
    waiting: Array
    head: Array
    tail: Array
    free: Array
    #: ``timer``, ``finish``, ``delay``: Shape (K,). End of the oldest request's batching delay; the expected answer of
    #: a request that joins now is at the later of ``finish`` and now + ``delay``.
    timer: Array
    finish: Array
    delay: Array
    #: ``done``, ``expected``, ``freed``: Shape (P,). Actual and expected end of a process's batch; start of its idle
    #: time.
    done: Array
    expected: Array
    freed: Array
    next: Array  #: Shape (N,). Successor of each request in its queue.
    used: Array  #: Shape (groups,). Whether the service time drawn for a group of requests was used.
    counts: Array  #: Shape (2,). Number of further service times drawn, and the router's rotation counter.
    #: ``busy``, ``batches``: Shape (K,). Total time and number of batches.
    busy: Array
    batches: Array
    spare: Array  #: Shape (P,). Working memory: compiled code allocates no arrays.
    #: ``recent``, ``counted``: Shape (K,). Arrivals as `gpuprof.rules.routing.decay_count` leaves them, and the time of
    #: the last.
    recent: Array
    counted: Array
    joining: Array  #: Shape (K,). Expected number of requests in the next batch.


class Draws(NamedTuple):
    """Random numbers."""

    groups: Array  #: Standard normal scores for each group of requests; from the end on for further batches of a group.
    even: Array  #: Evenly spread scores for the reported times.
    group: int  #: Number of requests per group.


def new_state(replicas: Replicas, requests: int, group: int) -> PoolState:
    """Return idle replicas with space for ``requests`` requests."""
    count, processes = len(replicas.batch), len(replicas.owner)
    return PoolState(
        waiting=np.zeros(count, np.int64),
        head=np.zeros(count, np.int64),
        tail=np.zeros(count, np.int64),
        free=np.diff(replicas.first),
        timer=np.full(count, _NEVER),
        finish=np.zeros(count),
        delay=replicas.means[:, 0].copy(),
        done=np.full(processes, _NEVER),
        expected=np.zeros(processes),
        freed=np.zeros(processes),
        next=np.zeros(requests, np.int64),
        used=np.zeros(requests // group + 1, np.bool_),
        counts=np.zeros(2, np.int64),
        busy=np.zeros(count),
        batches=np.zeros(count, np.int64),
        spare=np.zeros(processes),
        recent=np.zeros(count),
        counted=np.zeros(count),
        joining=np.zeros(count, np.int64),
    )


def value_at(law: Array, score: float) -> Any:
    """Return the quantile of a distribution at a standard normal score."""
    place = (score + SCORE_REACH) * ENTRIES_PER_SCORE
    cell = min(max(int(place), 0), ENTRIES - 2)
    return law[cell] + (law[cell + 1] - law[cell]) * min(max(place - cell, 0.0), 1.0)


def _rank(replicas: Replicas, state: PoolState, arrived: Array, replica: int, now: float) -> None:
    """Record the expected answer of a request that joins a replica, by the router's rule."""
    if len(state.finish) == 1:
        return  # a single replica leaves no choice
    begin, end = replicas.first[replica], replicas.first[replica + 1]
    busy: Row = state.spare[: end - begin]
    latency: Row = replicas.means[replica, : replicas.batch[replica]]
    limit, waiting, waited = replicas.max_wait[replica], state.waiting[replica], 0.0
    for i in range(end - begin):
        busy[i] = max(0.0, state.expected[begin + i] - now)
    if waiting > 0:
        waited = now - arrived[state.head[replica]]
    rows = expect_rows(waiting, 0 if state.free[replica] > 0 else state.joining[replica], len(latency))
    state.finish[replica] = now + finish_ms(waiting, waited, busy, rows, latency, limit)
    for i in range(end - begin):
        busy[i] = 0.0
    # Limit of the expected time, relative to now, once batches are overdue and the oldest request has waited.
    state.delay[replica] = finish_ms(waiting, limit, busy, rows, latency, limit)


def _choose(state: PoolState, now: float) -> int:
    """Return the replica with the earliest expected answer; ties in rotation."""
    count = len(state.finish)
    if count == 1:
        return 0
    state.counts[1] += 1
    best, equal = _NEVER, 0
    for j in range(count):
        value = max(state.finish[j], now + state.delay[j])
        if value < best:
            best, equal = value, 0
        if value == best:
            equal += 1
    remaining = state.counts[1] % equal
    for j in range(count):
        if max(state.finish[j], now + state.delay[j]) == best:
            if remaining == 0:
                return j
            remaining -= 1
    return 0


def _start(
    replicas: Replicas,
    state: PoolState,
    draws: Draws,
    arrived: Array,
    spent: Array,
    replica: int,
    size: int,
    now: float,
) -> None:
    """Give the oldest ``size`` requests of a replica to its first idle process."""
    process = replicas.first[replica]
    while state.done[process] < _NEVER:
        process += 1
    request = state.head[replica]
    group = request // draws.group
    if state.used[group]:  # each group's number is drawn once at most
        state.counts[0] += 1
        score = draws.groups[-state.counts[0] & (len(draws.groups) - 1)]
    else:
        score = draws.groups[group & (len(draws.groups) - 1)]
        state.used[group] = True
    law = replicas.laws[replicas.rested[replica] if now > state.freed[process] else replicas.running[replica]]
    mean = replicas.means[replica, size - 1]
    service = mean * value_at(law, score)
    if len(state.finish) > 1:  # the forecast is for the router's choice
        batch, processes = replicas.batch[replica], replicas.first[replica + 1] - replicas.first[replica]
        latency: Row = replicas.means[replica, :batch]
        recent = decay_count(state.recent[replica], now - state.counted[replica], latency[batch - 1])
        state.joining[replica] = forecast_joining(recent, mean, latency, processes, 0.0, np.inf)
    for _ in range(size):
        # Service and wait are independent: for the reported times each request has a service time of its own, evenly
        # spread over the law, since batches alone would sample the tail too rarely.
        spent[request] = now - arrived[request] + mean * value_at(law, draws.even[request & (len(draws.even) - 1)])
        request = state.next[request]
    state.head[replica] = request
    state.waiting[replica] -= size
    state.free[replica] -= 1
    state.done[process], state.expected[process] = now + service, now + mean
    state.busy[replica] += service
    state.batches[replica] += 1


def _dispatch(
    replicas: Replicas, state: PoolState, draws: Draws, arrived: Array, spent: Array, replica: int, now: float
) -> None:
    """Start the batches that the rule allows, and set the timer for the next."""
    state.timer[replica] = _NEVER
    limit = replicas.max_wait[replica]
    while state.free[replica] > 0 and state.waiting[replica] > 0:
        oldest = arrived[state.head[replica]]
        waited = limit if now >= oldest + limit else now - oldest
        size = batch_size_now(state.waiting[replica], replicas.batch[replica], waited, limit)
        if size == 0:
            state.timer[replica] = oldest + limit
            break
        _start(replicas, state, draws, arrived, spent, replica, size, now)
    _rank(replicas, state, arrived, replica, now)


def _soonest(state: PoolState) -> tuple[int, float]:
    """Return the process that ends first, or -1 - j for the replica j whose timer ends first, with the time."""
    event, when = 0, _NEVER
    for p in range(len(state.done)):
        if state.done[p] < when:
            event, when = p, state.done[p]
    for j in range(len(state.timer)):
        if state.timer[j] < when:
            event, when = -1 - j, state.timer[j]
    return event, when


def _serve(replicas: Replicas, state: PoolState, draws: Draws, arrived: Array, spent: Array, kinds: Array) -> None:
    """Serve the arrivals; fill ``spent`` with the requests' times and ``kinds`` with their replicas' kinds."""
    event, when = 0, _NEVER
    for i in range(len(arrived) + 1):
        # The additional iteration after the last arrival serves the remaining queue.
        until = arrived[i] if i < len(arrived) else 1e300
        while when <= until:
            replica = -1 - event
            if event >= 0:
                replica = replicas.owner[event]
                state.done[event] = _NEVER
                state.freed[event] = state.expected[event] = when
                state.free[replica] += 1
            _dispatch(replicas, state, draws, arrived, spent, replica, when)
            event, when = _soonest(state)
        if i == len(arrived):
            break
        chosen = _choose(state, until)
        kinds[i] = replicas.kind[chosen]
        if state.waiting[chosen] == 0:
            state.head[chosen] = i
        else:
            state.next[state.tail[chosen]] = i
        state.tail[chosen] = i
        state.waiting[chosen] += 1
        if len(state.finish) > 1:
            full = replicas.means[chosen, replicas.batch[chosen] - 1]
            state.recent[chosen] = 1.0 + decay_count(state.recent[chosen], until - state.counted[chosen], full)
            state.counted[chosen] = until
        if state.free[chosen] > 0:
            _dispatch(replicas, state, draws, arrived, spent, chosen, until)
            event, when = _soonest(state)
        else:
            _rank(replicas, state, arrived, chosen, until)


@cache
def _compile_serve() -> Any:
    return compile_untimed(_run)  # takes seconds, once on a machine


def _run(replicas: Replicas, state: PoolState, draws: Draws, arrived: Array, spent: Array, kinds: Array) -> None:
    _serve(replicas, state, draws, arrived, spent, kinds)
