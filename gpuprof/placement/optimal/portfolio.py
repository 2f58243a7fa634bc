"""The maps of fast heuristics, from which `optimal` starts so that it is never worse."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

from gpuprof.domain.estimate import Workload
from gpuprof.domain.interference_table import tabulate_interference
from gpuprof.domain.model_queues import queue_of
from gpuprof.domain.sojourn import QuickQueueModel
from gpuprof.errors import GpuprofError, InputError
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import BUILTIN, make_policy
from gpuprof.placement.problem import Problem

#: Policies that take time in proportion to the demands; the first in the least.
QUICKEST = "igniter"
_QUICK = (QUICKEST, "parvagpu", "gslice", "gpulet", "ffd", "mig-serving")
#: Baselines that are as quick: `optimal` must not fall behind them either.
_BASELINES = ("alpaserve", "paris-elsa", "shepherd")
#: By a latency budget each of the quick policies takes milliseconds for so many demands, whatever the figures are.
_FEW = 20
#: Of figures that are looked up, all of them together take 20 to 30 ms a demand by a latency budget, 0.2 s by queues.
_FEW_LOOKED_UP = 100
#: Policies that search, and the most demands that they are run with.
_SEARCHING = {"usher": 30, "milp": 12}
#: Policies that ask for the tail of many shares and batches; by queues, of so many demands at most.
_ASKING = {"igniter": 100, "gslice": 100, "alpaserve": 100, "paris-elsa": 100, "shepherd": 100}
#: `milp` is a program over single devices.
_MOST_DEVICES = 12


def run_portfolio(problem: Problem, limit: Limit) -> Iterator[Placement]:
    """Yield what the built-in policies make of the problem, those that are made for it, until the time is up."""
    for name in (*_QUICK, *_BASELINES, *_SEARCHING):
        if name in BUILTIN and _is_meant_for(name, problem):
            options = replace(problem.options, time_limit_s=limit.left_s)
            try:
                yield make_policy(name).place(replace(problem, options=options))
            except GpuprofError:
                continue  # not made for such a fleet, or for what is known of the models


def run_quickest(problem: Problem) -> Placement | None:
    """Return what the quickest policy makes of many demands by queues; None where it does not take a second or two."""
    if (
        problem.options.latency_budget is not None
        or not _is_meant_for(QUICKEST, problem)
        or not has_fast_late_bounds(problem)
    ):
        return None
    with suppress(GpuprofError):
        return make_policy(QUICKEST).place(replace(problem, options=replace(problem.options, time_limit_s=None)))
    return None


def run_heuristics(problem: Problem, limit: Limit, done: Collection[str] = ()) -> Iterator[Placement]:
    """Yield what the policies that take time in proportion to the demands make of the problem, but for those done.

    Those that are quick are not stopped, however long that takes on a machine whose cores are taken: whoever asks one
    of them instead would wait as long, and have the better map. The others have until the time is up.
    """
    for name in (*_QUICK, *_BASELINES):
        if name in done or not _is_meant_for(name, problem):
            continue
        policy = make_policy(name)
        with suppress(GpuprofError, TimeUpError):
            with problem.limits.until(Limit() if _is_quick(name, problem) else limit):
                placement = policy.place(replace(problem, options=replace(problem.options, time_limit_s=None)))
            yield placement


def _is_quick(name: str, problem: Problem) -> bool:
    """Whether a policy is done before long: with few demands whose figures are looked up.

    By a latency budget the quickest is with many, and all are with few. Where figures are predicted, thousands are.
    """
    many = len(problem.demands)
    if problem.options.latency_budget is not None and (many <= _FEW or name == QUICKEST):
        return True
    return many <= _FEW_LOOKED_UP and _are_figures_measured(problem)


def _are_figures_measured(problem: Problem) -> bool:
    """Whether the figures of every demand were measured or lie between such, on each kind that is known to run it."""
    for demand, entry in product(problem.demands, problem.fleet.entries):
        with suppress(InputError):
            for share in problem.estimator.shares(demand.model, entry.device)[-1:]:
                batch = problem.estimator.batches(demand.model, entry.device, share)[0]
                if not problem.estimator.estimate(demand.model, entry.device, batch, share).latency_ms.is_observed:
                    return False
    return True


def has_fast_late_bounds(problem: Problem) -> bool:
    """Whether late replicas are found without solving queues, and interference is by sums, on every kind of device."""
    first = problem.demands[0]
    with suppress(InputError):
        if not all(isinstance(queue_of(problem.queueing, one.model), QuickQueueModel) for one in problem.demands):
            return False
        for entry in problem.fleet.entries:
            for share in problem.estimator.shares(first.model, entry.device)[-1:]:
                batch = problem.estimator.batches(first.model, entry.device, share)[0]
                workload = Workload(first.model, batch, share)
                if tabulate_interference(problem.estimator, entry.device, [workload]) is None:
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
