"""The cheapest placement, or on a fleet that is too small the one of most goodput, with a bound that proves it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpuprof.demand import Demand
from gpuprof.placement.cover import MOST_REPLICAS, Cover, shared_out
from gpuprof.placement.fleet_bins import FleetBins
from gpuprof.placement.optimal.carry import carried, evened
from gpuprof.placement.optimal.cheapest import cheapest
from gpuprof.placement.optimal.goodput import maximise_goodput, most_goodput
from gpuprof.placement.optimal.improve import Improver
from gpuprof.placement.optimal.limit import Limit
from gpuprof.placement.optimal.master import Choice, classes_of
from gpuprof.placement.optimal.offers import Choices, Offers
from gpuprof.placement.optimal.portfolio import portfolio
from gpuprof.placement.optimal.realise import realise
from gpuprof.placement.optimal.slack import Slack
from gpuprof.placement.optimal.tidy import tidied
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.seating import seated
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.whynot import with_unplaced

#: What a placement may fall short of its bound and still count as the best there is.
_NEARLY = 1e-3
#: So many of the quick policies' maps, the best first, are improved, beside the program's own.
_IMPROVED = 3
#: Parts of their SLOs within which models are planned alone, where neighbours kept the program from its bound.
_HEADROOM = (0.7,)
#: Of more demands no such maps are made: each takes as long as the program itself.
_MOST_TIGHTENED = 20


@dataclass(frozen=True, slots=True)
class Optimal:
    """Decides batch, processes, replicas, shares and places together, by the integer program `Master`.

    Of every share the segment of largest capacity is considered; that is enough, since what a share costs does not
    depend on what runs in it. Demands that can all be met are met at the least cost; else as much as possible is
    served, higher priorities first, and that at the least cost. The lower bounds hold for every placement in what is on
    the `Menu`, which all policies obey; of demands that fill more than a hundred devices only in the listed shares.
    Interference and memory among models that share a room are seen when the chosen segments are put into it. Where the
    result is then above the bound, the quick policies' maps are made too (`portfolio`), and the program's for tighter
    SLOs, which leave room to be disturbed; they are improved
    room by room with regard to neighbours (`Improver`), and the best is taken; the map's ``found_by`` says which.
    What is left over goes to the least sure estimates (`Slack`), and what runs already stays where
    an equally good map leaves it.

    Attributes
    ----------
    fair : bool
        Where not everything can be served, serve the least-served demand first: maximise the smallest served
        fraction, then the goodput.
    """

    fair: bool = False

    def place(self, problem: Problem) -> Placement:
        """Return the placement; see `gpuprof.placement.policies.Policy`."""
        limit = Limit(problem.options.time_limit_s)
        segments = Segments(problem)
        planned = self._planned(problem, segments, limit)
        slack = Slack(problem, segments, limit)
        spread = _spread(problem, segments, slack, planned)
        if problem.previous is None:
            return spread
        kept = self._kept(problem, segments, spread, limit)
        return spread if kept is None else _preferred(problem, slack, _spread(problem, segments, slack, kept), spread)

    def _planned(self, problem: Problem, segments: Segments, limit: Limit) -> Placement:
        """Return the placement as if nothing ran yet."""
        found, whole = self._program(problem, segments, limit)
        return found if self.fair else self._best(problem, segments, found, limit, proven=whole)

    def _program(self, problem: Problem, segments: Segments, limit: Limit) -> tuple[Placement, bool]:
        """Return the integer program's placement, and whether all that it chose found its room."""
        offers = Offers(problem, segments)
        choices = offers.sure()
        demands = [_within_reach(d, choices[d.model]) for d in problem.demands if choices[d.model]]
        found = cheapest(problem, demands, offers, limit)
        choice, choices = found.choice, found.choices
        fixed = all(entry.count is not None for entry in problem.fleet.entries)
        if choice is None and demands and not limit.is_over:
            choices = offers.listed()
            choice = maximise_goodput(problem, classes_of(demands, choices), limit, fair=self.fair)
        bins = FleetBins(problem, segments)
        left = choice is None or realise(_covers(demands, choices, choice), choice, segments, bins)
        placed = Placement(
            "optimal", tidied(problem, segments, choices, bins.placed()), (), found.gpus, found.cost_per_hour
        )
        if fixed:
            most = sum(demand.rate_rps for demand in demands)
            if found.choice is None:
                most = most_goodput(problem, demands, classes_of(demands, offers.hoped(demands)), limit)
            placed = replace(placed, upper_bound_goodput_rps=most)
        return with_unplaced(problem, segments, placed), not left

    def _best(self, problem: Problem, segments: Segments, found: Placement, limit: Limit, *, proven: bool) -> Placement:
        """Return the best of the program's map and the quick policies' maps, each of them improved."""
        if proven and _is_proven(problem, found):
            return found
        improver = Improver(problem, segments, limit)
        quick = sorted(portfolio(problem, limit), key=lambda one: _worth(problem, one))
        own = [found, *self._with_headroom(problem, segments, limit)]
        best = found
        for position, one in enumerate((*quick[:_IMPROVED], *own, *quick[_IMPROVED:])):
            gpus = improver.improved(one.gpus) if position < _IMPROVED + len(own) else one.gpus
            changed = with_unplaced(problem, segments, replace(one, gpus=gpus, unplaced=()))
            for name, candidate in ((one.policy, one), (f"{one.policy}, improved", changed)):
                if _worth(problem, candidate) < _worth(problem, best):
                    origin = name.replace("optimal", "program")
                    best = replace(found, gpus=candidate.gpus, unplaced=candidate.unplaced, found_by=origin)
            if _is_proven(problem, best):
                break
        return _bounded(problem, best)

    def _with_headroom(self, problem: Problem, segments: Segments, limit: Limit) -> Iterator[Placement]:
        """Yield the program's maps for tighter SLOs: they keep the given ones by far, which leaves room to disturb."""
        for factor in _HEADROOM if len(problem.demands) <= _MOST_TIGHTENED else ():
            if limit.is_over:
                return
            tight = replace(problem, demands=tuple(_tightened(demand, factor) for demand in problem.demands))
            found, _ = self._program(tight, Segments(tight), limit)
            yield with_unplaced(problem, segments, replace(found, unplaced=()))

    def _kept(self, problem: Problem, segments: Segments, planned: Placement, limit: Limit) -> Placement | None:
        """Return what runs with as much beside it as it leaves to be placed, None where it cannot go on running."""
        old = None if problem.previous is None else carried(problem, segments, problem.previous)
        if old is None:
            return None
        added = () if old.rest is None else self._planned(old.rest, Segments(old.rest), limit).gpus
        return with_unplaced(problem, segments, replace(planned, gpus=(*old.gpus, *added), unplaced=()))


def _spread(problem: Problem, segments: Segments, slack: Slack, placement: Placement) -> Placement:
    """Return the placement with what is left over given to the least sure, and rates by what replicas then can do."""
    gpus = slack.spread(placement.gpus)
    return replace(placement, gpus=gpus if placement.unplaced else evened(problem, segments, gpus))


def _tightened(demand: Demand, factor: float) -> Demand:
    return replace(demand, slo=replace(demand.slo, latency_ms=demand.slo.latency_ms * factor))


def _within_reach(demand: Demand, segments: Sequence[Segment]) -> Demand:
    """Return the demand lowered to what its allowed number of replicas can serve at most."""
    most = min(demand.max_replicas or MOST_REPLICAS, MOST_REPLICAS)
    reach = most * max(segment.capacity_rps for segment in segments)
    return demand if demand.rate_rps <= reach else replace(demand, rate_rps=reach)


def _covers(demands: Sequence[Demand], choices: Choices, choice: Choice) -> dict[str, Cover]:
    covers = {}
    for demand in demands:
        counts = choice.covers[demand.model]
        chosen = [s for s, count in zip(choices[demand.model], counts, strict=True) for _ in range(count)]
        if chosen:
            covers[demand.model] = shared_out(demand.rate_rps, chosen)
    return covers


def _is_proven(problem: Problem, placement: Placement) -> bool:
    """Whether no placement is better than this one, or in large fleets by next to nothing."""
    if placement.unplaced:
        served, most = sum(placement.rates_rps().values()), placement.upper_bound_goodput_rps
        return most is not None and served >= most * (1.0 - _NEARLY)
    bound = placement.lower_bound_cost_per_hour
    return bound is not None and _cost(problem, placement) <= bound * (1.0 + _NEARLY) + 1e-9


def _bounded(problem: Problem, placement: Placement) -> Placement:
    """Return the placement with no bound that it contradicts itself: neighbours may even speed each other up."""
    if placement.unplaced:
        return placement
    cost, gpus = placement.lower_bound_cost_per_hour, placement.lower_bound_gpus
    return replace(
        placement,
        lower_bound_cost_per_hour=None if cost is None else min(cost, _cost(problem, placement)),
        lower_bound_gpus=None if gpus is None else min(gpus, len(placement.gpus)),
    )


def _preferred(problem: Problem, slack: Slack, kept: Placement, fresh: Placement) -> Placement:
    """Return what serves more, else costs less, else leaves less in doubt, else moves fewer replicas."""
    if problem.previous is None:
        return fresh
    devices = {entry.device.name: entry.device for entry in problem.fleet.entries}
    worth = {
        id(one): (
            *_worth(problem, one),
            round(slack.worst_doubt(one.gpus), 1),
            seated(one.gpus, problem.previous, devices).moves,
        )
        for one in (kept, fresh)
    }
    return fresh if worth[id(fresh)] < worth[id(kept)] else kept


def _worth(problem: Problem, placement: Placement) -> tuple[tuple[float, ...], float]:
    """Return what is better when it is less: what is not served, and the cost."""
    return _missing(problem, placement), round(_cost(problem, placement), 9)


def _missing(problem: Problem, placement: Placement) -> tuple[float, ...]:
    """Return what is not served, by falling priority, to a millionth of the rates; below its floor nothing is."""
    levels = sorted({demand.priority for demand in problem.demands}, reverse=True)
    missing = dict.fromkeys(levels, 0.0)
    for one in placement.unplaced:
        demand = problem.demand(one.model)
        useless = demand.rate_rps - one.rate_rps < (demand.min_goodput_rps or 0.0) * (1.0 - 1e-9)
        missing[demand.priority] += demand.rate_rps if useless else one.rate_rps
    total = sum(demand.rate_rps for demand in problem.demands)
    return tuple(round(missing[level] / total, 6) for level in levels)


def _cost(problem: Problem, placement: Placement) -> float:
    return sum(problem.entry(gpu.device).price_per_hour for gpu in placement.gpus)
