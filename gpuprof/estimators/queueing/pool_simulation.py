"""Simulation of replicas that share a stream of requests, with an analytical tail where available.

Where the real queue has no analysis, requests are simulated one by one with fixed random numbers, so that the result is
a function of its arguments, and neighbouring arguments give comparable results. A plain simulation would need millions
of requests near capacity, because a backlog persists for thousands of batches. So requests are stratified by the
backlog of a single server with all replicas' capacity and full batches only (`batch_backlog`), whose law is known
exactly for independent gaps (post-stratification): the simulation only estimates the requests' times *given* that
backlog, which vary little and are forgotten within a few batches. Under bursts the backlog of `burst_path` is used;
other arrival processes are simulated for longer instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainccinv, gammaincinv, ndtr, ndtri

from gpuprof.domain.arrival_process import (
    DiurnalArrivals,
    HyperexponentialArrivals,
    LognormalArrivals,
    MmppArrivals,
    RecordedArrivals,
    scale_to_rate,
)
from gpuprof.estimators.queueing import pool_kernel
from gpuprof.estimators.queueing.batch_backlog import Backlog, backlog_law
from gpuprof.estimators.queueing.blas_threads import blas_threads
from gpuprof.estimators.queueing.burst_path import draw_path
from gpuprof.estimators.queueing.gap_law import Renewal
from gpuprof.estimators.queueing.replica_kernel import serve_alone
from gpuprof.estimators.queueing.scaled_server import PoolArrivals, ScaledServer

Array = NDArray[Any]

_SEED = 20240229
#: Least number of requests with gamma gaps, and number of full batches for one process and for several, which forget a
#: backlog sooner.
_REQUESTS = 1 << 17
_GROUPS = 24_576
_POOL_GROUPS = 8_192
#: Number of requests above which fewer full batches suffice: within a large batch requests vary little.
_LARGE = 1 << 19
_LARGE_GROUPS = 4_096
#: Least and maximum number of requests of other arrival processes; number of cycles if periodic.
_UNWEIGHTED = 1 << 19
_MOST = 1 << 22
_CYCLES = 400
#: Number of requests in bursts: their sojourn depends on more than the length of the next bursts.
_IN_BURSTS = 1 << 21
#: Maximum number of cached streams of gamma gaps, a megabyte or several each.
_MOST_UNIT_ARRIVALS = 8
#: Pieces of a recording too long to be simulated.
_PIECES = 64
#: Reduction of the number of requests for a coarse answer.
_COARSER = 10
#: Number of random numbers, drawn once, a power of two; bins of the histogram of the times, equal in logarithm, and the
#: lowest time as a part of the longest.
_SCORES = 1 << 19
_BINS = 1 << 13
_SHORTEST = 1e-8
#: Times binned per step: few enough to stay in the processor's cache.
_CHUNK = 1 << 14
#: Warm-up left out of the statistics: number of groups, and number of longest full batches. Many replicas of large
#: batches that all begin idle stay synchronised for this time, the longer the less their batches vary, and the router's
#: counts of arrivals must fill.
_WARM_UP = 100
_SETTLING = 40.0
#: Number of longest full batches simulated after the warm-up; number for a coarse answer.
_SETTLED = 160.0
_SETTLED_COARSE = 15.0
#: Least number of groups observed in a stratum.
_ENOUGH = 10
#: Quantile levels of the backlog between which the strata lie.
_STRATA = np.concatenate([np.linspace(0.04, 0.96, 24), 1.0 - np.geomspace(0.03, 1e-4, 12)])


@dataclass(frozen=True, slots=True)
class PoolSample:
    """Statistics for each kind of server; the last row is for all together."""

    times: Array  #: Shape (kinds + 1, probabilities). Time in the system at the given probabilities.
    #: ``mean``, ``part``, ``mean_batch``, ``busy``: Shape (kinds + 1,). Mean time, part of the requests, requests per
    #: batch and busy part of a process's time.
    mean: Array
    part: Array
    mean_batch: Array
    busy: Array


@dataclass(frozen=True, slots=True)
class _Strata:
    """Parts of the backlog's law."""

    step: float  #: Width of a cell of the backlog.
    labels: Array  #: Cell → stratum.
    #: ``mass``, ``level``: Probability of each stratum and its mean backlog.
    mass: Array
    level: Array


def simulate_pool(
    stream: PoolArrivals, kinds: Sequence[tuple[ScaledServer, int]], probabilities: Array, *, coarse: bool = False
) -> PoolSample:
    """Return the statistics of a stable pool with ``kinds`` as pairs of a server and its count.

    ``probabilities``: rising; ``coarse``: simulate a small part of the requests only.
    """
    replicas = _replicas(kinds)
    capacity = sum(server.capacity * count for server, count in kinds)
    group = max(1, round(sum(len(one.latency) * one.capacity * count for one, count in kinds) / capacity))
    requests = _requests_needed(stream, group, sum(one.processes * count for one, count in kinds)) // (
        _COARSER if coarse else 1
    )
    full_batch = max(one.latency[-1] for one, _ in kinds)
    settling = _SETTLING * full_batch * stream.rate
    looked_at = (_SETTLED_COARSE if coarse else _SETTLED) * full_batch * stream.rate
    requests = max(requests, round(settling + looked_at))
    _, scores, others, even = _scores()
    later: Array | float = 0.0
    law: Backlog | None
    if isinstance(stream.process, MmppArrivals):
        arrived, strata, law, parts, later = _arrive_in_bursts(stream, stream.process, kinds, group, requests)
        groups = len(strata)
    else:
        arrived = _arrivals(stream, requests)
        groups = len(arrived) // group
        cv = _mean_cv(kinds)
        law = _backlog(stream, group, group / capacity, cv)
        parts, strata = _strata(law), np.zeros(groups, np.int64)
        if law is not None:
            mean, quantiles = group / capacity, _quantiles(cv**2)
            pool_kernel.label_groups(group, mean, quantiles, scores, arrived, parts.step, parts.labels, strata)
    state = pool_kernel.new_state(replicas, len(arrived), group)
    spent, served_by = np.empty(len(arrived)), np.zeros(len(arrived), np.int64)
    draws = pool_kernel.Draws(scores, others, even, group)
    if len(replicas.batch) == 1 and replicas.max_wait[0] == 0.0:
        serve_alone(replicas, state, draws, arrived, spent)  # compiles sooner than the pool's kernel
    else:
        pool_kernel.serve(replicas, state, draws, arrived, spent, served_by)
    if not isinstance(later, float):
        spent += later
    begin = max(min(_WARM_UP, groups // 10), min(round(settling / group), groups // 2))
    seen = slice(begin * group, groups * group)
    times = _weigh(spent[seen], served_by[seen], group, strata[begin:], parts, len(kinds))
    answered = np.bincount(served_by, minlength=len(kinds)).astype(np.float64)
    return _sample(times, probabilities, law, replicas, state, answered, float(arrived[-1]))


def _backlog(stream: PoolArrivals, group: int, mean: float, cv: float) -> Backlog | None:
    """Return the law of the backlog of a single server with a time ``mean`` per group; None where unknown."""
    rate, scv = float(f"{stream.rate * mean:.6g}"), stream.scv
    process = None if stream.process is None else scale_to_rate(stream.process, rate)
    if isinstance(process, LognormalArrivals | HyperexponentialArrivals):
        scv = process.scv
    elif process is not None:
        return None
    law = _scaled_backlog(rate, scv, group, round(cv, 4), process)
    return None if law is None else Backlog(law.step * mean, law.mass)


@lru_cache(maxsize=4_000)
def _scaled_backlog(rate: float, scv: float, group: int, cv: float, process: Renewal | None) -> Backlog | None:
    with blas_threads().limit(limits=1, user_api="blas"):  # waking threads costs more than such small matrices
        return backlog_law(rate, scv, group, 1.0, cv, process)


def _requests_needed(stream: PoolArrivals, group: int, processes: int) -> int:
    """Return the number of requests to simulate where a full batch of all servers together holds ``group``."""
    if stream.process is None:
        groups = _POOL_GROUPS if processes > 1 else _GROUPS
        return max(min(groups * group, max(_LARGE, _LARGE_GROUPS * group)), _REQUESTS)
    if isinstance(stream.process, MmppArrivals):
        return _IN_BURSTS
    if isinstance(stream.process, RecordedArrivals):
        return _MOST
    cycle_s = stream.process.period_s if isinstance(stream.process, DiurnalArrivals) else 0.0
    return min(_MOST, max(_UNWEIGHTED, int(_CYCLES * cycle_s * stream.process.rate_rps)))


def _arrivals(stream: PoolArrivals, requests: int) -> Array:
    if stream.process is None:
        unit = _unit_arrivals(stream.scv, 1 << (requests - 1).bit_length())[:requests]
        # Scaled to the exact rate: near capacity, waiting is very sensitive to it.
        return np.asarray(unit * (1.0 / stream.rate * requests / unit[-1]))
    if isinstance(stream.process, RecordedArrivals):
        return _pick_pieces(stream.process.times * 1e-6 / stream.unit_ms, requests)
    random = np.random.Generator(np.random.PCG64(_SEED))
    times = stream.process.stream(random).take(requests) * 1e-6 / stream.unit_ms
    if not len(times):
        return np.asarray(times)
    # Scaled to the exact rate: near capacity, waiting is very sensitive to it.
    return np.asarray(times * (len(times) / stream.rate / times[-1]))


@lru_cache(maxsize=_MOST_UNIT_ARRIVALS)
def _unit_arrivals(scv: float, requests: int) -> Array:
    """Return the arrivals for gaps with a mean of 1."""
    scores, law = np.resize(_scores()[0], requests).astype(np.float64), _quantiles(scv)
    places = (scores + pool_kernel.SCORE_REACH) * pool_kernel.ENTRIES_PER_SCORE
    cells = np.clip(places.astype(np.int64), 0, pool_kernel.ENTRIES - 2)
    return np.cumsum(law[cells] + (law[cells + 1] - law[cells]) * np.clip(places - cells, 0.0, 1.0))


def _pick_pieces(times: Array, requests: int) -> Array:
    """Return a recording, or ``requests`` requests of it: pieces from all its parts in sequence."""
    if len(times) <= requests:
        return np.asarray(times, dtype=np.float64)
    length = requests // _PIECES
    starts = np.linspace(0, len(times) - length, _PIECES).astype(np.int64)
    gaps = np.diff(times, prepend=0.0)
    return np.cumsum(np.concatenate([gaps[start : start + length] for start in starts]))


def _arrive_in_bursts(
    stream: PoolArrivals, process: MmppArrivals, kinds: Sequence[tuple[ScaledServer, int]], group: int, requests: int
) -> tuple[Array, Array, Backlog, _Strata, Array | float]:
    """Return arrivals, their groups' strata, the law of the backlog, the strata's masses, and additional times."""
    random = np.random.Generator(np.random.PCG64(_SEED))
    capacity, cv = sum(server.capacity * count for server, count in kinds), _mean_cv(kinds)
    path = draw_path(process, stream.rate, stream.unit_ms, capacity, requests, random, group * cv**2)
    arrived = path.draw_arrivals(requests, random)
    backlogs = np.empty(len(arrived))
    pool_kernel.find_backlogs(group, group / capacity, _quantiles(cv**2), _scores()[1], arrived, backlogs)
    ends = slice(group - 1, None, group)
    later = path.later(arrived, backlogs, max(one.latency[-1] for one, _ in kinds))
    parts = _Strata(1.0, np.zeros(1, np.int64), path.masses(), path.levels())
    return arrived, path.strata(arrived[ends], backlogs[ends]), path.law(), parts, later


def _mean_cv(kinds: Sequence[tuple[ScaledServer, int]]) -> float:
    """Return the variation of a service time of the kinds, weighted by their capacity."""
    return float(np.average([one.cv for one, _ in kinds], weights=[one.capacity * n for one, n in kinds]))


def _replicas(kinds: Sequence[tuple[ScaledServer, int]]) -> Any:
    servers = [(number, server) for number, (server, count) in enumerate(kinds) for _ in range(count)]
    largest = max(len(server.latency) for _, server in servers)
    means = np.zeros((len(servers), largest))
    for row, (_, server) in zip(means, servers, strict=True):
        row[: len(server.latency)] = server.latency
        row[len(server.latency) :] = server.latency[-1]
    laws: dict[tuple[float, float], int] = {}
    running = [laws.setdefault((1.0, one.cv), len(laws)) for _, one in servers]
    rested = [laws.setdefault((one.pause, one.pause_cv), len(laws)) for _, one in servers]
    processes = [one.processes for _, one in servers]
    return pool_kernel.Replicas(
        means,
        np.array([len(one.latency) for _, one in servers]),
        np.array([one.max_wait for _, one in servers], np.float64),
        np.array([number for number, _ in servers]),
        np.cumsum([0, *processes]),
        np.repeat(np.arange(len(servers)), processes),
        np.array(running),
        np.array(rested),
        np.array([factor * _quantiles(cv**2) for factor, cv in laws]),
    )


@dataclass(frozen=True, slots=True)
class _Times:
    """Cumulative distributions of the times by kind and in total, their masses, and that of rarely seen backlogs."""

    edges: Array
    below: Array
    part: Array
    mean: Array
    unseen: float


def _weigh(spent: Array, served_by: Array, group: int, strata: Array, parts: _Strata, kinds: int) -> _Times:
    """Return the law of the times, each stratum weighted by its exact probability, and its mean."""
    counts = np.bincount(strata, minlength=len(parts.mass)).astype(np.float64)
    merged, top = _merge_rare(counts)
    seen = np.bincount(merged, counts, top + 1)
    mass = np.bincount(merged, parts.mass, top + 1)
    beyond = np.arange(len(counts)) > top
    unseen = float(parts.mass[beyond].sum())
    weights = (mass / np.maximum(seen, 1.0))[merged]
    high = float(spent.max())
    low = max(float(spent.min()), _SHORTEST * high)
    # Equal in the logarithm of the time: with bursts, some requests take a thousand times as long as others.
    scale = _BINS / max(math.log(high / low), 1e-9)
    each, binned = np.repeat(weights[strata], group), np.zeros(kinds * _BINS)
    for first in range(0, len(spent), _CHUNK):
        part = slice(first, first + _CHUNK)
        places = np.log(np.maximum(spent[part] / low, 1.0)) * scale
        cells = np.minimum(places.astype(np.int64), _BINS - 1)
        np.add.at(binned, cells if kinds == 1 else served_by[part] * _BINS + cells, each[part])
    histogram = binned.reshape(kinds, _BINS)
    sums = np.bincount(strata, spent.reshape(-1, group).sum(axis=1), len(counts))
    histogram = np.vstack([histogram, histogram.sum(axis=0)])
    total = np.maximum(histogram.sum(axis=1), 1e-300)
    edges = low * np.exp(np.arange(_BINS + 1) / scale)
    centres = 0.5 * (edges[:-1] + edges[1:])
    mean = histogram @ centres / total
    # Backlogs above the highest observed add their excess to the time.
    longer = float(parts.mass[beyond] @ (parts.level[beyond] - parts.level[top]))
    means = np.bincount(merged, sums, top + 1) / np.maximum(seen, 1.0) / group
    mean += float(mass @ means) - mean[-1] + longer
    below = np.hstack([np.zeros((kinds + 1, 1)), np.cumsum(histogram, axis=1) / total[:, None]])
    return _Times(edges, below, total / total[-1], mean, unseen)


def _merge_rare(counts: Array) -> tuple[Array, int]:
    """Return for each stratum the stratum that represents it, and the last stratum with enough observations.

    Rarely observed strata join the next lower sufficient stratum, the lowest the next higher.
    """
    often = np.flatnonzero(counts >= _ENOUGH)
    lowest, top = (int(often[0]), int(often[-1])) if len(often) else (0, 0)
    labels = np.maximum.accumulate(np.where(counts >= _ENOUGH, np.arange(len(counts)), lowest))
    return np.minimum(labels, top), top


def _sample(
    times: _Times,
    probabilities: Array,
    law: Backlog | None,
    replicas: Any,
    state: Any,
    answered: Array,
    duration: float,
) -> PoolSample:
    """Return the statistics; ``answered``: requests of each kind, whose parts the strata's weights change."""
    quantiles = np.array([_quantiles_of(times, row, probabilities, law) for row in times.below])
    kinds = len(quantiles) - 1
    batches = np.bincount(replicas.kind, state.batches, kinds)
    busy = np.bincount(replicas.kind, state.busy, kinds)
    processes = np.bincount(replicas.kind, np.diff(replicas.first), kinds)
    busy = busy * answered.sum() * times.part[:-1] / np.maximum(answered, 1.0)
    return PoolSample(
        quantiles,
        times.mean,
        times.part,
        _with_total(answered) / np.maximum(_with_total(batches), 1.0),
        _with_total(busy) / duration / _with_total(processes),
    )


def _with_total(by_kind: Array) -> Array:
    """Return the values followed by their sum."""
    return np.append(by_kind, by_kind.sum())


def _quantiles_of(times: _Times, below: Array, probabilities: Array, law: Backlog | None) -> Array:
    """Return the quantiles; in the unseen tail they rise above the last seen at least as far as the backlog's."""
    quantiles = np.interp(probabilities, below, times.edges)
    if law is None or times.unseen <= 0.0:
        return quantiles
    last = np.array([1.0 - min(3.0 * times.unseen, 0.5)])
    further = float(np.interp(last, below, times.edges)[0]) + law.quantile(probabilities) - law.quantile(last)
    return np.where(probabilities > last, np.maximum(quantiles, further), quantiles)


def _strata(law: Backlog | None) -> _Strata:
    if law is None:
        return _Strata(1.0, np.zeros(1, np.int64), np.ones(1), np.zeros(1))
    upto = np.cumsum(law.mass)
    labels = 1 + np.searchsorted(_STRATA, upto - 0.5 * law.mass)
    labels[0] = 0
    labels = np.unique(labels, return_inverse=True)[1]
    mass = np.bincount(labels, law.mass)
    level = np.bincount(labels, law.mass * np.arange(len(labels)) * law.step) / np.maximum(mass, 1e-300)
    return _Strata(law.step, labels, mass, level)


@cache
def _quantiles(scv: float) -> Array:
    """Return the quantiles of a gamma law of mean 1 at the standard normal scores of `pool_kernel`."""
    scores = np.linspace(-pool_kernel.SCORE_REACH, pool_kernel.SCORE_REACH, pool_kernel.ENTRIES)
    if scv < 1e-8:
        return np.ones(len(scores))
    half = len(scores) // 2
    # Each half from its own end: a probability just below 1 has no digits left for the tail.
    low, high = gammaincinv(1.0 / scv, ndtr(scores[:half])), gammainccinv(1.0 / scv, ndtr(-scores[half:]))
    return np.asarray(scv * np.concatenate([low, high]), dtype=np.float64)


@cache
def _scores() -> tuple[Array, Array, Array, Array]:
    """Return standard normal numbers for gaps, for the batches of each group and for further batches of a group.

    The last are evenly spread numbers: multiples of the golden section, of which any stretch is nearly uniform.
    """
    random = np.random.default_rng(_SEED)
    gaps, groups, more = (random.standard_normal(size, np.float32) for size in (_SCORES, _SCORES, _SCORES // 4))
    even = ndtri((np.arange(1, _SCORES + 1) * 0.6180339887498949) % 1.0).astype(np.float32)
    return gaps, groups, more, even
