"""Checks what no map is said to do better: neither the map itself may do so, nor a plan that it tells of."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gpuprof.domain.deployment import DeploymentMap, PlanAtEnds
from gpuprof.placement.evidence import Violation

_RELATIVE = 1e-3
_ABSOLUTE = 1e-6
#: Of the rates; what is left unplaced below that is rounding.
_LITTLE = 1e-6


def check_bounds(deployment: DeploymentMap) -> Iterator[Violation]:
    """Yield each bound of a map that the map, or a plan that it tells of, exceeds."""
    said = deployment.predicted
    rate_rps = math.fsum(replica.rate_rps for *_, replica in deployment.places())
    most = said.upper_bound_goodput_rps
    if most is not None and rate_rps > most * (1.0 + _RELATIVE) + _ABSOLUTE:
        yield _wrong(f"no map is said to serve more than {most:.4g} requests/s, and this one serves {rate_rps:.4g}")
    if not _serves_all(deployment):
        return
    used = sum(any(part.replicas for part in gpu.partitions) for node in deployment.nodes for gpu in node.gpus)
    if said.lower_bound_gpus is not None and said.lower_bound_gpus > used:
        yield _wrong(f"the lower bound of {said.lower_bound_gpus} GPUs is above the {used} used")
    least, cost = said.lower_bound_cost_per_hour, said.cost_per_hour
    if least is not None and cost is not None and least > cost * (1.0 + _RELATIVE) + _ABSOLUTE:
        yield _wrong(f"no map is said to cost less than {least:.4g} $/h, and this one costs {cost:.4g}")
    yield from _between_ends(deployment, used)


def _serves_all(deployment: DeploymentMap) -> bool:
    asked = math.fsum(model.rate_rps for model in deployment.models.values())
    return math.fsum(one.rate_rps for one in deployment.unplaced) <= _LITTLE * asked


def _between_ends(deployment: DeploymentMap, used: int) -> Iterator[Violation]:
    """Yield bounds that a plan for slower batches exceeds: what suffices there suffices here."""
    said, low, high = deployment.predicted, deployment.predicted.at_lower_ends, deployment.predicted.at_upper_ends
    asked = math.fsum(model.rate_rps for model in deployment.models.values())
    bounds = [("", said.lower_bound_gpus), ("at_lower_ends", None if low is None else low.lower_bound_gpus)]
    plans: list[tuple[str, int | None]] = [("", used)]
    if isinstance(high, PlanAtEnds) and high.served_rps >= asked * (1.0 - _LITTLE):
        plans.append(("at_upper_ends", high.gpus))
    for name, bound in bounds:
        for of, gpus in plans:
            if bound is not None and gpus is not None and bound > gpus and (name or of):
                yield _wrong(f"{name or 'the map'} needs at least {bound} devices, and {of or 'the map'} has {gpus}")


def _wrong(message: str) -> Violation:
    return Violation("figures", "predicted", message)
