"""What to profile so that a plan could be smaller: on a CPU only the shares that were profiled can be planned with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.placement.problem import Problem

#: A replica that is busy for less of its time might do with half its share.
_IDLE = 0.4


def suggest_share(problem: Problem, deployment: DeploymentMap) -> str | None:
    """Return which smaller share is worth profiling, None where that could save nothing.

    That is so when something is not served or takes more than one device, and a replica is mostly idle under the
    least share of a CPU that its model was profiled under.
    """
    devices = {entry.device.name: entry.device for entry in problem.fleet.entries if entry.device.kind == "cpu"}
    if not deployment.unplaced and sum(len(node.gpus) for node in deployment.nodes) < 2:
        return None
    for _, gpu, _, replica in deployment.places():
        device, busy = devices.get(gpu.device), replica.predicted.utilization
        if device is None or busy is None or busy >= _IDLE or replica.model not in problem.files:
            continue
        least = problem.estimator.shares(replica.model, device)[0].sm_pct
        if replica.sm_share_pct == least:
            path = problem.files[replica.model].path
            return (
                f"{replica.model} has {least:g}%, the least that it was profiled under, and is busy {100 * busy:.0f}% "
                f"of the time: gpuprof profile {path} --share {least / 2:g} may let more fit"
            )
    return None
