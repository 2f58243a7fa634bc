"""Judges maps: the rates that their replicas serve, the better of two maps, and bounds of all maps.

With a latency budget, the program over the highest capacities of all shares bounds the cost of every map without shared
workers (`bound_by_program`). Otherwise each request takes at least a part of a device's time (`bound_by_time`). The
work of a request on the whole board (`gpuprof.domain.estimate.bound_by_work`) bounds every map.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Workload, board_work, bound_by_work
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.number_format import ROUNDING
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import BatchServer, is_quick, queue_of
from gpuprof.errors import InputError
from gpuprof.placement.evidence import RELATIVE_ROUNDING
from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.restricted_master import RestrictedMaster, solve_relaxation
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition, PlacedReplica, Placement, map_replicas
from gpuprof.placement.planned_workloads import find_alike, planned_ms
from gpuprof.placement.pool import Gpus, Pools
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT
from gpuprof.placement.rate_limit import LEAST_CV, SLACK, parts_in_time
from gpuprof.placement.segment import Segment, Segments, SharedSegments
from gpuprof.placement.unplaced_reasons import with_unplaced

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Judge:
    """Evaluates the maps of a problem with pooled queues, or with a separate request stream for each replica."""

    problem: Problem
    segments: Segments  #: Of the same problem, for replicas with streams of their own.
    limit: Limit
    _pools: Pools = field(init=False)

    def __post_init__(self) -> None:
        self._pools = Pools(self.problem, self.segments)

    @property
    def is_pooled(self) -> bool:
        """Return whether the replicas of a model have one queue; with a latency budget they have separate streams."""
        return self.problem.options.latency_budget is None

    def rank(self, placement: Placement) -> tuple[tuple[float, ...], float]:
        """Return the key by which maps are compared: less is better."""
        return rank_map(self.problem, placement)

    def settle(self, gpus: Gpus, method: str, *, is_rough: bool = False) -> Placement:
        """Return the map with the rates that its replicas serve, up to the demanded ones, without idle devices.

        ``is_rough``: whether rates below the demanded ones may be off by some percent.
        """
        if self.is_pooled:
            rerated = self._pools.rerate(gpus, self._pools.served_rps(gpus, is_rough=is_rough))
            gpus = self._pools.drop_spare(rerated, self.limit)
        return with_unplaced(self.problem, self.segments, Placement("optimal", gpus, found_by=method))

    def raise_rates(self, placement: Placement) -> Placement:
        """Return the map with the replicas of unmet demands at their full capacity."""
        if self.is_pooled or not placement.unplaced:
            return placement
        missing = {shortfall.model: shortfall.rate_rps for shortfall in placement.unplaced}

        def raise_rate(gpu: PlacedGpu, partition: PlacedPartition, replica: PlacedReplica) -> PlacedReplica:
            if missing.get(replica.model, 0.0) <= 0.0:
                return replica
            spare = self._find_capacity(gpu, partition, replica) - replica.rate_rps
            added_rps = max(0.0, min(missing[replica.model], spare))
            missing[replica.model] -= added_rps
            return replace(replica, rate_rps=replica.rate_rps + added_rps)

        gpus = map_replicas(placement.gpus, raise_rate)
        return with_unplaced(self.problem, self.segments, replace(placement, gpus=gpus, unplaced=()))

    def share_out(self, gpus: Sequence[PlacedGpu]) -> Gpus:
        """Return the devices with each demand's rate divided among its replicas in proportion to their capacities.

        Raises `InputError` where a replica has no estimate beside its neighbours.
        """
        total: defaultdict[str, float] = defaultdict(float)

        def fill(gpu: PlacedGpu, partition: PlacedPartition, replica: PlacedReplica) -> PlacedReplica:
            capacity_rps = self._find_capacity(gpu, partition, replica)
            total[replica.model] += capacity_rps
            return replace(replica, rate_rps=capacity_rps)

        def reduce(gpu: PlacedGpu, partition: PlacedPartition, replica: PlacedReplica) -> PlacedReplica:
            factor = min(1.0, self.problem.demand(replica.model).rate_rps / total[replica.model])
            return replace(replica, rate_rps=replica.rate_rps * factor)

        return map_replicas(map_replicas(gpus, fill), reduce)

    def _find_capacity(self, gpu: PlacedGpu, partition: PlacedPartition, replica: PlacedReplica) -> float:
        """Return the rate of a replica beside its neighbours; in a pool, that of full batches."""
        device, beside = self.problem.device(gpu.device), partition.beside(replica)
        if self.is_pooled:
            return self.segments.server(device, replica.workload, beside).capacity_rps
        segment = self.segments.make(self.problem.demand(replica.model), device, replica.workload, beside)
        return 0.0 if segment is None else segment.capacity_rps

    def accept(self, gpus: Gpus) -> Gpus | None:
        """Return the devices with the rates that their pools serve; None where these are less than planned."""
        if not self.is_pooled:
            return gpus
        planned = Placement("", gpus).rates_rps()
        try:
            served_rps = self._pools.served_rps(gpus)
        except InputError:
            return None
        if any(served_rps.get(model, 0.0) < rate * (1.0 - TOLERANCE) for model, rate in planned.items()):
            return None
        return self._pools.drop_spare(self._pools.rerate(gpus, served_rps), self.limit)

    def is_sound(self, placement: Placement) -> bool:
        """Return whether every replica outside a pool keeps its SLO; rates of pools are already verified."""
        return self.is_pooled or all(
            self.segments.holds(self.problem.device(gpu.device), partition)
            for gpu in placement.gpus
            for partition in gpu.partitions
        )


def rank_map(problem: Problem, placement: Placement) -> tuple[tuple[float, ...], float]:
    """Return the unserved rates and the cost: less is better."""
    return _unserved_by_priority(problem, placement), round(sum_prices(problem, placement.gpus), 9)


def _unserved_by_priority(problem: Problem, placement: Placement) -> tuple[float, ...]:
    """Return unserved rates by falling priority, to a millionth; a demand below its floor counts as unserved."""
    levels = sorted({demand.priority for demand in problem.demands}, reverse=True)
    missing = dict.fromkeys(levels, 0.0)
    for unplaced in placement.unplaced:
        demand = problem.demand(unplaced.model)
        is_below_minimum = demand.rate_rps - unplaced.rate_rps < (demand.min_goodput_rps or 0.0) * (1.0 - 1e-9)
        missing[demand.priority] += demand.rate_rps if is_below_minimum else unplaced.rate_rps
    total = sum(demand.rate_rps for demand in problem.demands)
    return tuple(round(missing[level] / total, 6) for level in levels)


def weigh_priority(problem: Problem, demand: Demand) -> float:
    """Return the worth of a request: above that of all requests of lower priorities together."""
    rates = [other.rate_rps for other in problem.demands]
    return (math.fsum(rates) / min(rates)) ** demand.priority


def is_proven_optimal(problem: Problem, placement: Placement) -> bool:
    """Return whether no placement is better than this one, up to a negligible gap in large fleets."""
    if placement.unplaced:
        served_rps, bound_rps = sum(placement.rates_rps().values()), placement.upper_bound_goodput_rps
        return bound_rps is not None and served_rps >= bound_rps * (1.0 - RELATIVE_ROUNDING)
    bound = placement.lower_bound_cost_per_hour
    return bound is not None and sum_prices(problem, placement.gpus) <= bound * (1.0 + RELATIVE_ROUNDING) + 1e-9


def raise_bounds(problem: Problem, placement: Placement, bound: float) -> Placement:
    """Return the placement with its lower bounds raised to ``bound``, which holds for every map."""
    prices = {entry.price_per_hour for entry in problem.fleet.entries}
    cost, gpus = placement.lower_bound_cost_per_hour, placement.lower_bound_gpus
    if cost is None or bound <= cost:
        return placement
    if gpus is None:
        return replace(placement, lower_bound_cost_per_hour=bound)
    if len(prices) > 1:
        least_gpus = max(gpus, math.ceil(bound / max(prices) - 1e-6))
        return replace(placement, lower_bound_cost_per_hour=bound, lower_bound_gpus=least_gpus)
    # A bound of 3.2 devices means four; the subtraction allows for the solver's rounding.
    count = math.ceil(bound / min(prices) - 1e-6)
    return replace(placement, lower_bound_cost_per_hour=count * min(prices), lower_bound_gpus=count)


def clip_bounds(problem: Problem, placement: Placement) -> Placement:
    """Return the placement with the bounds that apply to it, at most its own cost.

    Neighbours may even speed each other up.
    """
    if placement.unplaced:
        most_rps, served_rps = placement.upper_bound_goodput_rps, math.fsum(placement.rates_rps().values())
        most_rps = None if most_rps is None else max(most_rps, served_rps)
        return replace(
            placement, lower_bound_gpus=None, lower_bound_cost_per_hour=None, upper_bound_goodput_rps=most_rps
        )
    cost, gpus = placement.lower_bound_cost_per_hour, placement.lower_bound_gpus
    return replace(
        placement,
        lower_bound_cost_per_hour=None if cost is None else min(cost, sum_prices(problem, placement.gpus)),
        lower_bound_gpus=None if gpus is None else min(gpus, len(placement.gpus)),
    )


def raise_by_work(problem: Problem, placement: Placement) -> Placement:
    """Return a placement of all demands with bounds no lower than the work of the demands on any devices.

    See `gpuprof.domain.estimate`. Work derived from measurements bounds nothing: larger batches may do better.
    """

    def planned_work_ms(model: str, device: Device) -> float | None:
        work = board_work(problem.estimator, model, device)
        return None if work is None or work.source == MEASURED else planned_ms(work, problem.options.confidence)

    rates = {demand.model: demand.rate_rps for demand in problem.demands}
    kinds = [(entry.device, entry.price_per_hour) for entry in problem.fleet.entries]
    bound = bound_by_work(rates, kinds, planned_work_ms)
    if placement.unplaced or not bound.gpus:
        return placement
    cost = max(placement.lower_bound_cost_per_hour or 0.0, bound.cost_per_hour)
    gpus = max(placement.lower_bound_gpus or 0, bound.gpus)
    return clip_bounds(problem, replace(placement, lower_bound_gpus=gpus, lower_bound_cost_per_hour=cost))


def sum_prices(problem: Problem, gpus: Sequence[PlacedGpu]) -> float:
    """Return the cost of devices per hour."""
    return sum(problem.entry(gpu.device).price_per_hour for gpu in gpus)


def bound_by_program(
    problem: Problem, choices: Mapping[str, Sequence[Segment]], most_cost: float, limit: Limit
) -> float:
    """Return a lower bound on the cost of serving all demands, at most ``most_cost``.

    The relaxation comes first; where it stays below ``most_cost``, the integer program over whole devices, whose shares
    are only summed where their patterns are too many to list.

    Parameters
    ----------
    problem : Problem
    choices : mapping of str to sequence of Segment
        With the highest capacities and the least memory of each share.
    most_cost : float
        Of a map; infinite without one.
    limit : Limit
    """
    entries, seed = problem.fleet.entries, problem.options.seed
    joined = RestrictedMaster(entries, join_alike(problem, problem.demands), choices, relaxed=True)
    prices = list_prices(entries)
    solution, bound = solve_relaxation(joined, prices, limit, seed)
    if solution is None:
        return min(bound, most_cost)
    bound = round_up_to_step(bound, prices)
    if bound >= most_cost * (1.0 - EXACT) or limit.is_over:
        return min(bound, most_cost)
    master = RestrictedMaster(entries, problem.demands, choices, summed=bool(joined.generated), relaxed=True)
    integral = master.program.solve(time_limit_s=limit.left_s, seed=seed, least_step=find_step(prices))
    if integral is None:
        return bound
    return min(round_up_to_step(max(bound, integral.bound), prices), most_cost)


def join_alike(problem: Problem, demands: Sequence[Demand]) -> list[Demand]:
    """Return a demand for each class of equivalent demands at the same rate, at the sum of their rates.

    The relaxation of the program over all demands is equal, since equivalent columns can be averaged.
    """
    first_alike, classes = find_alike(problem), defaultdict[object, list[Demand]](list)
    for demand in demands:
        classes[first_alike[demand.model], demand.rate_rps, demand.max_replicas].append(demand)
    return [
        replace(
            group[0],
            rate_rps=len(group) * group[0].rate_rps,
            max_replicas=None if group[0].max_replicas is None else len(group) * group[0].max_replicas,
        )
        for group in classes.values()
    ]


def list_prices(entries: Sequence[FleetEntry]) -> dict[str, float]:
    """Return the price per hour of each kind of device."""
    return {entry.device.name: entry.price_per_hour for entry in entries}


def find_step(prices: Mapping[str, float]) -> float:
    """Return the unit of which costs are multiples, 0.0 where devices have different prices."""
    return min(prices.values()) if len(set(prices.values())) == 1 else 0.0


def round_up_to_step(bound: float, prices: Mapping[str, float]) -> float:
    """Return the bound rounded up to a whole number of devices if all have the same price."""
    step = find_step(prices)
    # Costs are whole multiples of the single price; below a rounding error of the solver nothing is rounded up.
    return step * math.ceil(bound / step - 1e-6) if step else bound


@dataclass(frozen=True, slots=True)
class TimeBounds:
    """Lower bounds of the devices and the cost of maps of all demands; upper bound of the goodput of any map."""

    gpus: int
    cost_per_hour: float
    goodput_rps: float | None  #: None for a fleet of as many devices as needed.

    def add_to(self, placement: Placement) -> Placement:
        """Return the placement with these bounds."""
        return replace(
            placement,
            lower_bound_gpus=self.gpus,
            lower_bound_cost_per_hour=self.cost_per_hour,
            upper_bound_goodput_rps=self.goodput_rps,
        )


def bound_by_time(problem: Problem) -> TimeBounds:
    """Return bounds that hold for maps with and without shared workers.

    The batches of each demand take at least a part of the devices' time (`_least_time`), alone in a partition or beside
    the neighbours that slow them least, and each model of a worker at least its memory without a context; their sums
    bound the devices, and the time of all devices the requests. Where no two demands fit on a device together
    (`_have_own_devices`), each takes a whole number of devices.
    """
    segments, entries = SharedSegments(problem), problem.fleet.entries
    have_own = _have_own_devices(segments)
    least: dict[str, tuple[float, float, float]] = {}  # devices, cost and memory, by the first alike model
    times: dict[str, float] = {}  # time of devices, by the first alike model
    least_parts: list[tuple[float, float]] = []  # of a device's time, and the rate
    for demand in problem.demands:
        first = segments.first_alike(demand.model)
        if first not in least:
            batches = {entry: _list_batches(segments, demand, entry.device) for entry in entries}
            able = [entry for entry in entries if len(batches[entry])]
            if not able:
                continue  # no map serves it
            times[first] = _least_time(problem, demand, np.concatenate([batches[entry] for entry in able]))
            devices = float(max(1, math.ceil(times[first] - 1e-6))) if have_own else times[first]
            paid = [batches[entry] * (entry.price_per_hour, 1.0, 1.0) for entry in able]
            cost = _least_time(problem, demand, np.concatenate(paid))
            memory = min(_least_memory_part(segments, first, entry.device) for entry in able)
            least[first] = devices, max(cost, devices * min(entry.price_per_hour for entry in able)), memory
        least_parts.append((times[first], demand.rate_rps))  # a part of a demand may take a part of its devices
    served = [least[first] for d in problem.demands if (first := segments.first_alike(d.model)) in least]
    time, least_cost, least_memory = (math.fsum(column) for column in zip((0.0, 0.0, 0.0), *served, strict=True))
    prices = {entry.price_per_hour for entry in entries}
    count = max(1, math.ceil(max(time, least_memory) - 1e-6))
    cost = count * min(prices) if len(prices) == 1 else max(min(prices), least_cost)
    return TimeBounds(count, cost, _bound_goodput(problem.fleet, least_parts))


def _have_own_devices(segments: Segments) -> bool:
    """Return whether no device serves two demands: nothing shares a partition, and every share is over half a device.

    Without MPS and shared workers, a partition of a GPU runs a single replica; the shares of a CPU are its cores.
    """
    options, entries = segments.problem.options, segments.problem.fleet.entries
    return (options.isolate and options.no_mps) and all(
        entry.device.fraction(share) > 0.5
        for entry in entries
        for demand in segments.problem.demands
        for share in _list_shares(segments, demand.model, entry.device)
    )


def _list_shares(segments: Segments, model: str, device: Device) -> list[Share]:
    """Return the shares that a replica may have; none without an estimate."""
    with suppress(InputError):
        shares = list(segments.problem.estimator.shares(model, device))
        partitions = {share.mig for share in shares}
        return shares + [
            Share(pct, mig) for mig in partitions for pct in segments.search_space.steps(model, device, mig)
        ]
    return []


def _bound_goodput(fleet: Fleet, least_parts: Sequence[tuple[float, float]]) -> float | None:
    """Return the rate that the time of all devices allows if the requests that take the least time go first."""
    counts = [entry.count for entry in fleet.entries]
    free, most_rps = math.fsum(count or 0 for count in counts), 0.0
    for part, rate_rps in sorted(least_parts, key=lambda pair: pair[0] / pair[1]):
        served = min(1.0, free / part) if part > 0.0 else 1.0
        most_rps, free = most_rps + served * rate_rps, free - served * part
    return None if None in counts else most_rps


def _least_time(problem: Problem, demand: Demand, batches: Floats) -> float:
    """Return the least time of devices per second that a demand's batches take, or their cost, by weak duality.

    The requests that a batch answers in time arrive within a window before its start, of the SLO less the least time to
    an answer. Covering Poisson requests at a rate r by windows of a length w takes r / (1 + r w) windows a second, of
    which late requests spare at most one each. Where prices of a request and of a batch make no batch worth more than
    its time, they give the least time of all requests and batches.
    """
    seconds, in_time, answers_s = batches.T
    rate_rps, late, least_batches = demand.rate_rps, 0.0, 0.0
    if problem.options.latency_budget is None:
        late = 1.0 - demand.slo.percentile / 100.0 + SLACK
    if _has_partial_batches(problem, demand):
        window_s = demand.slo.latency_ms / 1000.0 - answers_s.min()
        least_batches = max(0.0, rate_rps / (1.0 + rate_rps * window_s) - late * rate_rps)
    batch_price = np.linspace(0.0, seconds.min(), 17)
    price = ((seconds - batch_price[:, None]) / in_time).min(axis=1)
    return float((batch_price * least_batches + price * rate_rps * (1.0 - late)).max())


def _has_partial_batches(problem: Problem, demand: Demand) -> bool:
    """Return whether the queueing model follows the batch formation rule under Poisson requests."""
    is_queued = problem.options.latency_budget is None
    return is_queued and is_quick(queue_of(problem.queueing, demand.model))


def _list_batches(segments: Segments, demand: Demand, device: Device) -> Floats:
    """Return the batches that may answer requests of a demand in time on a device, shape (n, 3).

    The columns are the seconds of a whole device, the mean number of requests in time, and the least seconds from the
    start to an answer.
    """
    model, space, problem = segments.first_alike(demand.model), segments.search_space, segments.problem
    if len(problem.fleet.entries) > 1:  # the shares of many kinds would take many estimates
        work = board_work(problem.estimator, model, device)
        if work is not None and work.source != MEASURED:
            return np.array([(planned_ms(work, problem.options.confidence) / 1000.0, 1.0, 0.0)])
    batches: list[tuple[float, float, float]] = []
    lone = Segments(problem)
    for share in _list_shares(segments, model, device):
        whole = Share(mig=share.mig)
        for count in space.processes(share):
            sizes = space.listed_batches(model, device, share)
            workloads = [Workload(model, size, share, count) for size in sizes]
            # Without neighbours, a part takes the whole partition, and only matters where it is quicker than the whole.
            rates, whole_rates = (
                lone.load_full_rps(device, Workload(model, 1, held, count), sizes) for held in (share, whole)
            )
            is_quicker = share != whole and (not rates or any(rates[size] > whole_rates[size] for size in sizes))
            for known, held in ((segments, share), (lone, whole))[: 1 + is_quicker]:
                with suppress(InputError):  # nor is there an estimate of larger batches
                    for seconds, in_time, answer_s in _list_in_share(known, demand, device, workloads):
                        batches.append((seconds * device.fraction(held) / count, in_time, answer_s))
    return np.array(batches).reshape(-1, 3)


def _list_in_share(
    segments: Segments, demand: Demand, device: Device, workloads: Sequence[Workload]
) -> Iterator[tuple[float, float, float]]:
    """Yield the seconds, requests in time and least seconds to an answer of batches; see `_list_batches`.

    Between listed sizes, times are interpolated: no size between two has a better ratio of requests to time than both.
    """
    options = segments.problem.options
    if not workloads or not _has_partial_batches(segments.problem, demand):
        for workload in workloads:
            throughput_rps = segments.full_rps(device, workload)
            yield workload.processes * workload.batch / throughput_rps, float(workload.batch), 0.0
        return

    cv, limit_ms = segments.estimate(device, workloads[0]).latency_cv, demand.slo.latency_ms * (1.0 + ROUNDING)

    @cache
    def find(size: int) -> tuple[float, float]:
        """Return the time of a batch, and the part of such batches in time."""
        workload = replace(workloads[0], batch=size)
        each_ms = 1000.0 * workload.processes / segments.full_rps(device, workload)
        ms = each_ms * size + options.host.handover_ms
        server = BatchServer((ms,), 1, 0.0, latency_cv=cv, overhead_ms=options.overhead_ms)
        return ms, parts_in_time(server, limit_ms)[0]

    smaller, listed = 1, sorted({1, *(workload.batch for workload in workloads)})
    segments.load_full_rps(device, workloads[0], listed)
    for size in listed:
        part, last = find(smaller)[1], size
        if find(size)[1] < part / 2.0:  # most sizes between two that are in time are, too, and not asked for
            last = smaller - 1 + bisect_left(range(smaller, size + 1), True, key=lambda n: find(n)[1] < part / 2.0)
        beyond = find(min(last + 1, size))[1] if last < size else 0.0
        for number, most in ((last, part), (size, beyond)):
            ms, answer_s = find(number)[0], options.overhead_ms / 1000.0
            if most > SLACK:
                yield ms / 1000.0, number * most, answer_s + (ms / 1000.0 if cv < LEAST_CV else 0.0)
        smaller = size
        if not find(size)[1]:
            return


def _least_memory_part(segments: Segments, model: str, device: Device) -> float:
    """Return the least fraction of a device's memory that a worker's model takes, without context; 0 if unknown."""
    with suppress(InputError):
        batches = segments.search_space.listed_batches(segments.first_alike(model), device, Share())
        estimate = segments.estimate(device, Workload(model, min(batches, default=1), Share()))
        process_bytes = segments.memory_bytes(estimate)
        if process_bytes is not None:
            return estimate.added_bytes(process_bytes) / device.dram_bytes
    return 0.0
