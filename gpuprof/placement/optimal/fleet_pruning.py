"""Prunes kinds of devices whose price alone reaches the cost of a known map serving everything.

In a fleet of every GPU with a price, most kinds are useless to a small demand: every map with such a device costs at
least as much as the known map. The kinds of the known map are guessed from the maximum throughput of their whole
devices per price; the pruning is proven.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gpuprof.domain.demand import Demand
from gpuprof.domain.estimate import batch_times
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.errors import GpuprofError, InputError
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.incumbent import clip_bounds, is_proven_optimal, objective_value
from gpuprof.placement.optimal.pooled_planner import PooledPlanner
from gpuprof.placement.optimal.quick_plan import place_first_fit
from gpuprof.placement.optimal.whole_device_bound import bound_whole_devices
from gpuprof.placement.placement import Placement
from gpuprof.placement.planned_workloads import planned_ms
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: Number of kinds for which a map is made.
_TRIED = 3
#: Maximum number of demands: with more, igniter evaluates too many tails, and the search by classes needs the time.
_MOST_DEMANDS = 40
#: Likely load of a device, and the part of the SLO a batch may then take.
_LIKELY, _PART = 0.7, 0.4
#: Minimum processor time (s) for the map of the first kind with this number of demands, less with more: a map without
#: any search costs several times as much. An idle machine needs a part of this time.
_LEAST_S, _FEW_DEMANDS = 3.0, 8
#: Maximum number of kinds for which the cost of each is guessed.
_FEW_KINDS = 6
#: Precision that networks do not use.
_UNUSUAL = "float64"
#: Kinds whose guessed cost is this multiple of another's are not tried.
_FAR = 1.5
#: Kinds whose guessed cost is this multiple of the first map's are not tried: a guess may be off by half.
_FAR_FROM_KNOWN = 2.0


@dataclass(frozen=True, slots=True)
class PrunedFleet:
    """A problem with fewer kinds of devices."""

    problem: Problem
    known: Placement | None = None  #: A map serving everything and justifying the pruning; None without pruning.
    least_price: float = math.inf  #: Least price per hour of the pruned kinds; infinite without any.

    def restore(self, placement: Placement) -> Placement:
        """Return the better of two maps, with bounds holding for the pruned kinds too."""
        if self.known is None:
            return placement
        if objective_value(self.problem, self.known) < objective_value(self.problem, placement):
            placement = replace(placement, gpus=self.known.gpus, unplaced=(), found_by=self.known.found_by)
        cost, gpus = placement.lower_bound_cost_per_hour, placement.lower_bound_gpus
        if math.isfinite(self.least_price):
            cost = None if cost is None else min(cost, self.least_price)
            gpus = None if gpus is None else min(gpus, 1)  # one large device may do the work of many
        if not placement.unplaced and self.known.lower_bound_cost_per_hour is not None:
            cost = max(cost or 0.0, self.known.lower_bound_cost_per_hour)
        return clip_bounds(self.problem, replace(placement, lower_bound_cost_per_hour=cost, lower_bound_gpus=gpus))


def prune_fleet(problem: Problem, limit: Limit) -> PrunedFleet:
    """Return the problem without the kinds of devices that no map cheaper than a known map contains.

    Parameters
    ----------
    problem : Problem
        Without a latency budget. With many demands, or with a previous map, it stays as it is.
    """
    if problem.previous is not None or len(problem.demands) > _MOST_DEMANDS:
        return PrunedFleet(problem)
    asked, problem = problem, replace(problem, options=replace(problem.options, explains=False))
    guessed = iter(_guess_costs(problem))
    known = _try_kinds(problem, (entry for _, entry in guessed), limit, None, 1)
    if known is None:
        return PrunedFleet(asked)
    most = _FAR_FROM_KNOWN * _cost(problem, known)
    known = _bound_and_improve(problem, known, [entry for cost, entry in guessed if cost < most], limit)
    if not is_proven_optimal(problem, known):
        known = _replace_devices(problem, known, limit)
    cost, entries = _cost(problem, known), problem.fleet.entries
    kinds = {gpu.device for gpu in known.gpus}
    # A map with a device of a kind costs at least its price: at the known map's cost, the kind cannot make it cheaper.
    kept = [one for one in entries if one.device.name in kinds or one.price_per_hour < cost * (1.0 - 1e-9)]
    if len(kept) == len(entries):
        return PrunedFleet(asked, known)
    left_out = min(one.price_per_hour for one in entries if one not in kept)
    return PrunedFleet(replace(asked, fleet=Fleet(tuple(kept)), alike={}), known, left_out)


def _bound_and_improve(problem: Problem, known: Placement, untried: Sequence[FleetEntry], limit: Limit) -> Placement:
    """Return the map with a bound on the cost of every map, or a cheaper map of untried kinds.

    Kinds in the bound's solution come first, then kinds that are guessed to be cheap. The map of the first kind may be
    poor, so some kinds are tried even after the limit.
    """
    cost, entries = _cost(problem, known), problem.fleet.entries
    cheaper = tuple(one for one in entries if one.price_per_hour < cost * (1.0 - 1e-9))
    if len(entries) == 1 or not cheaper:
        return known  # a single kind has a bound of its own
    least_s = _LEAST_S / 2.0
    until = limit.with_least(least_s)
    bound = bound_whole_devices(_restrict(problem, problem.demands, cheaper), until)
    least = min(bound.cost_per_hour, cost, *(one.price_per_hour for one in entries if one not in cheaper))
    if least < cost * (1.0 - 1e-9):
        until = limit.with_least(least_s)
        tried = {gpu.device for gpu in known.gpus}
        taken = [one for one in cheaper if one.device.name in bound.kinds and one.device.name not in tried]
        likely = [*taken[:_TRIED], *[one for one in untried if one not in taken][: _TRIED - 1]]
        known = _try_kinds(problem, iter(likely), until, known, len(likely)) or known
    return replace(known, lower_bound_cost_per_hour=least)


def _find_quick_map(problem: Problem, limit: Limit) -> Placement | None:
    """Return the cheapest map of a few kinds of devices, each alone, that serves everything; None without a map.

    Models on a single device alone are moved to cheaper kinds that can serve them.
    """
    known = _try_kinds(problem, (entry for _, entry in _guess_costs(problem)), limit, None, _TRIED)
    return known if known is None else _replace_devices(problem, known, limit)


def _try_kinds(
    problem: Problem, kinds: Iterator[FleetEntry], limit: Limit, known: Placement | None, most: int
) -> Placement | None:
    """Return the cheapest of a known map and maps of ``most`` kinds, each alone; of more until a map is found."""
    for tried, entry in enumerate(kinds, 1):
        if known is None or entry.price_per_hour < _cost(problem, known):
            restricted = _restrict(problem, problem.demands, (entry,))
            segments, until = Segments(restricted), limit if known is not None else _with_least(problem, limit)
            for quick in _quick_maps(restricted, segments, until, better_first=known is not None):
                settled = PooledPlanner(restricted, segments, until).settle(quick)
                if not settled.unplaced and (known is None or _cost(problem, settled) < _cost(problem, known)):
                    known = settled
                if known is not None and (until.is_over or len(known.gpus) == 1):
                    break  # no map of this kind costs less
        if known is not None and (limit.is_over or tried >= most):
            break
    return known


def _replace_devices(problem: Problem, known: Placement, limit: Limit) -> Placement:
    """Return the map with devices replaced by cheaper ones serving all of their models, where available."""
    for gpu in known.gpus if len(known.gpus) > 1 else ():
        price, models = problem.entry(gpu.device).price_per_hour, {one.model for one in gpu.replicas()}
        others = list(known.gpus)
        others.remove(gpu)
        cheaper = tuple(e for e in problem.fleet.entries if e.price_per_hour < price and e.count is None)
        if limit.is_over or not cheaper or models & {one.model for other in others for one in other.replicas()}:
            continue
        part = _restrict(problem, tuple(one for one in problem.demands if one.model in models), cheaper)
        guessed = min((cost for cost, _ in _guess_costs(part)), default=math.inf)
        replacement = _find_quick_map(part, limit) if guessed <= _FAR * price else None
        if replacement is not None and _cost(problem, replacement) < price:
            segments, named = Segments(problem), f"{known.found_by}, cheaper kinds"
            mixed = replace(known, gpus=(*others, *replacement.gpus), found_by=named)
            settled = PooledPlanner(problem, segments, limit).settle(mixed)
            known = settled if not settled.unplaced else known
    return known


def _restrict(problem: Problem, demands: tuple[Demand, ...], entries: tuple[FleetEntry, ...]) -> Problem:
    if len(entries) == len(problem.fleet.entries) and len(demands) == len(problem.demands):
        return problem
    return replace(problem, demands=demands, fleet=Fleet(entries), alike={})


def _with_least(problem: Problem, limit: Limit) -> Limit:
    return limit.with_least(_LEAST_S * min(1.0, _FEW_DEMANDS / len(problem.demands)))


def _cost(problem: Problem, placement: Placement) -> float:
    return math.fsum(problem.entry(gpu.device).price_per_hour for gpu in placement.gpus)


def _quick_maps(problem: Problem, segments: Segments, limit: Limit, *, better_first: bool) -> Iterator[Placement]:
    """Yield a map from a few queues for each demand, then on GPUs a map from dozens of queues, or the latter first."""
    if not better_first:
        yield place_first_fit(problem, segments, limit)
    if all(entry.device.kind == "gpu" for entry in problem.fleet.entries):  # igniter uses shares that were not measured
        with suppress(GpuprofError, TimeUpError):
            with problem.limits.until(limit):
                found = make_policy("igniter").place(problem)
            yield replace(found, policy="optimal", found_by=found.policy)
    if better_first:
        yield place_first_fit(problem, segments, limit)


def _guess_costs(problem: Problem) -> list[tuple[float, FleetEntry]]:
    """Return the likely cost of all demands on each kind alone, the cheapest first; a single kind is not guessed.

    With many kinds, a kind is left out when another surpasses it in price and by its data sheet.
    """
    if len(problem.fleet.entries) == 1:
        return [(0.0, problem.fleet.entries[0])]
    segments, least = Segments(problem), math.inf
    costs: list[tuple[float, FleetEntry]] = []
    entries: Sequence[FleetEntry] = sorted(problem.fleet.entries, key=lambda one: one.price_per_hour)
    if len(entries) > _FEW_KINDS:
        entries = [one for one in entries if not any(_is_surpassed(one, other) for other in entries)]
    for entry in entries:
        if entry.price_per_hour > _FAR * least:
            break
        devices = math.fsum(_guess_devices(segments, demand, entry) for demand in problem.demands)
        if math.isfinite(devices):
            costs.append((entry.price_per_hour * max(1, math.ceil(devices)), entry))
            least = min(least, costs[-1][0])
    return sorted(costs, key=lambda one: one[0])


def _is_surpassed(entry: FleetEntry, other: FleetEntry) -> bool:
    """Return whether another GPU of unlimited count costs less and lacks nothing by its data sheet."""
    device, cheaper = entry.device, other.device
    if (
        {device.kind, cheaper.kind} != {"gpu"}
        or other.count is not None
        or other.price_per_hour >= entry.price_per_hour
    ):
        return False
    rates = all(
        cheaper.flops_per_s.get(name, 0.0) >= rate for name, rate in device.flops_per_s.items() if name != _UNUSUAL
    )
    return rates and cheaper.dram_bytes_per_s >= device.dram_bytes_per_s and cheaper.dram_bytes >= device.dram_bytes


def _guess_devices(segments: Segments, demand: Demand, entry: FleetEntry) -> float:
    """Return the number of whole devices a demand likely fills, infinity where no batch is in time."""
    problem, sizes = segments.problem, segments.search_space.listed_batches(demand.model, entry.device, Share())
    try:
        times = batch_times(problem.estimator, demand.model, entry.device, sizes, Share(), 1)
    except InputError:
        return math.inf
    latencies = [planned_ms(one, problem.options.confidence) for one in times]
    in_time = (one for one in zip(sizes, latencies, strict=True) if one[1] <= _PART * demand.slo.latency_ms)
    most = max((1000.0 * batch / ms for batch, ms in in_time), default=0.0)
    return demand.rate_rps / (_LIKELY * most) if most > 0.0 else math.inf
