"""Brings the placement policies into a simulation: ``gpuprof simulate --reschedule``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.errors import GpuprofError, InfeasibleError, InputError

if TYPE_CHECKING:
    from gpuprof.deployment import DeploymentMap
    from gpuprof.simulator.arrivals import Arriving
    from gpuprof.simulator.cluster import Options
    from gpuprof.simulator.reschedule import MoveCosts, Scheduler, Timetable


def reschedule(
    deployment: DeploymentMap,
    arrivals: Mapping[str, Arriving],
    options: Options,
    period_s: float,
    scheduler: Scheduler,
    costs: MoveCosts,
) -> Timetable:
    """Return who lives when if ``scheduler`` is asked every ``period_s``.

    Raises
    ------
    InputError
        When the duration is not longer than a period, or devices are to fail as well.
    """
    from gpuprof.simulator.reschedule import observed_rates, timetable

    if options.failures:
        raise InputError("--reschedule and --fail exclude each other: the policies know nothing of failures")
    if period_s >= options.duration_s:
        raise InputError(f"--reschedule must be shorter than the duration of {options.duration_s:g} s")
    return timetable(deployment, observed_rates(deployment, arrivals, options, period_s), period_s, scheduler, costs)


def policy_scheduler(deployment: DeploymentMap, policy: str | None, headroom: float, db: Path | None) -> Scheduler:
    """Return a scheduler that places the observed rates, times ``headroom``, as the map's own problem.

    Rates that the policy cannot place, on the devices there are, leave the map as it is.
    """
    from gpuprof.cli.planning import map_policy, map_problem, plan
    from gpuprof.placement.policies import make_policy

    problem = map_problem(deployment, db)
    made = map_policy(deployment) if policy is None else make_policy(policy, {})

    def scheduler(rates: Mapping[str, float]) -> DeploymentMap | None:
        # A model that nobody asked for keeps the smallest replica, for who asks next.
        demands = tuple(
            replace(demand, rate_rps=max(headroom * rates[demand.model], 0.01 * demand.rate_rps))
            for demand in problem.demands
        )
        try:
            wanted = plan(replace(problem, demands=demands), made)
        except InfeasibleError:
            return None
        except GpuprofError as error:
            raise type(error)(f"while rescheduling: {error.message}", error.fix) from None
        return None if wanted.unplaced else wanted

    return scheduler
