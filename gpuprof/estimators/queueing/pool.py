"""Replicas that share a stream of requests, simulated request by request with an analytical tail.

The random numbers are fixed, so that the result is a function of its arguments, and neighbouring arguments give
comparable results. A plain simulation would need millions of requests near capacity, because a backlog persists for
thousands of batches. So requests with gamma gaps are stratified by the backlog of a single server with all replicas'
capacity and full batches only, whose law is known exactly (`batch_backlog`): the simulation only estimates the
requests' times *given* that backlog, which vary little and are forgotten within a few batches. Other arrival processes
are simulated for longer instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainccinv, gammaincinv, ndtr, ndtri

from gpuprof.domain.arrival_process import MmppArrivals, RecordedArrivals, scale_to_rate
from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, ServedPart, Sojourn
from gpuprof.estimators.queueing import pool_kernel
from gpuprof.estimators.queueing.batch_backlog import Backlog, backlog_law, limit_threads
from gpuprof.estimators.queueing.scaling import pair_quantiles, scale_server, scale_sojourn

Array = NDArray[Any]
#: Kinds of replicas and their counts.
Kinds = tuple[tuple[BatchServer, int], ...]

_SEED = 20240229
#: Maximum simulated replicas; larger pools are treated as this many at the same load, since waits hardly shrink
#: further. For a coarse answer, fewer: it is then late by little, and its callers solve the whole pool.
_MOST_REPLICAS, _MOST_COARSE_REPLICAS = 96, 24
#: Least number of requests with gamma gaps, and of full batches.
_REQUESTS, _GROUPS = 1 << 15, 1 << 12
#: Number of requests of other arrival processes, whose law is not known, and for a coarse answer.
_UNWEIGHTED, _UNWEIGHTED_COARSE = 1 << 21, 1 << 16
#: Reduction of the number of requests for a coarse answer, and of those left out at the begin.
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


def solve_pool(arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
    """Return the times in a stable pool. ``coarse``: simulate a small part of the requests only."""
    # Pools with proportional times share a solution, except under a process in absolute times.
    unit_ms = 1.0 if arrivals.process is not None else min(server.latency_ms[server.batch - 1] for server in servers)
    scaled = [scale_server(server, unit_ms) for server in servers]
    counts = Counter(scaled)
    kinds = _reduce_counts(counts, _MOST_COARSE_REPLICAS if coarse else _MOST_REPLICAS)
    load = float(f"{arrivals.rate_rps / math.fsum(server.capacity_rps for server in servers):.5g}")
    rate_rps, process = load * _capacity_rps(kinds), arrivals.process
    process = None if process is None else scale_to_rate(process, rate_rps)
    whole, *parts = _simulate(Arrivals(rate_rps, round(arrivals.scv, 4), process), kinds, coarse)
    each = {server: part.rate_rps / count for (server, count), part in zip(kinds, parts, strict=True)}
    laws = {server: part.sojourn for (server, _), part in zip(kinds, parts, strict=True)}
    # In a reduced pool, rounding may over-represent small kinds.
    total = math.fsum(each[server] for server in scaled)
    return PoolSojourn(
        scale_sojourn(whole.sojourn, unit_ms, max(server.overhead_ms for server in servers)),
        tuple(
            ServedPart(arrivals.rate_rps * each[alike] / total, scale_sojourn(laws[alike], unit_ms, server.overhead_ms))
            for alike, server in zip(scaled, servers, strict=True)
        ),
    )


def _capacity_rps(kinds: Kinds) -> float:
    return math.fsum(server.capacity_rps * count for server, count in kinds)


def _reduce_counts(counts: Counter[BatchServer], most: int) -> Kinds:
    """Return the kinds of replicas in a fixed order; large pools are reduced to the simulated size, in proportion."""
    scale = min(1.0, most / counts.total())
    return tuple((server, max(1, round(scale * counts[server]))) for server in sorted(counts, key=repr))


@lru_cache(maxsize=20_000)
def _simulate(arrivals: Arrivals, kinds: Kinds, coarse: bool) -> tuple[ServedPart, ...]:
    """Return rate and times of all requests together, then of each kind's requests."""
    capacity = _capacity_rps(kinds)
    settling = round(_SETTLING / 1000.0 * max(server.latency_ms[-1] for server, _ in kinds) * arrivals.rate_rps)
    group = max(1, round(math.fsum(server.batch * server.capacity_rps * count for server, count in kinds) / capacity))
    requests = max(_REQUESTS, _GROUPS * group, round(settling * _SETTLED / _SETTLING))
    if coarse:
        settling, requests = settling // _COARSER_BEGIN, requests // _COARSER
    if arrivals.process is not None:
        requests = _UNWEIGHTED_COARSE if coarse else _UNWEIGHTED
    arrivals_ms = _draw_arrivals(arrivals, settling + requests)
    group = min(group, len(arrivals_ms))
    groups = len(arrivals_ms) // group
    draws = pool_kernel.Draws(*_draw_scores(), group)
    law, cv = None, _mean_cv(kinds)
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
    state = pool_kernel.new_state(replicas, len(arrivals_ms), group)
    spent, served_by = np.empty(len(arrivals_ms)), np.zeros(len(arrivals_ms), np.int64)
    pool_kernel.serve(replicas, state, draws, arrivals_ms, spent, served_by)
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
    """Return the times of ``requests`` requests in milliseconds, at the exact rate: waiting is sensitive to it."""
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
    """Return arrivals in bursts and calm whose lengths are spread evenly over their law: few fit into a simulation."""
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
    """Return a recording, or ``requests`` requests of it: pieces from all its parts in sequence."""
    if len(times) <= requests:
        return np.asarray(times, dtype=np.float64)
    length = math.isqrt(requests)
    starts = np.linspace(0, len(times) - length, requests // length).astype(np.int64)
    gaps = np.diff(times, prepend=0.0)
    return np.cumsum(np.concatenate([gaps[start : start + length] for start in starts]))


def _mean_cv(kinds: Kinds) -> float:
    """Return the variation of a service time of the kinds, weighted by their capacity."""
    weights = [server.capacity_rps * count for server, count in kinds]
    return float(np.average([server.latency_cv for server, _ in kinds], weights=weights))


def _tabulate(kinds: Kinds) -> Any:
    servers = [(number, server) for number, (server, count) in enumerate(kinds) for _ in range(count)]
    largest = max(server.batch for _, server in servers)
    means = np.array([(*row.latency_ms, *[row.latency_ms[-1]] * (largest - row.batch)) for _, row in servers])
    laws: dict[tuple[float, float], int] = {}
    running = [laws.setdefault((1.0, server.latency_cv), len(laws)) for _, server in servers]
    rested = [laws.setdefault((server.pause_factor, server.pause_cv or 0.0), len(laws)) for _, server in servers]
    processes = [server.processes for _, server in servers]
    return pool_kernel.Replicas(
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
    """Cumulative distributions of the times by kind and in total, their masses, and that of rarely seen backlogs."""

    edges: Array
    below: Array
    part: Array
    mean: Array
    unseen: float


def _weigh(spent: Array, served_by: Array, group: int, strata: Array, mass: Array, kinds: int) -> _Times:
    """Return the law of the times, each stratum weighted by its exact probability."""
    counts = np.bincount(strata, minlength=len(mass)).astype(np.float64)
    merged, top = _merge_rare(counts)
    weights = np.bincount(merged, mass, top + 1) / np.maximum(np.bincount(merged, counts, top + 1), 1.0)
    each = np.repeat(weights[merged][strata], group)
    low, high = float(spent.min()), float(spent.max())
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
    """Return the values after their sum."""
    return np.asarray(np.append(by_kind.sum(), by_kind))


def _quantiles_of(times: _Times, below: Array, law: Backlog | None) -> Array:
    """Return the quantiles; in the unseen tail they rise above the last seen at least as far as the backlog's."""
    quantiles: Array = np.interp(_PROBABILITIES, below, times.edges)
    if law is None or times.unseen <= 0.0:
        return quantiles
    last = np.array([1.0 - min(3.0 * times.unseen, 0.5)])
    further = float(np.interp(last, below, times.edges)[0]) + law.quantile(_PROBABILITIES) - law.quantile(last)
    return np.asarray(np.where(last < _PROBABILITIES, np.maximum(quantiles, further), quantiles))


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


def _value_at(law: Array, scores: Array) -> Array:
    """Return the quantiles at standard normal scores."""
    return np.interp(scores, np.linspace(-pool_kernel.SCORE_REACH, pool_kernel.SCORE_REACH, len(law)), law)


@cache
def _draw_scores() -> tuple[Array, Array]:
    """Return standard normal numbers for batches, and even ones for the reported times.

    These are multiples of the golden section, of which any stretch is nearly uniform.
    """
    groups = np.random.default_rng(_SEED + 1).standard_normal(_SCORES, np.float32)
    even = ndtri((np.arange(1, _SCORES + 1) * 0.6180339887498949) % 1.0).astype(np.float32)
    return groups, even
