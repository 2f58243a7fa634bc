"""What a map's times rest on: measurements, what lies between them, what lies beyond, or predictions."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from gpuprof.domain.deployment import DeploymentMap, PlanAtEnds
from gpuprof.domain.estimate import EXTRAPOLATED, INTERPOLATED, MEASURED, PREDICTED, kind_of_source

#: What rates may be off by.
_ROUNDING = 1e-6
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
        kind = kind_of_source(replica.predicted.source)
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


def describe_basis(deployment: DeploymentMap) -> str:
    """Return one line that says what a map rests on where that is not measurements alone, else nothing.

    How many of its models were measured on each kind of device, and what the plan comes to at both ends of the
    estimates' intervals where that is another map.
    """
    unsure, known = False, defaultdict[str, dict[str, bool]](dict)
    for _, gpu, _, replica in deployment.places():
        kind = kind_of_source(replica.predicted.source)
        unsure |= kind not in (MEASURED, INTERPOLATED)
        known[gpu.device][replica.model] = known[gpu.device].get(replica.model, True) and kind != PREDICTED
    words = [
        f"{sum(models.values())} of {len(models)} {'model' if len(models) == 1 else 'models'} measured on {device}"
        for device, models in known.items()
        if not all(models.values())
    ]
    ends = deployment.predicted.at_lower_ends, deployment.predicted.at_upper_ends
    texts = [_describe_end(deployment, end) for end in ends]
    if any(text is not None and text != _describe_end(deployment, _as_planned(deployment)) for text in texts):
        lower, upper = (text or "not computed" for text in texts)
        words.append(f"at the lower ends of the estimates {lower}, at the upper ends {upper}")
    elif unsure and None in texts:
        words.append("what it comes to at the ends of the estimates' intervals was not computed")
    return "; ".join(words)


def describe_bounds(deployment: DeploymentMap) -> str:
    """Return the devices that any map needs, beside it those at the ends of the estimates' intervals where they differ.

    Empty where no bound is known.
    """
    said = deployment.predicted
    if said.lower_bound_gpus is None:
        return ""
    text = f"at least {said.lower_bound_gpus} needed by any map by these estimates"
    ends = [
        f"{end.lower_bound_gpus} at their {name} ends"
        for name, end in (("lower", said.at_lower_ends), ("upper", said.at_upper_ends))
        if end is not None and end.lower_bound_gpus not in (None, said.lower_bound_gpus)
    ]
    return f"{text} ({', '.join(ends)})" if ends else text


def _as_planned(deployment: DeploymentMap) -> PlanAtEnds:
    served = sum(replica.rate_rps for *_, replica in deployment.places())
    return PlanAtEnds(gpus=deployment.predicted.gpus, served_rps=served)


def _describe_end(deployment: DeploymentMap, end: PlanAtEnds | None) -> str | None:
    if end is None or end.gpus is None:
        return None
    asked = sum(model.rate_rps for model in deployment.models.values())
    text = f"{end.gpus} {'device' if end.gpus == 1 else 'devices'}"
    if end.served_rps < asked * (1.0 - _ROUNDING):
        text += f" for {end.served_rps:,.4g} of {asked:,.4g} requests/s"
    return text
