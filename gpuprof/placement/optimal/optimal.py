"""The cheapest placement, or on a fleet that is too small the one of most goodput, with a bound that proves it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

from gpuprof.domain.demand import Demand
from gpuprof.placement.cover import MOST_REPLICAS, Cover, shared_out
from gpuprof.placement.fleet_bins import FleetBins
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.assembled import Assembled, Assembler
from gpuprof.placement.optimal.carry import carried, evened
from gpuprof.placement.optimal.cheapest import cheapest, cheapest_of
from gpuprof.placement.optimal.goodput import maximise_goodput, most_goodput
from gpuprof.placement.optimal.hasty import hasty
from gpuprof.placement.optimal.headroom import slowed
from gpuprof.placement.optimal.improve import Improver
from gpuprof.placement.optimal.least_cost import with_least_cost
from gpuprof.placement.optimal.master import Choice, classes_of
from gpuprof.placement.optimal.offers import Choices, Offers
from gpuprof.placement.optimal.pooled import PooledPlanner, raise_demands
from gpuprof.placement.optimal.portfolio import portfolio, quick_maps
from gpuprof.placement.optimal.realise import realise
from gpuprof.placement.optimal.slack import Slack
from gpuprof.placement.optimal.tidy import tidied
from gpuprof.placement.optimal.worth import better, bounded, is_proven, raised, unfairness, worth
from gpuprof.placement.placement import PlacedGpu, Placement
from gpuprof.placement.pooled_segment import PooledSegments
from gpuprof.placement.problem import Problem
from gpuprof.placement.seating import seated
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.whynot import with_unplaced

#: So many of the quick policies' maps, the best first, are improved, beside the program's own.
_IMPROVED = 3
#: Times as slow as alone, as which models are planned where neighbours kept the program from its bound.
_HEADROOM = (1.25, 1.6)
#: Part of a time limit that the quick policies leave to the search where each question takes a queue to be solved.
_FOR_SEARCH = 0.75
#: Of more demands no such maps are made: each takes as long as the program itself.
_MOST_SLOWED = 20


@dataclass(frozen=True, slots=True)
class Optimal:
    """Decides batch, processes, replicas, shares and places together, by the integer program `Master`.

    Of every share the segment of largest capacity is considered; that is enough, since what a share costs does not
    depend on what runs in it. Demands that can all be met are met at the least cost; else as much as possible is
    served, higher priorities first, and that at the least cost. The lower bounds hold for every placement in what is on
    the `Menu`, which all policies obey; of demands that fill more than a hundred devices only in the listed shares.
    That program knows of no neighbours: interference and memory among models that share a room are seen when the chosen
    segments are put into it. Where the result is then above the bound, few demands are combined anew with regard to
    what they do to one another (`Assembler`): where all that can stand together can be listed, the map is the best
    there is and the bound that of the program over it; elsewhere the best of many combinations is kept, and the quick
    policies' maps (`portfolio`) and the program's for slower models, which leave room to be disturbed, are improved
    room by room (`Improver`). The best is taken; the map's ``found_by`` says which.
    What is left over goes to the least sure estimates (`Slack`), and what runs already stays where
    an equally good map leaves it.

    Attributes
    ----------
    fair : bool
        Where not everything can be served, serve the least-served demand first: maximise the smallest served
        fraction, then the goodput.
    pooled : bool
        Count on the router, which gives a request to whichever replica answers first; else every replica is planned
        with a Poisson stream of its own, which takes more devices and bounds only such plans.
    """

    fair: bool = False
    pooled: bool = True

    def place(self, problem: Problem) -> Placement:
        """Return the placement; see `gpuprof.placement.policies.Policy`.

        With a time limit the quick policies' plans are made first, of which none is lost, and a hasty one; as much
        time as they took is kept back for what is done with the plan afterwards. By queues, the plan for streams of
        their own is where those of pools begin.
        """
        whole, segments = Limit(problem.options.time_limit_s), Segments(problem)
        split = self._place_split(problem, segments, whole)
        if not self.pooled or problem.options.latency_budget is not None:
            return split
        planner = PooledPlanner(problem, segments, whole, fair=self.fair)
        return planner.plan(split, lambda known, rates: self._solve_pooled(problem, known, rates, whole))

    def _solve_pooled(
        self, problem: Problem, known: PooledSegments, rates: Mapping[str, float], limit: Limit
    ) -> tuple[PlacedGpu, ...]:
        """Return the devices that the program takes for demands at these rates."""
        choices = Offers(problem, known).sure()
        asked = raise_demands(problem.demands, rates)
        able = [_within_reach(one, choices[one.model]) for one in asked if choices[one.model]]
        classes = classes_of(able, choices)
        choice = cheapest_of(problem, classes, limit) or maximise_goodput(problem, classes, limit, fair=self.fair)
        return _realised(problem, known, choices, _covers(able, choices, choice), choice)[0]

    def _place_split(self, problem: Problem, segments: Segments, whole: Limit) -> Placement:
        """Return the placement of replicas with requests of their own."""
        if whole.seconds is None:
            *_, found = self._ever_better(problem, segments, whole)
            return found
        first = found = self._first(problem, segments, whole)
        limit = whole.keeping(whole.spent_s)
        if limit.is_over:
            return replace(first, stopped=True)
        with problem.limits.until(limit), suppress(TimeUpError):
            for one in self._ever_better(problem, segments, limit):
                found = one
        if not limit.is_over:
            return found
        if not whole.is_over:
            first = min(first, hasty(problem, segments, whole), key=lambda one: worth(problem, one))
        return replace(_best_of_two(problem, found, first), stopped=True)

    def _first(self, problem: Problem, segments: Segments, limit: Limit) -> Placement:
        """Return the best heuristic map, which no later one may be worse than, however short the time is.

        By queues the hasty plan comes first, and the quick policies have a quarter of the time; by a latency budget,
        where they are quicker than it, they come first.
        """
        best = None if problem.options.latency_budget is not None else hasty(problem, segments, limit)
        quick = limit if best is None else limit.keeping(_FOR_SEARCH * (limit.seconds or 0.0))
        for one in quick_maps(problem, quick):
            named = replace(one, policy="optimal", found_by=one.policy)
            if not (self.fair and one.unplaced):  # more goodput is not fairer
                best = named if best is None else better(problem, best, named, one.policy)
        if best is not None and problem.options.latency_budget is None:
            return bounded(problem, best)
        if best is not None and limit.is_over:
            few = len(problem.demands) <= _MOST_SLOWED  # of many the bound takes longer than the map
            return bounded(problem, with_least_cost(problem, segments, best) if few else best)
        first = hasty(problem, segments, limit)
        return bounded(problem, first if best is None else better(problem, first, best, str(best.found_by)))

    def _ever_better(self, problem: Problem, segments: Segments, limit: Limit) -> Iterator[Placement]:
        """Yield the plan, then with its slack spread, then of these and what runs already what moves fewest."""
        planned = self._planned(problem, segments, limit)
        yield planned
        slack = Slack(problem, segments, limit)
        spread = _spread(problem, segments, slack, planned)
        yield spread
        if problem.previous is None:
            return
        kept = []
        with suppress(TimeUpError):
            for one in self._kept(problem, segments, planned, limit):
                kept.append(_spread(problem, segments, slack, one))
        yield _preferred(problem, slack, [*kept, spread])

    def _planned(self, problem: Problem, segments: Segments, limit: Limit) -> Placement:
        """Return the placement as if nothing ran yet."""
        planned = self._program(problem, segments, limit)
        choose = self._fairest if self.fair else self._best
        try:
            return choose(problem, segments, planned, limit)
        except TimeUpError:
            return bounded(problem, planned.placement)

    def _program(self, problem: Problem, segments: Segments, limit: Limit) -> _Planned:
        """Return what the integer program that knows of no neighbours makes of the problem."""
        offers = Offers(problem, segments)
        choices = offers.sure()
        demands = [_within_reach(d, choices[d.model]) for d in problem.demands if choices[d.model]]
        found = cheapest(problem, demands, offers, limit)
        choice, choices = found.choice, found.choices
        fixed = all(entry.count is not None for entry in problem.fleet.entries)
        if choice is None and demands and not limit.is_over:
            choices = offers.listed()
            choice = maximise_goodput(problem, classes_of(demands, choices), limit, fair=self.fair)
        gpus, whole = _realised(problem, segments, choices, _covers(demands, choices, choice), choice)
        placed = Placement("optimal", gpus, (), found.gpus, found.cost_per_hour)
        if fixed:
            most = sum(demand.rate_rps for demand in demands)
            if found.choice is None:
                most = most_goodput(problem, demands, classes_of(demands, offers.hoped(demands)), limit)
            placed = replace(placed, upper_bound_goodput_rps=most)
        return _Planned(with_unplaced(problem, segments, placed), whole, tuple(demands))

    def _best(self, problem: Problem, segments: Segments, planned: _Planned, limit: Limit) -> Placement:
        """Return the best of the program's map, those assembled from rooms, and the quick policies' maps, improved."""
        best = planned.placement
        if planned.whole and is_proven(problem, best):
            return best
        assembler = Assembler(problem, planned.demands, segments, limit)
        if assembler.is_worth_trying:
            best = _assembled(problem, segments, best, assembler)
        if not (best.found_by and is_proven(problem, best)):
            best = self._improved(problem, segments, planned, best, assembler)
        return bounded(problem, best)

    def _fairest(self, problem: Problem, segments: Segments, planned: _Planned, limit: Limit) -> Placement:
        """Return the cheapest map that serves all, or where none does the one that serves the least served best."""
        found = planned.placement
        if found.lower_bound_cost_per_hour is not None:
            best = self._best(problem, segments, planned, limit)
            if not best.unplaced:
                return best
        assembler = Assembler(problem, planned.demands, segments, limit)
        if assembler.is_worth_trying:
            other = _of(problem, segments, assembler.fullest(fair=True))
            if unfairness(problem, other) < unfairness(problem, found):
                return replace(found, gpus=other.gpus, unplaced=other.unplaced, found_by="rooms")
        return found

    def _improved(
        self, problem: Problem, segments: Segments, planned: _Planned, best: Placement, assembler: Assembler
    ) -> Placement:
        """Return the best of a map, the program's with room to be disturbed, and the quick policies', improved."""
        with suppress(TimeUpError):
            for name, one in self._others(problem, segments, planned, assembler):
                best = better(problem, best, one, name)
                if is_proven(problem, best):
                    break
        return best

    def _others(
        self, problem: Problem, segments: Segments, planned: _Planned, assembler: Assembler
    ) -> Iterator[tuple[str, Placement]]:
        """Yield the maps of the program and the quick policies, as they are and improved, and one of all rooms."""
        limit = assembler.limit
        improver = Improver(problem, segments, limit)
        quick = sorted(portfolio(problem, limit), key=lambda one: worth(problem, one))
        own = chain([planned.placement], self._with_headroom(problem, segments, planned.demands, limit))
        maps = []
        for position, one in enumerate(chain(quick[:_IMPROVED], own, quick[_IMPROVED:])):
            maps.append(one)
            name = one.policy.replace("optimal", "program")
            yield name, one
            if position < _IMPROVED or one.policy == "optimal":
                maps.append(_of(problem, segments, improver.improved(one.gpus)))
                yield f"{name}, improved", maps[-1]
        mixed = assembler.recombined([one.gpus for one in maps]) if assembler.is_worth_trying else None
        if mixed is not None:
            yield "rooms of several maps", _of(problem, segments, mixed.gpus)

    def _with_headroom(
        self, problem: Problem, segments: Segments, demands: Sequence[Demand], limit: Limit
    ) -> Iterator[Placement]:
        """Yield the program's maps for slower models, which leaves room to disturb."""
        for factor in _HEADROOM if len(demands) <= _MOST_SLOWED else ():
            if limit.is_over:
                return
            slow = slowed(problem, factor)
            known = Segments(slow)
            choices = Offers(slow, known).sure()
            able = [_within_reach(one, choices[one.model]) for one in demands if choices[one.model]]
            classes = classes_of(able, choices)
            choice = cheapest_of(slow, classes, limit) or maximise_goodput(slow, classes, limit, fair=self.fair)
            gpus, _ = _realised(slow, known, choices, _covers(able, choices, choice), choice)
            yield with_unplaced(problem, segments, Placement("optimal", gpus))

    def _kept(self, problem: Problem, segments: Segments, planned: Placement, limit: Limit) -> Iterator[Placement]:
        """Yield what runs and what it leaves to be placed, with as many devices planned anew as make it cost no more.

        What is left may need a further device that it does not fill, while others have room that does not fit it. How
        many are planned anew is doubled until that is enough, and then bisected.
        """
        if problem.previous is None:
            return
        too_few, enough, freed = -1, None, 0
        while freed != too_few and not limit.is_over:
            old = carried(problem, segments, problem.previous, freed)
            if old is None:
                return
            added = () if old.rest is None else self._planned(old.rest, Segments(old.rest), limit).gpus
            kept = with_unplaced(problem, segments, replace(planned, gpus=(*old.gpus, *added), unplaced=()))
            yield kept
            if not old.gpus or worth(problem, kept) <= worth(problem, planned):
                enough = freed
            else:
                too_few = freed
            freed = (2 * freed or 1) if enough is None else (too_few + enough) // 2


@dataclass(frozen=True, slots=True)
class _Planned:
    """The program's placement, whether all that it chose found its room, and the demands that it regarded."""

    placement: Placement
    whole: bool
    demands: tuple[Demand, ...]


def _assembled(problem: Problem, segments: Segments, best: Placement, assembler: Assembler) -> Placement:
    """Return the best of a map and those that are assembled from furnished rooms, with a bound if that is exact."""
    for name, one in _of_all(assembler) if best.lower_bound_cost_per_hour is not None else ():
        best = raised(problem, better(problem, best, _of(problem, segments, one.gpus), name), one.bound)
        if is_proven(problem, best):
            return best
    if best.unplaced:
        best = better(problem, best, _of(problem, segments, assembler.fullest(fair=False)), "rooms")
    return best


def _of_all(assembler: Assembler) -> Iterator[tuple[str, Assembled]]:
    """Yield the maps that serve all demands, with the names by which they are known."""
    exact = assembler.exact()
    if exact is not None:
        yield "all that can stand together", exact
    elif not assembler.is_exact:
        for one in assembler.phases():
            yield "rooms", one


def _of(problem: Problem, segments: Segments, gpus: tuple[PlacedGpu, ...]) -> Placement:
    return with_unplaced(problem, segments, Placement("optimal", gpus))


def _best_of_two(problem: Problem, found: Placement, first: Placement) -> Placement:
    """Return the better of what was searched for and the hasty plan, with the higher bound on the cost."""
    best = better(problem, found, first, str(first.found_by))
    if best.unplaced or first.unplaced or first.lower_bound_cost_per_hour is None:
        return best
    if best.lower_bound_cost_per_hour is None:
        bounds = (first.lower_bound_gpus, first.lower_bound_cost_per_hour)
        best = replace(best, lower_bound_gpus=bounds[0], lower_bound_cost_per_hour=bounds[1])
    return bounded(problem, best)


def _spread(problem: Problem, segments: Segments, slack: Slack, placement: Placement) -> Placement:
    """Return the placement with what is left over given to the least sure, and rates by what replicas then can do."""
    gpus = slack.spread(placement.gpus)
    return replace(placement, gpus=gpus if placement.unplaced else evened(problem, segments, gpus))


def _within_reach(demand: Demand, segments: Sequence[Segment]) -> Demand:
    """Return the demand lowered to what its allowed number of replicas can serve at most."""
    most = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
    reach = most * max(segment.capacity_rps for segment in segments)
    return demand if demand.rate_rps <= reach else replace(demand, rate_rps=reach)


def _realised(
    problem: Problem, segments: Segments, choices: Choices, covers: Mapping[str, Cover], choice: Choice | None
) -> tuple[tuple[PlacedGpu, ...], bool]:
    """Return the devices that a choice takes, and whether all that it chose found its room on them."""
    bins = FleetBins(problem, segments)
    left = choice is None or realise(covers, choice, segments, bins)
    return tidied(problem, segments, choices, bins.placed()), not left


def _covers(demands: Sequence[Demand], choices: Choices, choice: Choice | None) -> dict[str, Cover]:
    covers: dict[str, Cover] = {}
    for demand in demands:
        if choice is None:
            break
        counts = choice.covers[demand.model]
        chosen = [s for s, count in zip(choices[demand.model], counts, strict=True) for _ in range(count)]
        if chosen:
            covers[demand.model] = shared_out(demand.rate_rps, chosen)
    return covers


def _preferred(problem: Problem, slack: Slack, placements: Sequence[Placement]) -> Placement:
    """Return what serves most, else costs least, else leaves least in doubt, else moves fewest replicas."""
    devices = {entry.device.name: entry.device for entry in problem.fleet.entries}

    def rank(one: Placement) -> tuple[object, ...]:
        moves = 0 if problem.previous is None else seated(one.gpus, problem.previous, devices).moves
        return *worth(problem, one), round(slack.worst_doubt(one.gpus), 1), moves

    return min(placements, key=rank)
