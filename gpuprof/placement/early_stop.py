"""Reports that a time limit stopped the search for a map, and its optimality gap."""

from __future__ import annotations

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.plural import count_of
from gpuprof.placement.limit import is_interrupted
from gpuprof.placement.placement import Placement

#: Map entries for the causes of an early stop.
_STOPPED, _INTERRUPTED = "time limit", "interrupt"


def name_stop(placement: Placement) -> str | None:
    """Return the cause of a search's early end, None without an early end."""
    if not placement.stopped:
        return None
    return _INTERRUPTED if is_interrupted() else _STOPPED


def early_stop(deployment: DeploymentMap, limit_s: float | None = None) -> str | None:
    """Return a line for a search that was stopped early, None otherwise.

    ``limit_s``: the time limit in seconds, printed with its option.
    """
    if (stop := deployment.planned_with.stopped_by) is None:
        return None
    predicted, words = deployment.predicted, []
    if predicted.lower_bound_gpus is not None:
        is_least = predicted.gpus <= predicted.lower_bound_gpus
        bound = (
            "the least that any map takes" if is_least else f"and no map takes fewer than {predicted.lower_bound_gpus}"
        )
        words.append(f"{count_of(predicted.gpus, 'device')}, {bound}")
    if predicted.lower_bound_cost_per_hour is not None and predicted.cost_per_hour is not None:
        words.append(
            f"{predicted.cost_per_hour:.4g} $/h, and none costs less than {predicted.lower_bound_cost_per_hour:.4g}"
        )
    if predicted.upper_bound_goodput_rps is not None:
        words.append(
            f"{predicted.goodput_rps:.4g} requests/s, and none serves more than {predicted.upper_bound_goodput_rps:.4g}"
        )
    result = "; ".join(words) or "no bound is known"
    if limit_s is None or stop == _INTERRUPTED:
        return f"the {stop} ended the search early: {result}"
    return f"the {stop} of {limit_s:g} s ended the search early (--time-limit gives it longer): {result}"
