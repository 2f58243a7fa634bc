"""Random placement problems and the best that can be done about them, found without any of `gpuprof.placement`'s code.

The problems are tables: a time and a memory for every model, batch and share, the papers' rule (a batch within half
of the SLO), and for some kinds a slowdown by neighbours. `best_of` lists for each device every set of rates that it can
serve, with all batches of all shares, and adds device to device, keeping the sets that no other matches: exact, and
slow beyond a few models.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numba
import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Estimate, Figure, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.mig import distinct_layouts
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.errors import InputError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import ExponentialQueue, plain_device, sliced_device
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Options, Problem

Kind = Literal[
    "mps-memory", "fixed", "priority", "priced", "mig-parts", "mig-mps", "beside", "beside-fixed", "beside-mig"
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_BUDGET = 0.5
_BATCHES = (1, 2, 4, 8, 16, 32)
_GIB = 2**30
_LITTLE = 1e-9
_ROUNDING = 1e-6
#: Sets of rates that are kept of one device or of several together; a problem that needs more is too large.
_MOST_SETS = 6_000

Rates = NDArray[np.float64]
Key = tuple[str, str, int, Share]


class TooLargeError(Exception):
    """There is more to list than there is time for."""


@dataclass(frozen=True)
class TableEstimator:
    """Knows the rows of a table, one process each, and nothing else.

    Attributes
    ----------
    rows : mapping of (device, model, batch, share) to (ms, bytes)
    slowdown : float
        A neighbour with a share of f and a batch of n adds this times f · log2(1 + n) to the time.
    """

    rows: Mapping[Key, tuple[float, int]]
    slowdown: float = 0.0

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the row."""
        row = self.rows.get((device.name, model, batch, share))
        if row is None or processes > 1:
            raise InputError(f"nothing is known of {model} at batch {batch} under {share} with {processes} processes")
        memory = Figure(float(row[1]), MEASURED)
        time = row[0] * (1.0 + self.slowdown * math.fsum(_press(other.share.sm_pct, other.batch) for other in beside))
        return Estimate(
            Workload(model, batch, share, processes), device.name, Figure(time, MEASURED), memory_bytes=memory
        )

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batches of the table under the share."""
        return tuple(sorted({b for name, m, b, s in self.rows if (name, m, s) == (device.name, model, share)}))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares of the table; parts of instances are known and not listed."""
        listed = {s for name, m, _, s in self.rows if (name, m) == (device.name, model)}
        listed = {share for share in listed if share.mig is None or share.sm_pct == 100.0}
        return tuple(sorted(listed, key=lambda share: (device.fraction(share), share.mig or "", share.sm_pct)))


def _press(percent: float, batch: int) -> float:
    return percent / 100.0 * math.log2(1 + batch)


@dataclass(frozen=True)
class Best:
    """What no map does better.

    Attributes
    ----------
    gpus : int or None
        Fewest devices that serve everything; None on a fixed fleet that cannot.
    cost_per_hour : float or None
    served_rps : tuple of float
        On a fixed fleet, by falling priority: the most of the highest, then of the next with that.
    goodput_rps : float or None
        On a fixed fleet the most in all, whatever has priority.
    """

    gpus: int | None = None
    cost_per_hour: float | None = None
    served_rps: tuple[float, ...] = ()
    goodput_rps: float | None = None


def draw_problem(kind: Kind, seed: int) -> Problem:
    """Return a random problem of a kind, the same for the same seed."""
    random_ = random.Random(f"{kind} {seed}")
    names = [f"m{i}" for i in range(random_.randint(2, 3))]
    fleet = _draw_fleet(kind, random_)
    rows: dict[Key, tuple[float, int]] = {}
    demands = []
    devices = [entry.device for entry in fleet.entries]
    for name in names:
        start, each = random_.uniform(1.0, 8.0), random_.uniform(0.2, 3.0)
        for device in devices:
            rows |= _draw_rows(random_, name, device, kind, (start, each))
        rate = random_.uniform(50.0, 900.0) * _devices_worth(fleet) / len(names)
        priority = random_.randint(0, 1) if kind == "priority" else 0
        demands.append(Demand(name, rate, Slo(random_.uniform(3.0, 12.0) * (start + each)), priority=priority))
    slowdown = random_.choice([0.05, 0.15, 0.4]) if kind.startswith("beside") else 0.0
    options = Options(latency_budget=_BUDGET, seed=seed)
    return Problem(tuple(demands), fleet, TableEstimator(rows, slowdown), ExponentialQueue(), options)


@dataclass(frozen=True)
class PressedEstimator:
    """A batch of n takes start + each · n / f ms for a fraction f of the device, up to a fraction that is enough.

    Attributes
    ----------
    rows : mapping of model to (start, each, enough, bytes of the weights, bytes of each request)
    slowdown : float
        As of a `TableEstimator`.
    percents : tuple of float
    latency_cv : float
    """

    rows: Mapping[str, tuple[float, float, float, int, int]]
    slowdown: float
    percents: tuple[float, ...]
    latency_cv: float

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time of the formula."""
        start, each, enough, weights, activations = self.rows[model]
        ms = (start + each * batch / min(1.0, device.fraction(share) / enough)) * processes
        ms *= 1.0 + self.slowdown * math.fsum(_press(other.share.sm_pct, other.batch) for other in beside)
        memory = Figure(float(weights + activations * batch), MEASURED)
        workload = Workload(model, batch, share, processes)
        return Estimate(workload, device.name, Figure(ms, MEASURED), memory_bytes=memory, latency_cv=self.latency_cv)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the listed batches; any other is answered, too."""
        return _BATCHES

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the listed shares; any other is answered, too."""
        return tuple(map(Share, self.percents))


def draw_queued(seed: int) -> Problem:
    """Return a random problem of one to three models with pooled queues and neighbours, the same for the same seed."""
    random_ = random.Random(f"queued {seed}")
    names = [f"m{i}" for i in range(random_.randint(1, 3))]
    rows: dict[str, tuple[float, float, float, int, int]] = {}
    demands = []
    for name in names:
        start, each = random_.uniform(1.0, 8.0), random_.uniform(0.2, 3.0)
        enough, weights = random_.uniform(0.3, 1.0), int(random_.uniform(0.3, 3.0) * _GIB)
        rows[name] = start, each, enough, weights, int(random_.uniform(0.01, 0.2) * _GIB)
        limit_ms = random_.uniform(2.5, 12.0) * (start + each)
        rate_rps = random_.uniform(150.0, 2700.0) / len(names)
        demands.append(Demand(name, rate_rps, Slo(limit_ms, random_.choice([95.0, 99.0, 99.0]))))
    percents = (*sorted(random_.sample([25.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0], 3)), 100.0)
    slowdown, cv = random_.choice([0.05, 0.15, 0.4]), random_.choice([0.0, 0.05, 0.2])
    estimator = PressedEstimator(rows, slowdown, percents, cv)
    return Problem(tuple(demands), Fleet((FleetEntry(plain_device()),)), estimator, BatchQueue(), Options(seed=seed))


def count_equal(problem: Problem) -> float:
    """Return the devices of the best map of one kind of device in which each is full of equal replicas of one model."""
    (entry,) = problem.fleet.entries
    return math.fsum(
        min(
            _count_full(problem, demand, Workload(demand.model, batch, share))
            for share in problem.estimator.shares(demand.model, entry.device)
            for batch in _BATCHES
        )
        for demand in problem.demands
    )


def _count_full(problem: Problem, demand: Demand, workload: Workload) -> float:
    """Return the devices full of copies that serve a demand, infinity where twice those with full batches do not."""
    device, copies = problem.fleet.entries[0].device, int(100.0 / workload.share.sm_pct + _LITTLE)
    estimates = [
        problem.estimator.estimate(demand.model, device, size, workload.share, (workload,) * (copies - 1))
        for size in range(1, workload.batch + 1)
    ]
    times = tuple(estimate.latency_ms.value for estimate in estimates)
    server = BatchServer(times, workload.batch, 0.0, latency_cv=estimates[-1].latency_cv)
    memory = estimates[-1].memory_bytes
    if memory is None or copies * memory.value > device.dram_bytes or times[0] > demand.slo.latency_ms:
        return math.inf
    least = math.ceil(demand.rate_rps / server.capacity_rps / copies)
    for number in range(least, 2 * least + 1):
        pool = problem.queueing.pool(Arrivals(demand.rate_rps), (server,) * (copies * number))
        if pool.whole.percentile(demand.slo.percentile) <= demand.slo.latency_ms:
            return number
    return math.inf


def _draw_fleet(kind: Kind, random_: random.Random) -> Fleet:
    plain = plain_device()
    if kind in ("fixed", "priority", "beside-fixed"):
        return Fleet((FleetEntry(plain, random_.randint(1, 3)),))
    if kind == "priced":
        large = replace(plain_device("other", random_.choice([1.5, 1.7, 2.3])), dram_bytes=32 * _GIB)
        return Fleet((FleetEntry(plain), FleetEntry(large)))
    return Fleet((FleetEntry(plain if kind in ("mps-memory", "beside") else sliced_device(price=1.0)),))


def _devices_worth(fleet: Fleet) -> int:
    return max(2, sum(entry.count or 0 for entry in fleet.entries) + 1)


def _draw_rows(
    random_: random.Random, name: str, device: Device, kind: Kind, times: tuple[float, float]
) -> Iterator[tuple[Key, tuple[float, int]]]:
    start, each = times
    saturated, speed = random_.uniform(0.3, 1.0), random_.uniform(0.8, 2.0) if device.name == "other" else 1.0
    weights, activations = int(random_.uniform(0.3, 5.0) * _GIB), int(random_.uniform(0.01, 0.4) * _GIB)
    for share in _draw_shares(random_, device, kind):
        part = min(1.0, device.fraction(share) / saturated)
        for batch in _BATCHES[::2] if kind.startswith("beside") else _BATCHES:
            row = ((start + each * batch / part) / speed, weights + activations * batch)
            yield (device.name, name, batch, share), row


def _draw_shares(random_: random.Random, device: Device, kind: Kind) -> list[Share]:
    percents = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0]
    if kind.startswith("beside"):
        percents[:2] = [25.0]  # at most four beside each other, so that all can be listed
    percents = sorted(random_.sample(percents, 3))
    if kind in ("mig-parts", "mig-mps", "beside-mig"):
        profiles = [profile.name for profile in device.mig_profiles]
        names = random_.sample(profiles, 2 if kind == "beside-mig" else 3)
        shares = [Share(100.0, name) for name in names]
        if kind == "mig-mps":
            return [*shares, *map(Share, percents)]
        return [*shares, *(Share(part, name) for name in names for part in (25.0, 50.0, 75.0))]
    return list(map(Share, percents))


def is_bound_false(placement: Placement, best: Best) -> bool:
    """Whether the best map does better than a bound of the placement says that any map can."""
    if best.cost_per_hour is not None and best.gpus is not None:
        cost, gpus = placement.lower_bound_cost_per_hour, placement.lower_bound_gpus
        dear = cost is not None and cost > best.cost_per_hour * (1.0 + _ROUNDING)
        return dear or (gpus is not None and gpus > best.gpus)
    most = placement.upper_bound_goodput_rps
    return most is not None and best.goodput_rps is not None and best.goodput_rps > most * (1.0 + _ROUNDING)


def loss_of(problem: Problem, placement: Placement, best: Best) -> float:
    """Return by what part the placement is worse than the best; negative where the listing missed something."""
    if best.cost_per_hour is not None:
        cost = sum(problem.entry(gpu.device).price_per_hour for gpu in placement.gpus)
        return math.inf if placement.unplaced else cost / best.cost_per_hour - 1.0
    rates = placement.rates_rps()
    for level, most in zip(sorted({d.priority for d in problem.demands}, reverse=True), best.served_rps, strict=True):
        served = sum(rates.get(d.model, 0.0) for d in problem.demands if d.priority == level)
        if most and abs(1.0 - served / most) > _ROUNDING:
            return 1.0 - served / most
    return 0.0


def is_called_best(problem: Problem, placement: Placement) -> bool:
    """Whether the bound of a placement says that nothing is better."""
    if placement.unplaced:
        most = placement.upper_bound_goodput_rps
        return most is not None and sum(placement.rates_rps().values()) >= most * (1.0 - _ROUNDING)
    bound = placement.lower_bound_cost_per_hour
    cost = sum(problem.entry(gpu.device).price_per_hour for gpu in placement.gpus)
    return bound is not None and cost <= bound * (1.0 + _ROUNDING)


# --- the best, by listing ---------------------------------------------------------------------------------------------


def best_of(problem: Problem) -> Best:
    """Return what no map does better.

    Raises
    ------
    TooLargeError
        When it would take too long.
    """
    wanted = np.array([demand.rate_rps for demand in problem.demands])
    able = {entry.device.name: _device_rates(problem, entry.device, wanted) for entry in problem.fleet.entries}
    if all(entry.count is not None for entry in problem.fleet.entries):
        return _best_of_fixed(problem, able, wanted)
    return _cheapest_of(problem, able, wanted)


def _best_of_fixed(problem: Problem, able: Mapping[str, Rates], wanted: Rates) -> Best:
    together = np.zeros((1, len(wanted)))
    for entry in problem.fleet.entries:
        for _ in range(entry.count or 0):
            together = _sums(together, able[entry.device.name], wanted)
    served, left = [], together
    for level in sorted({demand.priority for demand in problem.demands}, reverse=True):
        indices = [i for i, demand in enumerate(problem.demands) if demand.priority == level]
        amounts = left[:, indices].sum(axis=1)
        served.append(float(amounts.max()))
        left = left[amounts >= amounts.max() * (1.0 - _LITTLE)]
    return Best(served_rps=tuple(served), goodput_rps=float(together.sum(axis=1).max()))


def _cheapest_of(problem: Problem, able: Mapping[str, Rates], wanted: Rates) -> Best:
    """Try the numbers of devices of each kind by rising cost; and by rising count for the fewest."""
    entries = problem.fleet.entries
    if any(not rates.any(axis=0).all() for rates in able.values()):
        raise TooLargeError  # a demand that a kind of device cannot serve at all: another question
    memory: dict[tuple[int, ...], Rates] = {(0,) * len(entries): np.zeros((1, len(wanted)))}

    def rates_of(counts: tuple[int, ...]) -> Rates:
        if counts not in memory:
            kind = next(i for i, count in enumerate(counts) if count)
            fewer = tuple(count - (i == kind) for i, count in enumerate(counts))
            memory[counts] = _sums(rates_of(fewer), able[entries[kind].device.name], wanted)
        return memory[counts]

    def serves(counts: tuple[int, ...]) -> bool:
        half = tuple(count // 2 for count in counts)  # two halves are compared rather than all their sums kept
        rest = tuple(count - part for count, part in zip(counts, half, strict=True))
        return _reaches(rates_of(half), rates_of(rest), wanted)

    most = 12 if len(entries) == 1 else 7
    every = sorted(itertools.product(range(most + 1), repeat=len(entries)), key=sum)
    prices = [entry.price_per_hour for entry in entries]
    costs = {counts: sum(n * price for n, price in zip(counts, prices, strict=True)) for counts in every}
    fewest = next((sum(counts) for counts in every if serves(counts)), None)
    cheapest = next((costs[c] for c in sorted(every, key=costs.__getitem__) if serves(c)), None)
    if fewest is None or cheapest is None or cheapest > most * min(prices):
        raise TooLargeError
    return Best(gpus=fewest, cost_per_hour=cheapest)


def _device_rates(problem: Problem, device: Device, wanted: Rates) -> Rates:
    """Return every set of rates that one device can serve, shared whole or cut up."""
    whole = _shared_rates(problem, device, None, wanted)
    alone = {profile.name: _shared_rates(problem, device, profile.name, wanted) for profile in device.mig_profiles}
    useful = [profile for profile in device.mig_profiles if alone[profile.name].any()]
    rate_tables = [whole]
    for layout in distinct_layouts(device, useful):
        together = np.zeros((1, len(wanted)))
        for instance in layout:
            together = _sums(together, alone[instance.profile.name], wanted)
        rate_tables.append(together)
    return _drop_dominated(np.vstack(rate_tables))


def _shared_rates(problem: Problem, device: Device, mig: str | None, wanted: Rates) -> Rates:
    """Return every set of rates that replicas in one instance, or the whole device, can serve together.

    By adding one replica after another: a state is what is left of the share and the memory.
    """
    if problem.estimator.slowdown:  # type: ignore[attr-defined]
        return _drop_dominated(np.vstack([np.zeros(len(wanted)), *_list_beside(problem, device, mig, wanted)]))
    memory = device.memory_bytes(Share(100.0, mig))
    items = list(_items(problem, device, mig))
    states: dict[tuple[float, int], Rates] = {(100.0, memory): np.zeros((1, len(wanted)))}
    finished = [np.zeros((1, len(wanted)))]
    for percent, held, model, rate in items:
        grown: dict[tuple[float, int], list[Rates]] = {}
        for (left, free), rates in states.items():
            count, rates_rps = 0, rates
            while left - count * percent >= -_LITTLE and free >= count * held:
                grown.setdefault((round(left - count * percent, 6), free - count * held), []).append(rates_rps)
                count += 1
                rates_rps = rates.copy()
                rates_rps[:, model] = np.minimum(wanted[model], rates_rps[:, model] + count * rate)
        states = {key: _drop_dominated(np.vstack(many)) for key, many in grown.items()}
        if len(states) > _MOST_SETS:
            raise TooLargeError
    finished += list(states.values())
    return _drop_dominated(np.vstack(finished))


def _list_beside(problem: Problem, device: Device, mig: str | None, wanted: Rates) -> Iterator[Rates]:
    """Yield the rates of all replicas that are in time beside each other in one instance, or the whole device."""
    estimator = problem.estimator
    rows, slowdown = estimator.rows, estimator.slowdown  # type: ignore[attr-defined]
    items = [
        (position, batch, share.sm_pct, ms, held)
        for position, demand in enumerate(problem.demands)
        for (name, model, batch, share), (ms, held) in rows.items()
        if (name, model, share.mig) == (device.name, demand.model, mig)
    ]
    stack: list[tuple[tuple[tuple[int, int, float, float, int], ...], int]]
    stack = [((item,), number) for number, item in enumerate(items)]
    for visited in itertools.count():
        if not stack or visited > 50 * _MOST_SETS:
            break
        replicas, last = stack.pop()
        percent, held = (math.fsum(replica[column] for replica in replicas) for column in (2, 4))
        if percent > 100.0 + _LITTLE or held > device.memory_bytes(Share(100.0, mig)):
            continue
        presses = [_press(replica[2], replica[1]) for replica in replicas]
        times = [
            ms * (1.0 + slowdown * (math.fsum(presses) - press))
            for (*_, ms, _), press in zip(replicas, presses, strict=True)
        ]
        rates = np.zeros(len(wanted))
        for (position, batch, *_), ms in zip(replicas, times, strict=True):
            rates[position] += 1000.0 * batch / ms
        limits = (_BUDGET * problem.demands[position].slo.latency_ms for position, *_ in replicas)
        if all(ms < limit for ms, limit in zip(times, limits, strict=True)):  # further neighbours make none quicker
            yield np.minimum(rates, wanted)
            stack += [((*replicas, items[number]), number) for number in range(last, len(items))]
    if stack:
        raise TooLargeError


def _items(problem: Problem, device: Device, mig: str | None) -> Iterator[tuple[float, int, int, float]]:
    """Yield (percent, bytes, model, requests/s) of the replicas in time: of a share every batch that has its merit."""
    rows = problem.estimator.rows  # type: ignore[attr-defined]
    for position, demand in enumerate(problem.demands):
        by_share: dict[float, list[tuple[int, float]]] = {}
        for (name, model, batch, share), (ms, held) in rows.items():
            inside = (name, model, share.mig) == (device.name, demand.model, mig)
            if inside and ms < _BUDGET * demand.slo.latency_ms:
                by_share.setdefault(share.sm_pct, []).append((held, 1000.0 * batch / ms))
        for percent, choices in by_share.items():
            yield from ((percent, held, position, rate) for held, rate in _front(choices))


def _front(choices: Iterable[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    best = 0.0
    for held, rate in sorted(choices, key=lambda item: (item[0], -item[1])):
        if rate > best * (1.0 + _LITTLE):
            best = rate
            yield held, rate


def _sums(first: Rates, second: Rates, wanted: Rates) -> Rates:
    if len(first) * len(second) > _MOST_SETS * 200:
        raise TooLargeError
    sums = (first[:, None, :] + second[None, :, :]).reshape(-1, len(wanted))
    return _drop_dominated(np.minimum(sums, wanted))


def _reaches(first: Rates, second: Rates, wanted: Rates) -> bool:
    """Whether a set of the first and one of the second serve together what is wanted."""
    missing = wanted * (1.0 - _LITTLE) - first
    return any(bool((second >= least).all(axis=1).any()) for least in missing)


def _drop_dominated(rates: Rates) -> Rates:
    """Leave out the sets of which another has no less of anything."""
    rates = np.round(rates, 9)
    most = rates[rates.sum(axis=1).argmax()]  # what it dominates goes at once: the rest is compared pair by pair
    rates = np.vstack([rates[~(rates <= most).all(axis=1)], most])
    rates = rates[np.argsort(-rates.sum(axis=1), kind="stable")]
    kept = rates[_find_undominated(rates, _LITTLE)]
    if len(kept) > _MOST_SETS:
        raise TooLargeError
    return np.ascontiguousarray(kept)


@numba.njit(cache=True)
def _find_undominated(rates: Rates, little: float) -> Any:
    """Return the indices of the rows that no row of a larger sum matches, of rows by falling sum."""
    kept = np.empty(len(rates), dtype=np.int64)
    count = 0
    for i in range(len(rates)):
        is_matched = False
        for j in kept[:count]:
            is_matched = is_matched or bool(np.all(rates[j] >= rates[i] - little))
        if not is_matched:
            kept[count] = i
            count += 1
    return kept[:count]
