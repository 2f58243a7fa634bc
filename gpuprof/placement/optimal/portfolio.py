"""The maps of fast heuristics, from which `optimal` starts so that it is never worse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload, batch_times
from gpuprof.domain.interference_table import tabulate_interference
from gpuprof.domain.model_queues import queue_of
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import QuickQueueModel
from gpuprof.errors import GpuprofError, InputError
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.optimal.budget_plan import FOUND_BY, BudgetPlans
from gpuprof.placement.optimal.incumbent import objective_value
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import BUILTIN, make_policy
from gpuprof.placement.problem import Problem
from gpuprof.placement.segment import Segments

#: Policies whose time is proportional to the demands, fastest first; the last solves queues of several processes.
QUICKEST = "igniter"
_QUICK = (QUICKEST, "gslice", "gpulet", "ffd", "parvagpu")
#: Policies that give each model whole MIG instances; at half the SLO the first is the quickest and the second mostly
#: the best: these two come before the policies under the queueing model, the others after them.
_FOR_INSTANCES = ("parvagpu", "ffd")
_FIRST_BY_BUDGET = 2
#: Minimum processor time (s) of all policies together for few demands with predicted figures: without a map serving
#: everything, with such a map, and without a map where they simulate the processes of MIG instances.
_LEAST_S, _LEAST_BESIDE_S, _LEAST_FOR_INSTANCES_S = 3.0, 1.0, 4.5
#: With a latency budget, each quick policy takes milliseconds up to this number of demands, whatever the figures are.
_FEW = 20
#: With looked-up figures, all policies together take 20 to 30 ms a demand with a latency budget, 0.2 s under queueing.
_FEW_LOOKED_UP = 100
#: Policies that search, and their maximum number of demands.
_SEARCHING = {"usher": 30, "milp": 12}
#: Policies that query the tail of many shares and batches, with their maximum number of demands under queueing.
_ASKING = {"igniter": 100, "gslice": 100}
#: `milp` is a program over single devices.
_MOST_DEVICES = 12


def run_portfolio(problem: Problem, limit: Limit) -> Iterator[Placement]:
    """Yield the placements of the suitable built-in policies, until the time is up."""
    for name in (*_QUICK, *_SEARCHING):
        if name in BUILTIN and _is_meant_for(name, problem):
            options = replace(problem.options, time_limit_s=limit.left_s, explains=False)
            try:
                yield make_policy(name).place(replace(problem, options=options))
            except GpuprofError:
                continue  # unsuitable for the fleet or for the known figures of the models


@dataclass(slots=True)
class QuickPolicies:
    """Runs the policies whose time is proportional to the demands, and records those that a limit ended."""

    _done: set[str] = field(default_factory=set)  #: Not run again.
    _finished: set[str] = field(default_factory=set)
    _ended: dict[str, None] = field(default_factory=dict)  #: Names in order.

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The policies a time limit ended, whose maps may be better than every known map."""
        return tuple(self._ended)

    def run_quickest(self, problem: Problem) -> Placement | None:
        """Return the quickest policy's map for many demands under queueing; None where it takes more than seconds.

        A policy serving everything is not run again.
        """
        if (
            problem.options.latency_budget is not None
            or not _is_meant_for(QUICKEST, problem)
            or not has_fast_late_bounds(problem)
        ):
            return None
        with suppress(GpuprofError):
            placement = make_policy(QUICKEST).place(_without_limit(problem))
            if not placement.unplaced:
                self._done.add(QUICKEST)
            return placement
        return None

    def find_predicted(self, problem: Problem, limit: Limit, known: Placement | None) -> Placement | None:
        """Return the best map of few demands with predicted figures under queueing, None for other problems.

        For these the policies take seconds, within the limit or for a minimum time, so they come first. Where models
        were measured in MIG instances alone, maps of instances are mostly the best: two of these come first, at half
        the SLO, which takes a fraction of the time; the others come last. ``known``: a map serving everything.
        """
        many = len(problem.demands)
        if limit.seconds is None or problem.options.latency_budget is not None or many > _FEW:
            return None
        if _are_figures_measured(problem):
            return None
        best, least = None, min(entry.price_per_hour for entry in problem.fleet.entries)
        least_s = _LEAST_FOR_INSTANCES_S if _are_instances_measured(problem) else _LEAST_S
        until = limit.with_least(least_s if known is None else _LEAST_BESIDE_S)
        first = _plan_instances(problem, until, _FOR_INSTANCES[:_FIRST_BY_BUDGET])
        others = _plan_instances(problem, until, _FOR_INSTANCES[_FIRST_BY_BUDGET:])
        for made in chain(first, self.run(problem, until), others):
            best = made if best is None else min(best, made, key=partial(objective_value, problem))
            if not best.unplaced and objective_value(problem, best)[1] <= least * (1.0 + 1e-9):
                break  # no map is cheaper than a device
        return best

    def run(self, problem: Problem, limit: Limit) -> Iterator[Placement]:
        """Yield the placements of the policies, except for those already done.

        Quick policies are not stopped, however long they take on a busy machine: a user who ran one of them instead
        would wait as long, and the portfolio's map is better. The others run until the time is up.
        """
        looked_up = len(problem.demands) <= _FEW_LOOKED_UP and _are_figures_measured(problem)
        names: tuple[str, ...] = _QUICK
        if not looked_up and _are_instances_measured(problem):
            names = tuple(sorted(names, key=lambda name: name not in _FOR_INSTANCES))
        for name in names:
            if name in self._done or not _is_meant_for(name, problem):
                continue
            policy, until = make_policy(name), Limit() if looked_up or _is_quick(name, problem) else limit
            try:
                with problem.limits.until(until):
                    placement = policy.place(_without_limit(problem))
            except TimeUpError:
                if name not in self._finished:
                    self._ended[name] = None
            except GpuprofError:
                continue  # unsuitable for the fleet or for the known figures of the models
            else:
                self._finished.add(name)
                self._ended.pop(name, None)
                yield placement


def _plan_instances(problem: Problem, limit: Limit, policies: Sequence[str]) -> Iterator[Placement]:
    """Yield the maps at half the SLO of policies for MIG instances, where models were measured in instances."""
    if not _are_instances_measured(problem):
        return
    segments = Segments(problem)
    for name in policies:
        if (gpus := BudgetPlans(problem, segments, name).find_cheapest(limit)) is not None:
            yield Placement(FOUND_BY, gpus)


def _without_limit(problem: Problem) -> Problem:
    return replace(problem, options=replace(problem.options, time_limit_s=None, explains=False))


def _is_quick(name: str, problem: Problem) -> bool:
    """Return whether a policy is quick for all figures: with a latency budget, for few demands or the quickest policy.

    With looked-up figures all policies are quick; with predicted figures thousands of queries are not.
    """
    return problem.options.latency_budget is not None and (len(problem.demands) <= _FEW or name == QUICKEST)


def _are_figures_measured(problem: Problem) -> bool:
    """Return whether the figures of every demand were measured or interpolated, on each kind with an estimate."""
    for demand, entry in product(problem.demands, problem.fleet.entries):
        with suppress(InputError):
            for share in problem.estimator.shares(demand.model, entry.device)[-1:]:
                batches = problem.estimator.batches(demand.model, entry.device, share)[:1]
                times = batch_times(problem.estimator, demand.model, entry.device, batches, share, 1)
                if not all(one.is_observed for one in times):
                    return False
    return True


def _are_instances_measured(problem: Problem) -> bool:
    """Return whether every model was measured in some MIG instance of a device of the fleet."""
    return all(
        any(_is_instance_measured(problem, demand, entry.device) for entry in problem.fleet.entries)
        for demand in problem.demands
    )


def _is_instance_measured(problem: Problem, demand: Demand, device: Device) -> bool:
    with suppress(InputError):
        for share in problem.estimator.shares(demand.model, device):
            if share.mig is not None and _is_first_batch_observed(problem, demand, device, share):
                return True
    return False


def _is_first_batch_observed(problem: Problem, demand: Demand, device: Device, share: Share) -> bool:
    """Return whether the time of the smallest batch was measured or interpolated."""
    for batch in problem.estimator.batches(demand.model, device, share)[:1]:
        with suppress(InputError):
            return problem.estimator.estimate(demand.model, device, batch, share).latency_ms.is_observed
    return False


def has_fast_late_bounds(problem: Problem) -> bool:
    """Return whether late replicas are found without queues, and interference by sums, on every kind of device."""
    first = problem.demands[0]
    with suppress(InputError):
        if not all(isinstance(queue_of(problem.queueing, one.model), QuickQueueModel) for one in problem.demands):
            return False
        for entry in problem.fleet.entries:
            for share in problem.estimator.shares(first.model, entry.device)[-1:]:
                batches = problem.estimator.batches(first.model, entry.device, share)[:1]
                workloads = [Workload(first.model, batch, share) for batch in batches]
                if tabulate_interference(problem.estimator, entry.device, workloads) is None:
                    return False
        return True
    return False


def _is_meant_for(name: str, problem: Problem) -> bool:
    many = len(problem.demands)
    if many > _SEARCHING.get(name, many):
        return False
    if problem.options.latency_budget is None and many > _ASKING.get(name, many):
        return False
    counts = [entry.count for entry in problem.fleet.entries]
    return name != "milp" or (None not in counts and sum(count or 0 for count in counts) <= _MOST_DEVICES)
