"""Pools of replicas at a grid of loads, simulated on demand, cached, and interpolated.

Near capacity the time at each probability grows nearly in proportion to ``1 / (1 - load)``, smoothly, since all loads
use the same random numbers. So the grid has even steps of that factor's logarithm, and other loads are interpolated
between two neighbours. Below the tail, probabilities are interpolated instead of times: with constant batches, the load
changes only the frequency of each time. Arrivals other than renewals with gamma gaps are simulated at the exact load.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

import numpy as np

from gpuprof.domain.arrival_process import scale_to_rate
from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, ServedPart, Sojourn, grid_to_load, load_to_grid
from gpuprof.estimators.queueing.batch_chain import Array
from gpuprof.estimators.queueing.scaled_server import PoolArrivals, ScaledServer

#: Maximum simulated replicas; larger pools are treated as this many at the same load, since waits hardly shrink
#: further.
MOST_REPLICAS = 96
_MOST_TABLES = 4_000
_MOST_EXACT = 500  # loads per table
_NO_WAIT = 1e-9  # part of a batch's time, below which there is no wait
_SAME = 1e-6  # part of a step of the grid
_ALIKE = 0.05  # squared coefficient of variation of gaps
PROBABILITIES = np.unique(
    np.concatenate([np.linspace(0.0, 0.95, 77), 1.0 - np.geomspace(0.05, 5e-5, 31), [0.5, 0.9, 0.99, 0.999, 0.9999]])
)

#: Weight of each probability in the tail, where times as a whole grow with the load.
_TAIL = np.clip((PROBABILITIES - 0.9) / 0.09, 0.0, 1.0)


def scale_server(server: BatchServer, unit_ms: float) -> ScaledServer:
    """Return a replica with its times in ``unit_ms``, rounded to the precision of measurements."""
    return ScaledServer(
        tuple(round_figure(latency / unit_ms) for latency in server.latency_ms[: server.batch]),
        round_figure(server.max_wait_ms / unit_ms) if server.max_wait_ms > _NO_WAIT * unit_ms else 0.0,
        server.processes,
        round(server.latency_cv, 4),
        round_figure(server.pause_factor),
        round(server.latency_cv if server.pause_cv is None else server.pause_cv, 4),
    )


def simulate_one(rate: float, scv: float, server: ScaledServer, *, coarse: bool = False) -> Sojourn:
    """Return the time in a single replica at the exact rate of gamma gaps, in units of its own."""
    from gpuprof.estimators.queueing.pool_simulation import simulate_pool  # numba takes long to import

    sample = simulate_pool(PoolArrivals(rate, scv), [(server, 1)], PROBABILITIES, coarse=coarse)
    pairs = pair_quantiles(PROBABILITIES, sample.times[-1])
    return Sojourn(min(float(sample.busy[-1]), 1.0), float(sample.mean_batch[-1]), float(sample.mean[-1]), pairs)


def solve_pool(arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
    """Return the time in a stable pool, by interpolation in its table."""
    counts = Counter(servers)
    fastest = min(counts, key=lambda one: (one.latency_ms[one.batch - 1], one.batch))
    unit_ms = fastest.latency_ms[fastest.batch - 1]
    scaled: Counter[ScaledServer] = Counter()
    for server, count in counts.items():
        scaled[scale_server(server, unit_ms)] += count
    kinds = _shrink(scaled)
    capacity = math.fsum(one.capacity * count for one, count in kinds)
    load = arrivals.rate_rps / math.fsum(one.capacity_rps * count for one, count in counts.items())
    # A process in absolute times has a table for its unit; all others share a table.
    shape = None if arrivals.process is None else scale_to_rate(arrivals.process, 1000.0 * capacity / unit_ms)
    stream = PoolArrivals(0.0, round(arrivals.scv, 4), shape, unit_ms if shape is not None else 1.0)
    table = _TABLES.table(kinds, stream, coarse=coarse)
    return _read_row(table.at(load), kinds, counts, scaled, servers, arrivals.rate_rps, unit_ms)


def pair_quantiles(probabilities: Array, times: Array) -> tuple[tuple[float, float], ...]:
    """Return the table of quantiles from probability 0 to 1."""
    last = int(np.searchsorted(probabilities, 0.99999)) + 1
    table = list(zip(probabilities[:last].tolist(), times[:last].tolist(), strict=True))
    if table[0][0] > 0.0:
        table.insert(0, (0.0, table[0][1]))
    return (*table[:-1], (max(table[-1][0], 0.99999), table[-1][1]))


def round_figure(value: float) -> float:
    """Return the value rounded to five significant digits, the precision of latencies, for more cache hits."""
    return float(f"{value:.5g}")


_Kinds = tuple[tuple[ScaledServer, int], ...]


def _shrink(counts: Counter[ScaledServer]) -> _Kinds:
    """Return the kinds of replicas in a fixed order; large pools are reduced to the simulated size, in proportion."""
    total = counts.total()
    scale = min(1.0, MOST_REPLICAS / total)
    ordered = sorted(counts.items(), key=lambda item: (item[0].latency, item[0].processes, item[0].cv, item[0].pause))
    return tuple((one, max(1, round(scale * count))) for one, count in ordered)


@dataclass(frozen=True, slots=True)
class _Row:
    """A pool at one load: by kind, then in total, as `pool_simulation.PoolSample`."""

    times: Array
    mean: Array
    part: Array
    mean_batch: Array
    busy: Array

    def blend(self, other: _Row, part: float) -> _Row:
        """Return times and batches between those of this row and another, with this row's utilisation and parts."""
        mean, batch = (
            one + part * (two - one) for one, two in ((self.mean, other.mean), (self.mean_batch, other.mean_batch))
        )
        times = [_mix_times(one, two, part) for one, two in zip(self.times, other.times, strict=True)]
        return replace(self, times=np.array(times), mean=mean, mean_batch=batch)


def _mix_times(first: Array, second: Array, part: float) -> Array:
    """Return times at `PROBABILITIES` between two laws: interpolated in probability, in the tail in time."""
    times = np.union1d(first, second)
    below = (1.0 - part) * np.interp(times, first, PROBABILITIES) + part * np.interp(times, second, PROBABILITIES)
    mixed, between = np.interp(PROBABILITIES, below, times), first + part * (second - first)
    return np.asarray(np.maximum.accumulate(mixed + _TAIL * (between - mixed)))


@dataclass(slots=True)
class _Table:
    """The simulated rows of a pool."""

    kinds: _Kinds
    stream: PoolArrivals
    coarse: bool
    _rows: dict[int, _Row] = field(default_factory=dict)
    _exact: dict[float, _Row] = field(default_factory=dict)

    def at(self, load: float) -> _Row:
        """Return the pool at a load below 1.

        There is no interpolation for arrival processes of other shapes, nor for nearly constant gaps: batches and
        arrivals then form patterns that differ from load to load.
        """
        if self.stream.process is not None or self.stream.scv < _ALIKE:
            return self._exact_row(float(f"{load:.6g}"))
        if load <= grid_to_load(0):
            return replace(self._row(0), busy=self._row(0).busy * (load / grid_to_load(0)))
        place = load_to_grid(load)
        nearest = round(place)
        if abs(place - nearest) < _SAME:
            return self._row(nearest)
        index = int(place)
        low, high = (1.0 / (1.0 - grid_to_load(number)) for number in (index, index + 1))
        below, above = self._row(index), self._row(index + 1)
        blend = below.blend(above, (1.0 / (1.0 - load) - low) / (high - low))
        # The answered requests and the utilisation of a kind grow with the load, both linearly, so that a kind's
        # utilisation matches its requests. Waiting grows with the inverse of the remaining capacity.
        loads = grid_to_load(index), grid_to_load(index + 1)
        part = (load - loads[0]) / (loads[1] - loads[0])
        answered = (1.0 - part) * loads[0] * below.part + part * loads[1] * above.part
        return replace(blend, busy=below.busy + part * (above.busy - below.busy), part=answered / load)

    def _row(self, index: int) -> _Row:
        if index not in self._rows:
            self._rows[index] = self._simulate(grid_to_load(index))
        return self._rows[index]

    def _exact_row(self, load: float) -> _Row:
        if load not in self._exact:
            if len(self._exact) > _MOST_EXACT:
                self._exact.clear()
            self._exact[load] = self._simulate(load)
        return self._exact[load]

    def _simulate(self, load: float) -> _Row:
        from gpuprof.estimators.queueing.pool_simulation import simulate_pool

        rate, process = load * math.fsum(one.capacity * count for one, count in self.kinds), self.stream.process
        process = None if process is None else scale_to_rate(process, load * process.rate_rps)
        stream = replace(self.stream, rate=rate, process=process)
        sample = simulate_pool(stream, self.kinds, PROBABILITIES, coarse=self.coarse)
        return _Row(sample.times, sample.mean, sample.part, sample.mean_batch, sample.busy)


class _Tables:
    """The most recently used tables of pools."""

    def __init__(self) -> None:
        self._tables: OrderedDict[object, _Table] = OrderedDict()
        self._lock = Lock()

    def table(self, kinds: _Kinds, stream: PoolArrivals, *, coarse: bool) -> _Table:
        """Return the table of a pool under a stream of any rate, empty when new."""
        key = (kinds, stream, coarse)
        with self._lock:
            table = self._tables.get(key)
            if table is None:
                table = self._tables[key] = _Table(kinds, stream, coarse)
            self._tables.move_to_end(key)
            if len(self._tables) > _MOST_TABLES:
                self._tables.popitem(last=False)
        return table


_TABLES = _Tables()


def _read_row(
    row: _Row,
    kinds: _Kinds,
    counts: Counter[BatchServer],
    scaled: Counter[ScaledServer],
    servers: Sequence[BatchServer],
    rate_rps: float,
    unit_ms: float,
) -> PoolSojourn:
    """Return a row as times of the given replicas."""
    numbers = {one: number for number, (one, _) in enumerate(kinds)}
    each = _share_out(row, kinds, scaled)
    parts = {}
    for server in counts:
        one = scale_server(server, unit_ms)
        law = _later(_law(row, numbers[one], unit_ms), server.overhead_ms)
        parts[server] = ServedPart(rate_rps * each[one], law)
    whole = _later(_law(row, -1, unit_ms), max(one.overhead_ms for one in counts))
    return PoolSojourn(whole, tuple(parts[one] for one in servers))


def _share_out(row: _Row, kinds: _Kinds, scaled: Counter[ScaledServer]) -> dict[ScaledServer, float]:
    """Return the part of the requests of each replica of a kind; all replicas together have 1."""
    simulated = dict(kinds)
    parts = {one: float(row.part[number]) for number, (one, _) in enumerate(kinds)}
    if simulated == scaled:
        return {one: part / scaled[one] for one, part in parts.items()}
    # In a reduced pool, rounding may over-represent small kinds.
    each = {one: part / simulated[one] for one, part in parts.items()}
    total = math.fsum(each[one] * count for one, count in scaled.items())
    return {one: part / total for one, part in each.items()}


def _law(row: _Row, number: int, unit_ms: float) -> Sojourn:
    times = pair_quantiles(PROBABILITIES, row.times[number] * unit_ms)
    busy, batch = min(1.0, float(row.busy[number])), float(row.mean_batch[number])
    return Sojourn(busy, batch, float(row.mean[number]) * unit_ms, times)


def _later(law: Sojourn, overhead_ms: float) -> Sojourn:
    if not overhead_ms:
        return law
    times = tuple((p, ms + overhead_ms) for p, ms in law.quantiles_ms)
    return Sojourn(law.utilization, law.mean_batch, law.mean_ms + overhead_ms, times)
