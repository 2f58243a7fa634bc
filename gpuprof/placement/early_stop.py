"""Reports that a time limit stopped the search for a map, and its optimality gap."""

from __future__ import annotations

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.plural import count_of

#: What a map says ended its search before it was over.
STOPPED = "time limit"


def early_stop(deployment: DeploymentMap, limit_s: float | None = None) -> str | None:
    """Return one line where a search was stopped early, None where it was not.

    ``limit_s``: the time limit in seconds, to be said with the option that sets it.
    """
    if (stopped_by := deployment.planned_with.stopped_by) is None:
        return None
    predicted, words = deployment.predicted, []
    if predicted.lower_bound_gpus is not None:
        is_least = predicted.gpus <= predicted.lower_bound_gpus
        known = (
            "the least that any map takes" if is_least else f"and no map takes fewer than {predicted.lower_bound_gpus}"
        )
        words.append(f"{count_of(predicted.gpus, 'device')}, {known}")
    if predicted.lower_bound_cost_per_hour is not None and predicted.cost_per_hour is not None:
        words.append(
            f"{predicted.cost_per_hour:.4g} $/h, and none costs less than {predicted.lower_bound_cost_per_hour:.4g}"
        )
    if predicted.upper_bound_goodput_rps is not None:
        words.append(
            f"{predicted.goodput_rps:.4g} requests/s, and none serves more than {predicted.upper_bound_goodput_rps:.4g}"
        )
    result = "; ".join(words) or "no bound is known"
    if limit_s is None:
        return f"the {stopped_by} ended the search early: {result}"
    return f"the {stopped_by} of {limit_s:g} s ended the search early (--time-limit gives it longer): {result}"
