"""What a map's times rest on: measurements, what lies between them, what lies beyond, or predictions."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.estimate import EXTRAPOLATED, INTERPOLATED, MEASURED

#: A time by the roofline, a regressor or an analytical model.
PREDICTED = "predicted"
_KINDS = (MEASURED, INTERPOLATED, EXTRAPOLATED, PREDICTED)


@dataclass(frozen=True, slots=True)
class SourcePart:
    """The part of a map whose times have one kind of source.

    Attributes
    ----------
    kind : str
        ``"measured"``, ``"interpolated"``, ``"extrapolated"`` or ``"predicted"``.
    replicas : int
    rate_rps : float
        Requests per second that they are planned for.
    """

    kind: str
    replicas: int
    rate_rps: float


def split_by_source(deployment: DeploymentMap) -> tuple[SourcePart, ...]:
    """Return the parts of a map by the source of their times, the surest first; kinds that do not occur are left out.

    A merged replica whose time is a sum counts as the least sure of what is summed, as its source says.
    """
    replicas: defaultdict[str, int] = defaultdict(int)
    rates: defaultdict[str, float] = defaultdict(float)
    for *_, replica in deployment.places():
        kind = _kind_of(replica.predicted.source)
        replicas[kind] += 1
        rates[kind] += replica.rate_rps
    return tuple(SourcePart(kind, replicas[kind], rates[kind]) for kind in _KINDS if replicas[kind])


def describe_sources(deployment: DeploymentMap) -> str:
    """Return one line that says what part of a map is measured and what is not, empty for a map without replicas."""
    parts = split_by_source(deployment)
    total_rps = sum(part.rate_rps for part in parts)
    return "; ".join(
        f"{part.replicas} {'replica' if part.replicas == 1 else 'replicas'} "
        f"({part.rate_rps / total_rps if total_rps else 1.0:.0%} of the requests) {part.kind}"
        for part in parts
    )


def _kind_of(source: str) -> str:
    last = source.rsplit(", ", 1)[-1]
    return last if last in (MEASURED, INTERPOLATED, EXTRAPOLATED) else PREDICTED
