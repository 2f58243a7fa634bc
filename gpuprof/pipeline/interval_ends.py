"""Plans with the estimates at the ends of their intervals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from gpuprof.domain.deployment import DeploymentMap, PlanAtEnds, ReplicaPrediction
from gpuprof.domain.estimate import Figure
from gpuprof.errors import InfeasibleError
from gpuprof.estimators.interval_end import IntervalEndEstimator
from gpuprof.placement.limit import Limit
from gpuprof.placement.problem import MEANS

if TYPE_CHECKING:
    from gpuprof.placement.policies import Policy
    from gpuprof.placement.problem import Problem

#: Time for each end as a part of the planning time, and its minimum in seconds.
_PART = 0.25
_LEAST_S = 1.0
#: Minimum seconds left for planning at the ends; with less time both are left out.
_TOO_LATE_S = 0.3


def add_interval_ends(
    problem: Problem, policy: Policy, deployment: DeploymentMap, spent: Limit, least_s: float = _LEAST_S
) -> DeploymentMap:
    """Return the map with the policy's plans at both ends of the estimates' intervals.

    A map with measured or interpolated times only is returned unchanged, so that it does not depend on the machine's
    speed. A map that was planned with the upper ends of all its times serves as the plan at that end, with its bound:
    no other placement is faster there. An end without enough time is left out.

    Parameters
    ----------
    deployment : DeploymentMap
        The policy's map for the problem.
    spent : Limit
        The time limit of the plan, still running.
    least_s : float
        Seconds for each end, where the limit leaves them; more after a long planning time.
    """
    predictions = [replica.predicted for *_, replica in deployment.places()]
    if all(one.latency_ms_interval is None or _is_observed(one) for one in predictions):
        return deployment
    upper = _as_planned(deployment) if _is_planned_at_upper_ends(problem, deployment) else None
    if spent.left_s is not None and spent.left_s < _TOO_LATE_S:
        return _with_ends(deployment, None, upper)
    seconds = max(least_s, _PART * spent.spent_s)
    if spent.left_s is not None:
        # Two ends share the remaining time.
        seconds = min(seconds, spent.left_s / (2.0 if upper is None else 1.0))
    lower = plan_at_end(problem, policy, "lower", seconds)
    upper = upper or plan_at_end(problem, policy, "upper", seconds)
    planned = deployment.predicted.gpus
    if lower is not None and lower.gpus is None and lower.lower_bound_gpus == planned and not deployment.unplaced:
        # Its search was not over, but the plan itself keeps every SLO where batches take no longer.
        lower = lower.model_copy(update={"gpus": planned})
    return _with_ends(deployment, lower, upper)


def _with_ends(deployment: DeploymentMap, lower: PlanAtEnds | None, upper: PlanAtEnds | None) -> DeploymentMap:
    predicted = deployment.predicted.model_copy(update={"at_lower_ends": lower, "at_upper_ends": upper})
    return deployment.model_copy(update={"predicted": predicted})


def _is_observed(predicted: ReplicaPrediction) -> bool:
    return Figure(predicted.latency_ms, predicted.source).is_observed


def _is_planned_at_upper_ends(problem: Problem, deployment: DeploymentMap) -> bool:
    """Return whether the plan uses the upper end of every interval: no confidence is set, and all are predicted."""
    return problem.options.confidence is None and not any(
        replica.predicted.latency_ms_interval is not None and _is_observed(replica.predicted)
        for *_, replica in deployment.places()
    )


def _as_planned(deployment: DeploymentMap) -> PlanAtEnds:
    return PlanAtEnds(
        gpus=deployment.predicted.gpus,
        served_rps=math.fsum(replica.rate_rps for *_, replica in deployment.places()),
        lower_bound_gpus=deployment.predicted.lower_bound_gpus,
    )


def plan_at_end(problem: Problem, policy: Policy, end: Literal["lower", "upper"], seconds: float) -> PlanAtEnds | None:
    """Return the policy's plan at an end of the intervals within ``seconds``; None without a plan."""
    options = replace(problem.options, confidence=MEANS, time_limit_s=seconds)
    at_end = replace(problem, estimator=IntervalEndEstimator(problem.estimator, end), options=options, previous=None)
    try:
        placement = policy.place(at_end)
    except InfeasibleError:
        return None
    if placement.stopped and placement.lower_bound_gpus is None:
        return None
    return PlanAtEnds(
        gpus=None if placement.stopped else len(placement.gpus),
        served_rps=math.fsum(placement.rates_rps().values()),
        lower_bound_gpus=placement.lower_bound_gpus,
    )
