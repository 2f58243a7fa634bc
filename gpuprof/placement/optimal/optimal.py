"""The cheapest placement, or on a fleet that is too small the placement with the most goodput, with a bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.class_bound import bound_classes
from gpuprof.placement.optimal.cost_bound import with_cost_bound
from gpuprof.placement.optimal.cutting_stock import place_classes
from gpuprof.placement.optimal.demand_classes import is_of_few_classes
from gpuprof.placement.optimal.fleet_pruning import PrunedFleet, prune_fleet
from gpuprof.placement.optimal.incumbent import (
    choose_better,
    clip_bounds,
    is_proven_optimal,
    objective_value,
    raise_bounds,
    raise_by_work,
    unfairness,
    update_incumbent,
)
from gpuprof.placement.optimal.local_search import LocalSearch
from gpuprof.placement.optimal.measured_first import restrict_to_measured
from gpuprof.placement.optimal.pattern_search import PatternSearch
from gpuprof.placement.optimal.pooled_planner import PooledPlanner, raise_demands
from gpuprof.placement.optimal.portfolio import (
    QuickPolicies,
    has_fast_late_bounds,
    run_portfolio,
)
from gpuprof.placement.optimal.program_plan import (
    MOST_BOUNDED,
    ProgramPlan,
    place_by_program,
    plan_by_program,
)
from gpuprof.placement.optimal.quick_plan import make_quick_plan
from gpuprof.placement.optimal.spare_capacity import (
    SpareCapacity,
    choose_least_risky,
    distribute_spare,
    raise_rates,
)
from gpuprof.placement.optimal.warm_start import make_warm_start
from gpuprof.placement.placement import PlacedGpu, Placement
from gpuprof.placement.pool import Pools
from gpuprof.placement.pooled_segment import PooledSegments
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments
from gpuprof.placement.time_sharing import share_time
from gpuprof.placement.unplaced_reasons import with_reasons, with_unplaced

#: Number of the quick policies' maps, best first, that are improved beside the program's own.
_IMPROVED = 3
#: Part of a time limit the quick policies leave to the search where each query needs a solved queue.
_FOR_SEARCH = 0.75
#: Part they leave with few classes of demands, whose search gains more from the time.
_FOR_CLASSES = 0.9
#: Seconds for unmeasured shares once a map of measured shares is proven, without a limit; and the part of a limit for
#: measured shares.
_FOR_EXTRAPOLATED_S, _FOR_MEASURED = 3.0, 0.5
#: Part of a time limit left after maps of equal replicas.
_AFTER_EQUAL = 0.5
#: Parts of a time limit left after pruning kinds of devices, and after bounding a first map.
_AFTER_PRUNING, _AFTER_BOUND = 0.2, 0.3
#: Part of a time limit kept for the remaining queries after the search has stopped.
_FOR_REST = 0.05
#: Minimum processor time (s) for the reasons of unplaced demands.
_LEAST_REASONS_S = 0.3


@dataclass(frozen=True, slots=True)
class Optimal:
    """Decides batch, processes, replicas, shares and places together, by the integer program `RestrictedMaster`.

    The segment of largest capacity of every share is considered, and where memory may not suffice also segments with
    less memory and less capacity. Demands that can all be met are met at the least cost; otherwise as much as possible
    is served, higher priorities first, at the least cost. The lower bounds hold for every placement in the
    `SearchSpace`, which all policies obey; demands that fill over a hundred devices only use the listed shares.
    The program ignores neighbours: interference among models in a partition is evaluated when the chosen segments are
    packed. Where the result is then above the bound and all patterns of few demands can be listed with their
    interference (`PatternSearch`), the map is optimal and its bound comes from the program over the patterns. Elsewhere
    the map and the quick policies' maps (`run_portfolio`) are improved by local search (`LocalSearch`). Similar demands
    are evaluated once; many demands of few classes get maps from patterns of classes with their neighbours
    (`place_classes`). Under pooled queues, maps of equal replicas are tried as well, and dispensable devices are
    dropped (`EqualReplicas`). The best map becomes the incumbent; its ``found_by`` names the method. Spare capacity
    goes to the least certain estimates (`SpareCapacity`), and running replicas stay where an equally good map allows.
    """

    #: Serve the least-served demand first where not everything can be served: maximise the smallest served fraction,
    #: then the goodput.
    fair: bool = False
    #: Assume a router that gives a request to the replica that answers first. Otherwise every replica is planned with a
    #: Poisson stream of its own, which takes more devices, and the bounds hold only for such plans.
    pooled: bool = True

    def place(self, problem: Problem) -> Placement:
        """Return the placement; see `gpuprof.placement.policies.Policy`.

        Quick maps of few kinds of devices come first. Kinds whose price alone reaches the cost of a map are left out,
        and the search ends where a map is as cheap as possible. With a time limit and few demands with predicted
        figures, the quick policies' maps follow, or come first on a single kind of device: they take seconds, and
        policies the limit ended are listed in the placement's ``unfinished``. With a time limit the quick
        policies' plans are made next, none of which is lost, and a quick plan; as much time as they took is kept for
        the later steps. Under the queueing model, the plan for separate streams is the start for the pools.
        """
        whole = Limit(problem.options.time_limit_s)
        measured = self._place_measured(problem)
        if measured is not None and problem.options.time_limit_s is None:
            problem = replace(problem, options=replace(problem.options, time_limit_s=_FOR_EXTRAPOLATED_S))
            whole = Limit(_FOR_EXTRAPOLATED_S)
        quick = QuickPolicies()
        found = self._place_within(problem, whole, quick)
        if found.unplaced:
            with problem.limits.until(whole.with_least(_LEAST_REASONS_S)), suppress(TimeUpError):
                found = self._serve_missing(problem, found)
        if measured is not None and objective_value(problem, measured) <= objective_value(problem, found):
            return share_time(problem, measured, whole)
        found = raise_by_work(problem, share_time(problem, found, whole))
        found = with_reasons(problem, found, whole.with_least(_LEAST_REASONS_S))
        if not quick.unfinished or is_proven_optimal(problem, found):
            return found
        return replace(found, stopped=True, unfinished=quick.unfinished)

    def _place_measured(self, problem: Problem) -> Placement | None:
        """Return the placement on measured figures alone where it serves everything and is proven optimal.

        None with a previous map, or without other figures.
        """
        measured = None if problem.previous is not None else restrict_to_measured(problem)
        if measured is None:
            return None
        options = replace(problem.options, explains=False)
        if options.time_limit_s is not None:
            options = replace(options, time_limit_s=_FOR_MEASURED * options.time_limit_s)
        measured = replace(measured, options=options)
        found = self._place_within(measured, Limit(options.time_limit_s), QuickPolicies())
        return found if not found.unplaced and is_proven_optimal(measured, found) else None

    def _serve_missing(self, problem: Problem, placement: Placement) -> Placement:
        """Return the placement with the replicas of unmet demands at their full capacity."""
        segments = Segments(problem)
        if self.pooled and problem.options.latency_budget is None:
            pools = Pools(problem, segments)
            gpus = pools.rerate(placement.gpus, pools.served_rps(placement.gpus))
        else:
            gpus = raise_rates(problem, segments, placement)
        raised = with_unplaced(problem, segments, replace(placement, gpus=gpus, unplaced=()))
        return min(placement, raised, key=partial(objective_value, problem))

    def _place_within(self, problem: Problem, whole: Limit, quick: QuickPolicies) -> Placement:
        """Return the placement within a time limit, at least as good as the quick policies' maps finished within the
        limit.
        """
        if not self.pooled or problem.options.latency_budget is not None:
            return self._place_split(problem, Segments(problem), None, whole, quick)
        if whole.seconds and len(problem.fleet.entries) == 1 and has_fast_late_bounds(problem):
            return self._place_pooled(problem, None, whole, quick)  # its first map is the quickest policy's
        pruned = None
        if whole.seconds and len(problem.fleet.entries) > 1:
            pruned = _prune(problem, whole)
            if pruned.known is not None and is_proven_optimal(problem, pruned.known):
                return self._place_pruned(problem, pruned, None, whole, quick)
        # A map with a device of a pruned kind costs at least as much as the map that justified the pruning.
        worthwhile, known = (problem, None) if pruned is None else (pruned.problem, pruned.known)
        first = quick.find_predicted(worthwhile, whole, known)
        if first is None or (self.fair and first.unplaced):  # more goodput is not fairer
            return self._place_pruned(problem, pruned, None, whole, quick)
        first = replace(first, policy="optimal", found_by=first.policy)
        return choose_better(problem, self._place_pruned(problem, pruned, first, whole, quick), first)

    def _place_pruned(
        self, problem: Problem, pruned: PrunedFleet | None, first: Placement | None, whole: Limit, quick: QuickPolicies
    ) -> Placement:
        """Return the placement for pools on the worthwhile kinds of devices, from a first map if it helps."""
        if pruned is None:
            late = whole.is_over and first is not None
            pruned = PrunedFleet(problem) if late else _prune(problem, whole)
        known = [one for one in (pruned.known, first) if one is not None and not one.unplaced]
        start = min(known, key=partial(objective_value, problem), default=None)
        if problem.previous is not None:
            start = pruned.known  # a map with fewer moved replicas is preferred to a map of equal cost
        return pruned.restore(self._place_pooled(pruned.problem, start, whole, quick))

    def _place_pooled(self, problem: Problem, known: Placement | None, whole: Limit, quick: QuickPolicies) -> Placement:
        """Return the placement for pools."""
        return self._search_pooled(problem, Segments(problem), known, whole, quick)

    def _search_pooled(
        self, problem: Problem, segments: Segments, known: Placement | None, whole: Limit, quick: QuickPolicies
    ) -> Placement:
        """Return the placement for pools; without a search where a known map is proven optimal."""
        limit = whole.keeping(_FOR_REST * (whole.seconds or 0.0))
        planner = PooledPlanner(problem, segments, limit, fair=self.fair)
        first = None if known is None else planner.bound(known, whole.keeping(_AFTER_BOUND * (whole.seconds or 0.0)))
        if whole.seconds and problem.previous is None and not (first and is_proven_optimal(problem, first)):
            quickest, made = quick.run_quickest(problem), [first]
            if quickest is not None and not quickest.unplaced:
                made.append(planner.take_over(quickest, limit))
            made.append(planner.plan_equal_replicas(limit.keeping(_AFTER_EQUAL * whole.seconds)))
            known_maps = [one for one in made if one is not None]
            first = min(known_maps, key=partial(objective_value, problem), default=None)
        if first is not None and is_proven_optimal(problem, first):
            spread = distribute_spare(problem, segments, SpareCapacity(problem, segments, limit), first)
            settled = planner.settle(spread)
            return first if settled.unplaced else replace(settled, found_by=first.found_by)
        if first is not None and limit.is_over:
            return replace(self._first_plan(problem, segments, first, whole, quick), stopped=True)
        split = self._place_split(problem, segments, first, whole, quick)
        found = planner.plan(split, lambda known, rates: self._solve_pooled(problem, known, rates, limit))
        return found if first is None else choose_better(problem, found, first)

    def _solve_pooled(
        self, problem: Problem, known: PooledSegments, rates: Mapping[str, float], limit: Limit
    ) -> tuple[PlacedGpu, ...]:
        """Return the devices the program takes for demands at these rates."""
        asked = raise_demands(problem.demands, rates)
        return place_by_program(problem, known, asked, limit, fair=self.fair)

    def _place_split(
        self, problem: Problem, segments: Segments, known: Placement | None, whole: Limit, quick: QuickPolicies
    ) -> Placement:
        """Return the placement of replicas with streams of their own; with a limit at least as good as a known
        placement.
        """
        if whole.seconds is None:
            *_, plan = self._improving_plans(problem, segments, whole)
            return plan
        wanted = not self.fair and is_of_few_classes(problem, segments)
        first = plan = self._first_plan(problem, segments, known, whole, quick)
        limit = whole.keeping(_FOR_REST * whole.seconds if known is not None or wanted else whole.spent_s)
        if wanted:  # in any case: a map of classes takes a second or two of processor time
            first = plan = self._search_classes(problem, segments, first, limit)
        if limit.is_over:
            return replace(first, stopped=True)
        with problem.limits.until(limit), suppress(TimeUpError):
            for improved in self._improving_plans(problem, segments, limit):
                plan = improved
        if not limit.is_over:
            return choose_better(problem, plan, first)
        if known is None and not whole.is_over and not is_of_few_classes(problem, segments):
            first = min(first, make_quick_plan(problem, segments, whole), key=lambda one: objective_value(problem, one))
        return replace(choose_better(problem, plan, first), stopped=True)

    def _search_classes(self, problem: Problem, segments: Segments, first: Placement, limit: Limit) -> Placement:
        """Return the better of a map and a map from patterns of similar demands, with a bound."""
        gpus = place_classes(problem, segments, first.gpus, limit)
        if gpus is not None:
            first = update_incumbent(problem, first, _as_placement(problem, segments, gpus), "patterns of classes")
        return first if first.unplaced else bound_classes(problem, segments, first, limit)

    def _first_plan(
        self, problem: Problem, segments: Segments, known: Placement | None, limit: Limit, quick: QuickPolicies
    ) -> Placement:
        """Return the best heuristic map, the fallback for every later map, however short the time is.

        Under the queueing model the quick plan comes first, and slower policies have a quarter of the time; with a
        latency budget, where they are quicker than the quick plan, they come first.
        """
        best = known
        if best is None and problem.options.latency_budget is None:
            best = make_quick_plan(problem, segments, limit)
        alike = is_of_few_classes(problem, segments)
        kept = _FOR_CLASSES if alike else 0.0 if best is None else _FOR_SEARCH
        until = limit.keeping(kept * ((limit.seconds if known is None else limit.left_s) or 0.0))
        for heuristic in quick.run(problem, until):
            named = replace(heuristic, policy="optimal", found_by=heuristic.policy)
            if not (self.fair and heuristic.unplaced):  # more goodput is not fairer
                best = named if best is None else update_incumbent(problem, best, named, heuristic.policy)
        if best is not None and problem.options.latency_budget is None:
            return clip_bounds(problem, best)
        if best is not None and alike and not best.unplaced and not self.fair:
            return best  # its bound comes with the search by classes
        if best is not None and limit.is_over:
            few = alike or len(problem.demands) <= MOST_BOUNDED  # with many demands the bound takes longer than the map
            return clip_bounds(problem, with_cost_bound(problem, segments, best, limit) if few else best)
        first = make_quick_plan(problem, segments, limit)
        return clip_bounds(
            problem, first if best is None else update_incumbent(problem, first, best, str(best.found_by))
        )

    def _improving_plans(self, problem: Problem, segments: Segments, limit: Limit) -> Iterator[Placement]:
        """Yield the plan, then the plan with spare capacity distributed, then the best of these and the running map."""
        planned = self._plan(problem, segments, limit)
        yield planned
        spare = SpareCapacity(problem, segments, limit)
        spread = distribute_spare(problem, segments, spare, planned)
        yield spread
        if problem.previous is None:
            return
        kept = []
        with suppress(TimeUpError):
            for one in self._keep_running(problem, segments, planned, limit):
                kept.append(distribute_spare(problem, segments, spare, one))
        yield choose_least_risky(problem, spare, [*kept, spread])

    def _plan(self, problem: Problem, segments: Segments, limit: Limit) -> Placement:
        """Return the placement without regard to a running map."""
        planned = plan_by_program(problem, segments, limit, fair=self.fair)
        choose = self._find_fairest if self.fair else self._find_best
        try:
            return choose(problem, segments, planned, limit)
        except TimeUpError:
            return clip_bounds(problem, planned.placement)

    def _find_best(self, problem: Problem, segments: Segments, planned: ProgramPlan, limit: Limit) -> Placement:
        """Return the best of the program's map, the maps from patterns, and the quick policies' maps, improved."""
        best = planned.placement
        if planned.whole and is_proven_optimal(problem, best):
            return best
        search = PatternSearch(problem, planned.demands, segments, limit)
        if search.is_worth_trying:
            best = _search_patterns(problem, segments, best, search)
        if not (best.found_by and is_proven_optimal(problem, best)):
            best = self._improve(problem, segments, planned, best, search)
        if limit.seconds is None and not best.unplaced and is_of_few_classes(problem, segments):
            best = self._bound_classes(problem, segments, best)
        return clip_bounds(problem, best)

    def _bound_classes(self, problem: Problem, segments: Segments, best: Placement) -> Placement:
        """Return a placement with the higher of its bounds and the bound of its classes."""
        bounded, known = bound_classes(problem, segments, best, Limit()), best.lower_bound_cost_per_hour
        return bounded if known is None else raise_bounds(problem, bounded, known)

    def _find_fairest(self, problem: Problem, segments: Segments, planned: ProgramPlan, limit: Limit) -> Placement:
        """Return the cheapest map serving everything, else the map serving the least-served demand best."""
        placement = planned.placement
        if placement.lower_bound_cost_per_hour is not None:
            best = self._find_best(problem, segments, planned, limit)
            if not best.unplaced:
                return best
        search = PatternSearch(problem, planned.demands, segments, limit)
        if search.is_worth_trying:
            other = _as_placement(problem, segments, search.maximise_goodput_of_patterns(fair=True))
            if unfairness(problem, other) < unfairness(problem, placement):
                return replace(placement, gpus=other.gpus, unplaced=other.unplaced, found_by="patterns")
        return placement

    def _improve(
        self, problem: Problem, segments: Segments, planned: ProgramPlan, best: Placement, search: PatternSearch
    ) -> Placement:
        """Return the best of the program's map and the quick policies' maps, improved."""
        with suppress(TimeUpError):
            for name, one in self._other_maps(problem, segments, planned, search.limit):
                best = update_incumbent(problem, best, one, name)
                if is_proven_optimal(problem, best):
                    break
        return best

    def _other_maps(
        self, problem: Problem, segments: Segments, planned: ProgramPlan, limit: Limit
    ) -> Iterator[tuple[str, Placement]]:
        """Yield the maps of the program and the quick policies, plain and improved, and a map of classes."""
        local_search = LocalSearch(problem, segments, limit)
        quick = sorted(run_portfolio(problem, limit), key=lambda one: objective_value(problem, one))
        if quick and is_of_few_classes(problem, segments):
            gpus = place_classes(problem, segments, quick[0].gpus, limit)
            if gpus is not None:
                yield "patterns of classes", _as_placement(problem, segments, gpus)
        for position, placement in enumerate(chain(quick[:_IMPROVED], [planned.placement], quick[_IMPROVED:])):
            name = placement.policy.replace("optimal", "program")
            yield name, placement
            if position < _IMPROVED or placement.policy == "optimal":
                improved = _as_placement(problem, segments, local_search.improve(placement.gpus))
                yield f"{name}, improved", improved

    def _keep_running(
        self, problem: Problem, segments: Segments, planned: Placement, limit: Limit
    ) -> Iterator[Placement]:
        """Yield the running map with its remainder placed, replanning as many devices as make it cost no more.

        The remainder may need a further device it does not fill, while others have capacity that does not fit it.
        The number of replanned devices is doubled until it suffices, and then bisected.
        """
        if problem.previous is None:
            return
        too_few, enough, freed = -1, None, 0
        while freed != too_few and not limit.is_over:
            old = make_warm_start(problem, segments, problem.previous, freed)
            if old is None:
                return
            added = () if old.rest is None else self._plan(old.rest, Segments(old.rest), limit).gpus
            kept = with_unplaced(problem, segments, replace(planned, gpus=(*old.gpus, *added), unplaced=()))
            yield kept
            if not old.gpus or objective_value(problem, kept) <= objective_value(problem, planned):
                enough = freed
            else:
                too_few = freed
            freed = (2 * freed or 1) if enough is None else (too_few + enough) // 2


def _prune(problem: Problem, whole: Limit) -> PrunedFleet:
    return prune_fleet(problem, whole.keeping(_AFTER_PRUNING * (whole.seconds or 0.0)))


def _search_patterns(problem: Problem, segments: Segments, best: Placement, search: PatternSearch) -> Placement:
    """Return the best of a map and the maps from patterns, with a bound if the search is exact."""
    exact = search.exact() if best.lower_bound_cost_per_hour is not None else None
    if exact is not None:
        made = _as_placement(problem, segments, exact.gpus)
        best = raise_bounds(problem, update_incumbent(problem, best, made, "all patterns"), exact.bound)
    if best.unplaced:
        best = update_incumbent(
            problem, best, _as_placement(problem, segments, search.maximise_goodput_of_patterns(fair=False)), "patterns"
        )
    return best


def _as_placement(problem: Problem, segments: Segments, gpus: tuple[PlacedGpu, ...]) -> Placement:
    return with_unplaced(problem, segments, Placement("optimal", gpus))
