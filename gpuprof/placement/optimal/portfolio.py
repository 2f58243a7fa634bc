"""The maps of the quick policies, for `optimal` to start from and never to fall behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from gpuprof.errors import GpuprofError
from gpuprof.placement.limit import Limit, TimeUpError
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import BUILTIN, make_policy
from gpuprof.placement.problem import Problem

#: Policies that take time in proportion to the demands.
_QUICKEST = "igniter"
_QUICK = (_QUICKEST, "parvagpu", "gslice", "gpulet", "ffd", "mig-serving")
#: Baselines that are as quick: `optimal` with a time limit must not fall behind them either.
_BASELINES = ("alpaserve", "paris-elsa", "shepherd")
#: By a latency budget each of the quick policies takes milliseconds for so many demands.
_FEW = 20
#: Policies that search; they are asked about so many demands at most.
_SEARCHING = {"usher": 30, "milp": 12}
#: Policies that ask for the tail of many shares and batches; by queues, of so many demands at most.
_ASKING = {"igniter": 100, "gslice": 100, "alpaserve": 100, "paris-elsa": 100, "shepherd": 100}
#: `milp` is a program over single devices.
_MOST_DEVICES = 12


def run_portfolio(problem: Problem, limit: Limit) -> Iterator[Placement]:
    """Yield what the built-in policies make of the problem, those that are made for it, until the time is up."""
    for name in (*_QUICK, *_SEARCHING):
        if name in BUILTIN and _is_meant_for(name, problem):
            options = replace(problem.options, time_limit_s=limit.left_s)
            try:
                yield make_policy(name).place(replace(problem, options=options))
            except GpuprofError:
                continue  # not made for such a fleet, or for what is known of the models


def run_heuristics(problem: Problem, limit: Limit) -> Iterator[Placement]:
    """Yield what the policies that take time in proportion to the demands make of the problem, until the time is up.

    By a latency budget those of few demands are not stopped then, nor of many the quickest by far.
    """
    few = len(problem.demands) <= _FEW
    for name in (*_QUICK, *_BASELINES):
        if not _is_meant_for(name, problem):
            continue
        policy = make_policy(name)
        is_free = problem.options.latency_budget is not None and (few or name == _QUICKEST)
        own = Limit() if is_free else limit
        with suppress(GpuprofError, TimeUpError):
            with problem.limits.until(own):
                placement = policy.place(problem)
            yield placement


def _is_meant_for(name: str, problem: Problem) -> bool:
    many = len(problem.demands)
    if many > _SEARCHING.get(name, many):
        return False
    if problem.options.latency_budget is None and many > _ASKING.get(name, many):
        return False
    counts = [entry.count for entry in problem.fleet.entries]
    return name != "milp" or (None not in counts and sum(count or 0 for count in counts) <= _MOST_DEVICES)
