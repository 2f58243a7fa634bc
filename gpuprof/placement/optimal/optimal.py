"""The cheapest placement, or on a fleet that is too small the placement with the most goodput, with a bound."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from gpuprof.domain.demand import Demand
from gpuprof.domain.deployment import DeploymentMap, Partition, Unplaced, share_of
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import (
    PREDICTED,
    Estimate,
    Estimator,
    Figure,
    Workload,
    batch_times,
    classify_source,
)
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.mig import is_legal, make_placement
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.bin import FleetBins, cheapest_cover, fits_device, make_cost
from gpuprof.placement.device_assignment import assign_devices
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.candidates import CandidateSegments, Choices, with_least_memory
from gpuprof.placement.optimal.contents import Contents
from gpuprof.placement.optimal.cutting_stock import CuttingStock
from gpuprof.placement.optimal.equal_replicas import place_equal, refill
from gpuprof.placement.optimal.judge import (
    Judge,
    TimeBounds,
    bound_by_program,
    bound_by_time,
    clip_bounds,
    is_proven_optimal,
    list_prices,
    raise_bounds,
    raise_by_work,
    sum_prices,
)
from gpuprof.placement.optimal.local_search import LocalSearch, PartitionPlanner, used_price
from gpuprof.placement.optimal.program_plan import bound_goodput, plan_by_program
from gpuprof.placement.optimal.shared_workers import list_shareable, share_workers
from gpuprof.placement.placement import TOLERANCE, PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.planned_workloads import planned_ms
from gpuprof.placement.pool import Gpus
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.rate_limit import RATE_PRECISION
from gpuprof.placement.segment import PooledSegments, Segment, Segments, SharedSegments
from gpuprof.placement.unplaced_reasons import with_reasons, with_unplaced

#: Maximum number of plans with corrected rates.
MOST_REPLANS = 8
#: Plans a problem anew.
Planner = Callable[[Problem], Placement]


@dataclass(frozen=True, slots=True)
class Optimal:
    """Optimises batches, processes, replicas, shares and devices together, by an integer program and a local search.

    Every share of the search space is considered with its best batch, and where memory may not suffice also batches
    with less memory (`CandidateSegments`). Demands that can all be met are met at the least cost; otherwise as much as
    possible is served, higher priorities first, at the least cost. A first fit on one kind of device gives a map at
    once. The program ignores neighbours, so its map and a map of patterns with neighbours (`CuttingStock`), under the
    queueing model also one of equal replicas (`place_equal`), are improved by a local search that sees neighbours and
    pools; with pools it comes first. The search ends where a map costs no more than the lower bound, which holds for
    every map in the `SearchSpace`, which all policies obey; no program is solved whose relaxation costs as much as the
    incumbent. Running replicas stay where an equally good map allows.
    """

    def place(self, problem: Problem) -> Placement:
        """Return the placement; see `gpuprof.placement.policies.Policy`.

        Maps of measured figures alone come first: extrapolated shares are only used where they make a cheaper map.
        """
        limit, start = Limit(problem.options.time_limit_s), None
        no_bounds = TimeBounds(1, min(list_prices(problem.fleet.entries).values()), None)
        limit = limit.with_least((limit.seconds or 0.0) / 2.0)  # where other programs occupy the processors
        is_shared = bool(list_shareable(problem))
        search_limit = limit.keeping((limit.seconds or 0.0) / 4.0) if is_shared else limit
        plain_problem = replace(problem, options=replace(problem.options, explains=False))
        measured = None if problem.previous is not None else restrict_to_measured(plain_problem)
        if measured is not None:
            first_limit = search_limit.keeping((search_limit.seconds or 0.0) / 2.0)
            start = Search(measured, first_limit, time_bounds=no_bounds).find_map()
            search_limit = search_limit.with_least((limit.seconds or 0.0) / 2.0)  # however long that took
        search = Search(plain_problem, search_limit, None if start is None or start.unplaced else start)
        incumbent = search.find_map()
        # A map proven by its requests' work on whole boards, or a single cheapest device, needs no shared workers.
        if is_shared and not is_proven_optimal(problem, raise_by_work(problem, no_bounds.add_to(incumbent))):
            bounds = search.time_bounds or no_bounds
            bounding_limit = limit.with_least((limit.seconds or 0.0) / 3.0)  # however long the search took
            with problem.limits.until(bounding_limit), suppress(TimeUpError):
                bounds = search.time_bounds or bound_by_time(problem)
                incumbent = clip_bounds(problem, raise_by_work(problem, bounds.add_to(incumbent)))
            incumbent = raise_by_work(problem, share_workers(plain_problem, incumbent, bounds, limit))
        return with_reasons(problem, incumbent, limit)


@dataclass(slots=True)
class Search:
    """Searches the map of a problem."""

    problem: Problem
    limit: Limit
    start: Placement | None = None  #: A map of all demands to begin with, in place of a first fit.
    #: Bounds of maps with shared workers, and of any map under the queueing model; None before they are known.
    time_bounds: TimeBounds | None = None
    _judge: Judge = field(init=False)
    _best: Placement = field(init=False)
    _is_bounded: bool = field(default=False, init=False)  #: Whether the program's bound was found in time.

    def find_map(self) -> Placement:
        """Return the best map found in time, with its bounds."""
        problem, segments = self.problem, self._make_segments(self.problem)
        first_models = {segments.first_alike(demand.model) for demand in problem.demands}
        servable = {model for model in first_models if can_serve(problem, segments, problem.demand(model))}
        able = [demand for demand in problem.demands if segments.first_alike(demand.model) in servable]
        if not able:
            return with_unplaced(problem, segments, Placement("optimal", (), (), 0, 0.0))
        if len(able) < len(problem.demands):
            self.problem = replace(problem, demands=tuple(able), alike={})
        self._judge = Judge(self.problem, Segments(self.problem), self.limit)
        nothing = (Unplaced(model=demand.model, rate_rps=demand.rate_rps, reason="") for demand in able)
        self._best = self.start or Placement("optimal", (), tuple(nothing))
        self._place_first()
        with self.problem.limits.until(self.limit), suppress(TimeUpError):
            self._search()
        with self.problem.limits.until(self.limit), suppress(TimeUpError):
            self._finish()
        placement = clip_bounds(self.problem, raise_by_work(self.problem, self._best))
        stopped = self.limit.is_over and not is_proven_optimal(self.problem, placement)
        if not placement.unplaced and self._is_counted:
            placement = replace(placement, upper_bound_goodput_rps=math.fsum(demand.rate_rps for demand in able))
        return with_unplaced(problem, self._judge.segments, replace(placement, stopped=stopped))

    def _make_segments(self, problem: Problem) -> Segments:
        return PooledSegments(problem) if self._is_queued else SharedSegments(problem)

    def _place_first(self) -> None:
        """Make the cheapest map on a single kind of device, or on a counted fleet on all kinds, the incumbent.

        A first fit packs models into the smallest shares, and is repaired without a limit; the program of undivided
        partitions replicates them, unless a single cheapest device suffices. At the same cost the smaller shares stay.
        """
        kinds = () if self.start else list_single_kinds(self.problem, self._make_segments(self.problem))
        for cost, problem in kinds:
            if cost >= self._most_cost:
                continue
            segments = self._make_segments(problem)
            offers, limit = (
                CandidateSegments(problem, segments),
                self._halve_limit() if self._is_counted else Limit(None),
            )
            first_fits = [partial(place_first_fit, problem, segments)]
            if any(entry.device.mig_profiles for entry in problem.fleet.entries):
                # One model in an instance keeps all models that need other parts of a device off it.
                first_fits.append(partial(place_first_fit, problem, segments, is_undivided=True))
            if self._is_counted and not self._is_queued:
                first_fits.append(partial(_place_decreasing, problem))
            for placement in itertools.chain(
                *(self._repair(segments, "first fit", first_fit, Limit(None)) for first_fit in first_fits),
                self._run_program(offers, offers.list_undivided, limit),
            ):
                if self._judge.rank(placement) < self._judge.rank(self._best):
                    self._best = self._with_least_bounds(placement)
                    self._report_progress(self._best)
                if not self._best.unplaced and is_proven_optimal(self.problem, self._best):
                    return
        self._best = self._with_least_bounds(self._settle_exactly(self._best))

    def _with_least_bounds(self, placement: Placement) -> Placement:
        least_cost = min(list_prices(self._entries).values())
        return replace(placement, lower_bound_gpus=1, lower_bound_cost_per_hour=least_cost)

    @property
    def _is_by_time(self) -> bool:
        """Whether lower bounds come from the devices' time: with queueing, or shared workers."""
        return self._is_queued or bool(list_shareable(self.problem))

    @property
    def _is_queued(self) -> bool:
        """Whether the replicas of a model have one queue; with a latency budget, each has its own stream."""
        return self.problem.options.latency_budget is None

    @property
    def _entries(self) -> Sequence[FleetEntry]:
        return self.problem.fleet.entries

    @property
    def _is_done(self) -> bool:
        return is_proven_optimal(self.problem, raise_by_work(self.problem, self._best))

    def _search(self) -> None:
        """Improve the map and raise the bound until both meet, or no method can make the map cheaper."""
        if self._is_done:
            return
        self._search_likely_kinds()
        problem = self._narrow()
        segments = self._make_segments(problem)
        offers = CandidateSegments(problem, segments)
        local_search = LocalSearch(problem, PartitionPlanner(problem, segments), self._judge.accept, self.limit)
        first = self._best
        if self._is_queued:
            if equal := place_equal(problem, segments, self._most_cost):
                self._keep(self._judge.settle(equal, "equal replicas"))
            self._refill(problem, segments)
            self._improve(local_search, self._best)
            has_improved = self._best is not first
            self._bound_time()
            # Where all shares save no device over measured ones, the maps of their program would not either.
            if self._is_done or (self.start is not None and not has_improved):
                return
        elif not self._best.unplaced:
            self._bound_budget(offers)
            if self._is_done:
                return
        starts = [first]
        for placement in self._list_maps(offers, local_search.planner):
            self._keep(placement)
            starts.append(placement)
            self._bound_time()
            if self._is_done:
                return
        ranking = sorted(starts, key=self._judge.rank)
        for start in ranking[:2] if self._is_queued else ranking:
            if not self._is_done:
                self._improve(local_search, start)
        self._refill(problem, segments)
        if not self._is_queued and not self._is_done:  # with pools, contents serve no more than the maps so far
            self._place_contents(offers)

    def _improve(self, local_search: LocalSearch, start: Placement) -> None:
        """Improve a map of all demands by local search."""
        kinds = {entry.device.name for entry in local_search.problem.fleet.entries}
        is_able = not start.unplaced and kinds.issuperset(gpu.device for gpu in start.gpus)
        for gpus in local_search.improve(start.gpus) if is_able else ():
            self._keep(self._judge.settle(gpus, "local search"))
            if self._is_done:
                return

    def _find_most_cost(self, problem: Problem, demands: Sequence[Demand]) -> float:
        """Return the cost that a plan has to stay below; infinite for raised rates, whose maps have spare devices."""
        return self._most_cost if tuple(demands) == problem.demands else math.inf

    @property
    def _most_cost(self) -> float:
        """Cost that a better map stays below: infinite while the incumbent leaves demands unserved."""
        return math.inf if self._best.unplaced else sum_prices(self.problem, self._best.gpus)

    def _refill(self, problem: Problem, segments: Segments) -> None:
        """Fill the devices of a fixed fleet that serve one unmet demand, or nothing, with its best equal replicas.

        The other searches guess the rates of pools as large as the demand, which the fleet may be too small for.
        """
        if not (self._is_queued and self._is_counted):
            return
        for demand in problem.by_priority():
            if any(unplaced.model == demand.model for unplaced in self._best.unplaced):
                for gpus in refill(problem, segments, self._best.gpus, demand):
                    self._keep(self._judge.settle(gpus, "equal replicas"))

    def _place_contents(self, offers: CandidateSegments) -> None:
        """Improve the map by the contents of partitions that serve most beside their neighbours."""
        contents = Contents(offers.problem, offers.segments, offers.list_choices(), self.limit)
        with suppress(InputError):  # no estimate of a batch that is not full, beside neighbours
            gpus = contents.place(self.problem.demands, self._best.gpus, is_partial=bool(self._best.unplaced))
            self._keep(self._judge.settle(self._judge.share_out(gpus), "program of contents"))

    def _list_maps(self, offers: CandidateSegments, planner: PartitionPlanner) -> Iterator[Placement]:
        """Yield maps of patterns with neighbours, and of the program without neighbours.

        Under the queueing model the program comes first, since each pattern requires solving queues beside neighbours.
        """
        if self._is_queued:
            yield from self._run_program(offers, offers.list_choices, self._halve_limit())
        if not (self._is_counted and self._best.unplaced):  # patterns serve demands whole
            kept_s = (self.limit.left_s or 0.0) / (2.0 if self._is_queued else 4.0)
            limit = self.limit.keeping(kept_s)
            stock = CuttingStock(offers.problem, planner, offers.list_choices(), limit)

            def place(demands: Sequence[Demand]) -> Gpus:
                return stock.place(demands, self._find_most_cost(offers.problem, demands))

            yield from self._repair(offers.segments, "patterns of replicas", place, limit)
        if not self._is_queued:
            yield from self._run_program(offers, offers.list_choices, self._halve_limit(), is_every=True)

    def _halve_limit(self) -> Limit:
        """Return a limit at half of the time left."""
        return self.limit.keeping((self.limit.left_s or 0.0) / 2.0)

    def _keep(self, placement: Placement) -> bool:
        """Make a map the incumbent if it is better; return whether it is."""
        if self._judge.rank(placement) < self._judge.rank(best := self._best):
            placement = self._settle_exactly(placement)
        is_better = self._judge.rank(placement) < self._judge.rank(best)
        if is_better:
            self._best = replace(best, gpus=placement.gpus, unplaced=placement.unplaced, found_by=placement.found_by)
            self._report_progress(self._best)
        return is_better

    def _settle_exactly(self, placement: Placement) -> Placement:
        """Return the map with exact rates where it does not serve everything."""
        if not placement.unplaced or self._is_counted:
            return placement
        return self._judge.settle(placement.gpus, placement.found_by or "")

    def _narrow(self) -> Problem:
        """Return the problem restricted to the kinds of devices that may give a cheaper map.

        A map with a device that costs as much as the incumbent is no cheaper. Under the queueing model, kinds whose
        guessed cost for all demands is not less are left out too.
        """
        if self._best.unplaced:
            return self.problem
        entries = self._list_cheaper()
        if self._is_queued and len(entries) > 1:
            ranking = rank_kinds(self.problem, self._judge.segments)
            likely = {entry.device.name for estimate, entry in ranking if estimate < self._most_cost}
            entries = [entry for entry in entries if entry.count is not None or entry.device.name in likely]
        if len(entries) in (0, len(self._entries)):
            return self.problem
        return replace(self.problem, fleet=Fleet(tuple(entries)), alike={})

    def _search_likely_kinds(self) -> None:
        """Search maps on the two kinds that are likely cheapest, each for a third of the time left."""
        if len(self._entries) < 2 or self._best.unplaced or self._is_counted or self.problem.previous is not None:
            return
        ranking = rank_kinds(self.problem, self._judge.segments)
        for guess, entry in [pair for pair in ranking if pair[1].count is None][:2]:
            if guess < self._most_cost * (1.0 - EXACT) and not self.limit.is_over:
                problem = replace(self.problem, fleet=Fleet((entry,)), alike={})
                limit = self.limit.keeping(2.0 * (self.limit.left_s or 0.0) / 3.0)
                self._keep(Search(problem, limit).find_map())

    def _list_cheaper(self) -> list[FleetEntry]:
        """Return the kinds of which a single device costs less than the whole incumbent."""
        return [entry for entry in self._entries if entry.price_per_hour < self._most_cost * (1.0 - EXACT)]

    @property
    def _is_counted(self) -> bool:
        return all(entry.count is not None for entry in self._entries)

    def _raise_cost_bound(self, bound: float) -> None:
        self._best = raise_bounds(self.problem, self._best, bound)
        self._report_progress(self._best)

    def _report_progress(self, best: Placement) -> None:
        if self.problem.on_progress is not None:
            self.problem.on_progress(clip_bounds(self.problem, best))

    def _bound_goodput(self, choices: Choices) -> None:
        able = [demand for demand in self.problem.demands if choices[demand.model]]
        most = bound_goodput(self.problem, able, choices, self.limit)
        self._best = replace(self._best, upper_bound_goodput_rps=most)

    def _run_program(
        self, offers: CandidateSegments, list_choices: Callable[[], Choices], limit: Limit, *, is_every: bool = False
    ) -> Iterator[Placement]:
        """Yield the maps of the program; with all choices and a latency budget, its bound holds for every map."""
        problem = offers.problem

        def place(demands: Sequence[Demand]) -> Gpus:
            plan = plan_by_program(problem, list_choices(), demands, limit, self._find_most_cost(problem, demands))
            if is_every:
                self._bound_budget(offers, plan.bound)
            return plan.pack(problem, offers.segments)

        yield from self._repair(offers.segments, "integer program", place, limit)

    def _repair(
        self,
        segments: Segments,
        method: str,
        place: Callable[[Sequence[Demand]], Gpus],
        limit: Limit,
    ) -> Iterator[Placement]:
        """Yield the maps of a method, repaired if the pooled replicas of a model together serve too little.

        The demands of such pools are raised where there are devices enough, by more each time, until a plan costs as
        much as the incumbent. The first map is repaired without a limit: a search must not call a demand impossible for
        want of time.
        """
        problem = segments.problem
        rates = {demand.model: demand.rate_rps for demand in problem.demands}
        times_short = Counter[str]()
        for _ in range(MOST_REPLANS):
            gpus = place([replace(demand, rate_rps=rates[demand.model]) for demand in problem.demands])
            if not (gpus or self._best.unplaced):
                return
            # Where there are devices enough, a map that serves less is only repaired.
            placement = self._judge.settle(gpus, method, is_rough=not self._is_counted)
            yield placement
            if not self._is_queued or not placement.unplaced or self._is_counted or limit.is_over:
                return
            if sum_prices(problem, gpus) >= self._most_cost * (1.0 - EXACT):
                return
            for unplaced in placement.unplaced:
                rate_rps = problem.demand(unplaced.model).rate_rps
                served_rps = max(rate_rps - unplaced.rate_rps, rate_rps / 2.0)
                times_short[unplaced.model] += 1
                rates[unplaced.model] *= rate_rps / served_rps * (1.0 + RATE_PRECISION * times_short[unplaced.model])

    def _bound_time(self) -> None:
        """Bound every map under the queueing model, and every map with shared workers."""
        if self._is_by_time and self.time_bounds is None:
            self.time_bounds = bound_by_time(self.problem)
            self._best = self.time_bounds.add_to(self._best)
            self._report_progress(self._best)

    def _bound_budget(self, offers: CandidateSegments, plan_bound: float | None = None) -> None:
        """Bound the cost of every map without shared workers, or on a fleet that is too small the goodput.

        ``plan_bound``: bound of the program over ``offers``; None before it has run.
        """
        if self._is_by_time:
            return
        problem, segments = offers.problem, offers.segments
        choices = CandidateSegments(problem, segments, is_bounding=True).list_choices()
        bounding = with_least_memory(problem, segments, choices)
        if self._best.unplaced and self._is_counted:
            self._bound_goodput(bounding)
        if not all(bounding.values()):
            return
        if plan_bound and bounding == offers.list_choices():
            self._raise_cost_bound(plan_bound)
        limit = self._halve_limit() if plan_bound is None else self.limit
        if not (self._is_done or self._is_bounded or limit.is_over):
            self._raise_cost_bound(bound_by_program(problem, bounding, self._most_cost, limit))
            self._is_bounded = not limit.is_over

    def _finish(self) -> None:
        """Keep running replicas in place if that costs nothing, and raise the rates of unmet demands."""
        if self.problem.previous is not None:
            self._best = KeptMap(self.problem, self._judge, self.problem.previous).choose(self._best, self._plan_rest)
        self._best = self._judge.raise_rates(self._best)

    def _plan_rest(self, problem: Problem) -> Placement:
        return Search(problem, self.limit).find_map()


def _place_decreasing(problem: Problem, demands: Sequence[Demand]) -> Gpus:
    """Return the devices of `FirstFitDecreasing`, which fills the room that remains on scarce devices."""
    return FirstFitDecreasing().place(replace(problem, demands=tuple(demands), alike={})).gpus


def place_first_fit(
    problem: Problem, segments: Segments, demands: Sequence[Demand], *, is_undivided: bool = False
) -> tuple[PlacedGpu, ...]:
    """Return the devices of a first fit, the largest shares of the highest priority first.

    ``is_undivided``: on devices without MIG instances.

    Few queues are solved: for each demand a bisection of the listed shares finds the smallest that serves everything;
    only a demand that none of them serves whole takes the capacity of every share.
    """
    cost, bins = make_cost(problem), FleetBins(problem, segments)
    table: dict[str, list[Segment]] = {}
    parts = []
    for demand in demands:
        first = problem.demand(segments.first_alike(demand.model))
        if first.model not in table:
            devices = (entry.device for entry in problem.fleet.entries)
            table[first.model] = [
                segment for device in devices for segment in _list_quick(segments, first, device, is_undivided)
            ]
        cover = cheapest_cover(demand, [replace(segment, model=demand.model) for segment in table[first.model]], cost)
        parts += [(-demand.priority, -replica.share.sm_pct, device, replica) for device, replica in cover.replicas()]
    for _, _, device, replica in sorted(parts, key=lambda part: part[:2]):
        bins.first_fit(device, replica)
    return bins.to_gpus()


def _list_quick(segments: Segments, demand: Demand, device: Device, is_undivided: bool) -> Sequence[Segment]:
    shares = [share for share in _list_shares(segments, demand, device) if not (is_undivided and share.mig)]
    index = bisect_left(shares, True, key=lambda share: segments.can_serve_all(demand, device, share))
    if index == len(shares):
        best = segments.best(demand, device)
        return [segment for segment in best if not (is_undivided and segment.share.mig)]
    smallest = segments.serving_all(demand, device, shares[index])
    return () if smallest is None else (smallest,)


def can_serve(problem: Problem, segments: Segments, demand: Demand) -> bool:
    """Return whether some kind of device alone serves a part of the demand within its SLO; large shares go first."""
    return any(
        segments.make(demand, entry.device, workload) is not None
        for entry in problem.fleet.entries
        for share in _list_shares(segments, demand, entry.device)[::-1]
        for workload in segments.workloads(demand.model, entry.device, share)
    )


def _list_shares(segments: Segments, demand: Demand, device: Device) -> Sequence[Share]:
    """Return the listed shares, none where the estimator has no answer for the device."""
    with suppress(InputError):
        return segments.problem.estimator.shares(demand.model, device)
    return ()


def rank_kinds(problem: Problem, segments: Segments) -> list[tuple[float, FleetEntry]]:
    """Return the kinds of devices that can serve all demands, each with its approximate cost, cheapest first.

    The cost is of whole devices at full load, in batches within the SLOs.
    """
    ranking = []
    for entry in problem.fleet.entries:
        devices = math.fsum(_count_devices(segments, demand, entry.device) for demand in problem.demands)
        if math.isfinite(devices):
            ranking.append((entry.price_per_hour * max(1, math.ceil(devices)), entry))
    return sorted(ranking, key=lambda pair: pair[0])


def _count_devices(segments: Segments, demand: Demand, device: Device) -> float:
    """Return the number of devices that a demand fills with full batches; infinity if no batch is within the SLO."""
    most, problem = 0.0, segments.problem
    with suppress(InputError):
        for share in problem.estimator.shares(demand.model, device)[-1:]:
            sizes = segments.search_space.listed_batches(demand.model, device, share)
            times = batch_times(problem.estimator, demand.model, device, sizes, share, 1)
            for size, time in zip(sizes, times, strict=True):
                latency_ms = planned_ms(time, problem.options.confidence)
                if latency_ms <= demand.slo.latency_ms:
                    most = max(most, 1000.0 * size / latency_ms / device.fraction(share))
    return demand.rate_rps / most if most > 0.0 else math.inf


def list_single_kinds(problem: Problem, segments: Segments) -> Iterator[tuple[float, Problem]]:
    """Yield the problem on each kind of unlimited count alone, with its approximate cost; then on all kinds.

    On all kinds if some are limited in count, or no kind alone is known to serve all demands.
    """
    kinds = problem.fleet.entries
    ranking = rank_kinds(problem, segments) if len(kinds) > 1 else []
    unlimited = [(cost, entry) for cost, entry in ranking if entry.count is None]
    for cost, entry in unlimited:
        yield cost, replace(problem, fleet=Fleet((entry,)), alike={})
    if not unlimited or any(entry.count is not None for entry in kinds):
        yield 0.0, problem


@dataclass(frozen=True, slots=True)
class MeasuredOnly:
    """An estimator that refuses figures that are neither measured nor interpolated."""

    estimator: Estimator

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the estimate; raises `InputError` where its time was extrapolated or predicted."""
        estimate = self.estimator.estimate(model, device, batch, share, beside, processes)
        if not estimate.latency_ms.is_observed:
            raise InputError(f"{model} was not measured at batch {batch} under {share} of {device.name}")
        return estimate

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return the times; raises `InputError` where any was extrapolated or predicted."""
        times = batch_times(self.estimator, model, device, batches, share, processes)
        if not all(time.is_observed for time in times):
            raise InputError(f"{model} was not measured under {share} of {device.name}")
        return times

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the listed batches."""
        return self.estimator.batches(model, device, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the listed shares."""
        return self.estimator.shares(model, device)


def restrict_to_measured(problem: Problem) -> Problem | None:
    """Return the problem with measured figures alone; None if all were measured, or some demand has none."""
    segments, is_partial = Segments(problem), False
    for demand in problem.demands:
        if segments.first_alike(demand.model) != demand.model:
            continue
        observations = list(_list_observed(problem, segments, demand.model, between=False))
        if not any(observations):
            return None
        is_partial = is_partial or not all(observations) or not all(_list_observed(problem, segments, demand.model))
    if not is_partial:
        return None
    return replace(problem, estimator=MeasuredOnly(problem.estimator), previous=None, alike={})


def _list_observed(problem: Problem, segments: Segments, model: str, *, between: bool = True) -> Iterator[bool]:
    """Yield whether each listed share, or the least share between them in each partition, has a measured time.

    The whole comes first: where its time is predicted, nothing of the model was measured on the device.
    """
    for entry in problem.fleet.entries:
        with suppress(InputError):
            shares = problem.estimator.shares(model, entry.device)
            if between:
                partitions = dict.fromkeys(share.mig for share in shares)
                steps = {mig: segments.search_space.steps(model, entry.device, mig) for mig in partitions}
                shares = tuple(Share(percents[0], mig) for mig, percents in steps.items() if percents)
            for share in reversed(shares):
                with suppress(InputError):
                    batch = min(problem.estimator.batches(model, entry.device, share), default=1)
                    latency = segments.estimate(entry.device, Workload(model, batch, share)).latency_ms
                    yield latency.is_observed
                    if classify_source(latency.source) == PREDICTED:
                        break


@dataclass(frozen=True, slots=True)
class KeptMap:
    """Keeps as much of a running map as possible without raising the cost."""

    problem: Problem
    judge: Judge
    previous: DeploymentMap

    def choose(self, planned: Placement, plan: Planner) -> Placement:
        """Return the map with the fewest moved replicas among those as good as ``planned``."""
        return min([planned, *self._list_maps(planned, plan)], key=self._rank)

    def _rank(self, placement: Placement) -> tuple[object, ...]:
        moves = assign_devices(placement.gpus, self.previous).moves
        return *self.judge.rank(placement), moves

    def _list_maps(self, planned: Placement, plan: Planner) -> Iterator[Placement]:
        """Yield the running map with the remaining demands placed, and with as many devices replanned as needed.

        The remainder may need a further device it does not fill, while others have capacity that does not fit it: then
        the least filled devices are replanned too, twice as many each time.
        """
        old_gpus, freed = self._list_standing(), 0
        while freed < len(old_gpus) and not self.judge.limit.is_over:
            try:
                placement = self._place(old_gpus[freed:], plan)
            except InputError:
                return
            if placement is None:
                return
            yield replace(
                placement,
                lower_bound_gpus=planned.lower_bound_gpus,
                lower_bound_cost_per_hour=planned.lower_bound_cost_per_hour,
                upper_bound_goodput_rps=planned.upper_bound_goodput_rps,
            )
            if self.judge.rank(placement) <= self.judge.rank(planned):
                return
            freed = 2 * freed or 1

    def _place(self, old_gpus: Sequence[PlacedGpu], plan: Planner) -> Placement | None:
        """Return the kept devices with the remaining demands placed; None if an SLO would break."""
        kept_map = self.judge.settle(self.judge.share_out(old_gpus), "what runs already")
        if not self.judge.is_sound(kept_map):
            return None
        remainder = self._find_rest(kept_map)
        if remainder is None:
            return kept_map
        new_gpus = plan(remainder).gpus
        return self.judge.settle((*kept_map.gpus, *new_gpus), "what runs already") if new_gpus else kept_map

    def _list_standing(self) -> list[PlacedGpu]:
        """Return the legal devices of the previous map that the fleet has, the least filled first."""
        free = {
            entry.device.name: math.inf if entry.count is None else entry.count for entry in self.problem.fleet.entries
        }
        quotas = {demand.model: demand.max_replicas or math.inf for demand in self.problem.demands}
        old_gpus = []
        for gpu in self._list_previous(quotas):
            counts = Counter(replica.model for replica in gpu.replicas())
            if free[gpu.device] > 0 and all(quotas[model] >= count for model, count in counts.items()):
                old_gpus.append(gpu)
                free[gpu.device] -= 1
                for model, count in counts.items():
                    quotas[model] -= count
        return sorted(old_gpus, key=lambda gpu: used_price(self.problem, gpu))

    def _list_previous(self, models: dict[str, float]) -> Iterator[PlacedGpu]:
        kinds = {entry.device.name: entry.device for entry in self.problem.fleet.entries}
        for node in self.previous.nodes:
            for gpu in node.gpus:
                if gpu.device not in kinds:
                    continue
                try:
                    parts = tuple(self._read_partition(kinds[gpu.device], part, models) for part in gpu.partitions)
                except InputError:
                    continue
                old_gpu = PlacedGpu(gpu.device, tuple(part for part in parts if part.replicas))
                if old_gpu.partitions and self._is_legal(kinds[gpu.device], old_gpu):
                    yield old_gpu

    def _read_partition(self, device: Device, partition: Partition, models: dict[str, float]) -> PlacedPartition:
        replicas = []
        for p in partition.replicas:
            if p.model in models and not p.max_wait_ms:  # replicas waiting for full batches are no longer planned
                replica = PlacedReplica(p.model, p.batch, p.processes, share_of(partition, p), 0.0)
                memory = self.judge.segments.memory_bytes(self.judge.segments.estimate(device, replica.workload))
                replicas.append(replace(replica, memory_bytes=memory))
        mig = partition.mig
        return PlacedPartition(
            tuple(replicas), None if mig is None else mig.profile, None if mig is None else mig.start
        )

    def _is_legal(self, device: Device, gpu: PlacedGpu) -> bool:
        """Return whether a device's configuration and contents are legal, and its replicas within the options."""
        options, search_space = self.problem.options, self.judge.segments.search_space
        instances = [part for part in gpu.partitions if part.mig is not None]
        planned = all(
            replica.batch <= options.max_batch and replica.processes <= search_space.processes(replica.share)[-1]
            for replica in gpu.replicas()
        )
        is_complete = len(instances) == len(gpu.partitions) or len(gpu.partitions) == 1
        legal = is_legal(device, [make_placement(device, str(part.mig), part.start or 0) for part in instances])
        return planned and is_complete and legal and all(fits_device(device, part) for part in gpu.partitions)

    def _find_rest(self, placement: Placement) -> Problem | None:
        """Return the problem of the demands not yet served; None when nothing remains."""
        rates = placement.rates_rps()
        replicas = Counter(replica.model for gpu in placement.gpus for replica in gpu.replicas())
        remainders = [_find_remainder(d, rates.get(d.model, 0.0), replicas[d.model]) for d in self.problem.demands]
        demands = tuple(demand for demand in remainders if demand is not None)
        used_counts = Counter(gpu.device for gpu in placement.gpus)
        entries = tuple(
            replace(entry, count=None if entry.count is None else entry.count - used_counts[entry.device.name])
            for entry in self.problem.fleet.entries
        )
        fleet = Fleet(tuple(entry for entry in entries if entry.count != 0))
        if not demands or not fleet.entries:
            return None
        return replace(self.problem, demands=demands, fleet=fleet, previous=None, alike={})


def _find_remainder(demand: Demand, served_rps: float, replicas: int) -> Demand | None:
    """Return the remainder of a demand, None when nothing remains or no more replicas are allowed."""
    if served_rps >= demand.rate_rps * (1.0 - TOLERANCE):
        return None
    max_replicas = None if demand.max_replicas is None else demand.max_replicas - replicas
    if max_replicas == 0:
        return None
    floor = demand.min_goodput_rps
    return replace(
        demand,
        rate_rps=demand.rate_rps - served_rps,
        max_replicas=max_replicas,
        min_goodput_rps=None if floor is None else max(0.0, floor - served_rps),
    )
