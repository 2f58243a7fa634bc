"""The cheapest placement, or on a fleet that is too small the placement with the most goodput, with a bound."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuprof.placement.limit import Limit
from gpuprof.placement.optimal.incumbent import raise_by_work
from gpuprof.placement.optimal.measured_first import restrict_to_measured
from gpuprof.placement.optimal.search import Search
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.time_sharing import list_shareable, share_workers
from gpuprof.placement.unplaced_reasons import with_reasons


@dataclass(frozen=True, slots=True)
class Optimal:
    """Optimises batches, processes, replicas, shares and devices together, by an integer program and a local search.

    Every share of the search space is considered with its best batch, and where memory may not suffice also batches
    with less memory (`CandidateSegments`). Demands that can all be met are met at the least cost; otherwise as much as
    possible is served, higher priorities first, at the least cost. A first fit on one kind of device gives a map at
    once. The program ignores neighbours, so its map and a map of patterns with neighbours (`CuttingStock`) are improved
    by a local search that sees neighbours and pools. The search ends where a map costs no more than the lower bound,
    which holds for every map in the `SearchSpace`, which all policies obey. Spare capacity goes to the least certain
    estimates (`SpareCapacity`), and running replicas stay where an equally good map allows.
    """

    #: Serve the least-served demand first where not everything can be served: maximise the smallest served fraction,
    #: then the goodput.
    fair: bool = False
    #: Assume a router that gives a request to the replica that answers first. Otherwise every replica is planned with a
    #: Poisson stream of its own, which takes more devices.
    pooled: bool = True

    def place(self, problem: Problem) -> Placement:
        """Return the placement; see `gpuprof.placement.policies.Policy`.

        Maps of measured figures alone come first: extrapolated shares are only used where they make a cheaper map.
        """
        limit, incumbent = Limit(problem.options.time_limit_s), None
        limit = limit.with_least((limit.seconds or 0.0) / 2.0)  # where other programs occupy the processors
        is_shared = bool(list_shareable(problem))
        search_limit = limit.keeping((limit.seconds or 0.0) / 4.0) if is_shared else limit
        plain_problem = replace(problem, options=replace(problem.options, explains=False))
        measured = None if problem.previous is not None else restrict_to_measured(plain_problem)
        if measured is not None:
            first_limit = search_limit.keeping((search_limit.seconds or 0.0) / 2.0)
            incumbent = self._make_search(measured, first_limit, with_bound=False).find_map()
        start = None if incumbent is None or incumbent.unplaced else incumbent
        # Bounds of maps without shared workers do not hold with them.
        incumbent = self._make_search(plain_problem, search_limit, start, with_bound=not is_shared).find_map()
        incumbent = raise_by_work(problem, share_workers(problem, incumbent, limit))
        return with_reasons(problem, incumbent, limit)

    def _make_search(
        self, problem: Problem, limit: Limit, start: Placement | None = None, *, with_bound: bool
    ) -> Search:
        is_pooled = self.pooled and problem.options.latency_budget is None
        return Search(problem, limit, is_pooled=is_pooled, fair=self.fair, start=start, with_bound=with_bound)
