"""Sources of a map's times: measurement, interpolation, extrapolation, or prediction."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass

from gpuprof.domain.deployment import DeploymentMap, PlanAtEnds
from gpuprof.domain.estimate import (
    ASSUMED,
    COMPUTED,
    EXTRAPOLATED,
    INTERPOLATED,
    MEASURED,
    PREDICTED,
    SOURCE_KINDS,
    classify_source,
    is_unstable,
    source_without_neighbours,
)
from gpuprof.domain.plural import count_of

#: Relative: sums of rates differ by rounding.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class SourcePart:
    """The part of a map with times from the same kind of source."""

    kind: str  #: Class of source, as of `gpuprof.domain.estimate.classify_source`.
    replicas: int
    rate_rps: float  #: Planned requests per second of these replicas.


def split_by_source(deployment: DeploymentMap) -> tuple[SourcePart, ...]:
    """Return the parts of a map by the source of their times, the most certain first, without empty parts."""
    replicas: defaultdict[str, int] = defaultdict(int)
    rates: defaultdict[str, float] = defaultdict(float)
    for *_, replica in deployment.places():
        kind = classify_source(replica.predicted.source)
        replicas[kind] += 1
        rates[kind] += replica.rate_rps
    return tuple(SourcePart(kind, replicas[kind], rates[kind]) for kind in SOURCE_KINDS if replicas[kind])


def describe_sources(deployment: DeploymentMap) -> str:
    """Return a line with the measured and predicted fractions of a map, empty for a map without replicas."""
    parts = split_by_source(deployment)
    total_rps = sum(part.rate_rps for part in parts)
    return "; ".join(
        f"{count_of(part.replicas, 'replica')} ({part.rate_rps / total_rps if total_rps else 1.0:.0%} of the requests) "
        f"{_describe_kind(deployment, part.kind)}"
        for part in parts
    )


def describe_certainty(deployment: DeploymentMap) -> str:
    """Return a sentence on the certainty of a map's times and the interval end used by the plan.

    Empty for a map without replicas.
    """
    sources = [replica.predicted.source for *_, replica in deployment.places()]
    if not sources:
        return ""
    total = count_of(len(sources), "replica")
    unstable = sum(is_unstable(source) for source in sources)
    kinds = [classify_source(source) for source in sources if not is_unstable(source)]
    predicted = kinds.count(PREDICTED) + kinds.count(EXTRAPOLATED)
    confidence = deployment.planned_with.confidence
    end = "the upper ends of their intervals"
    if confidence is not None:
        end = "the means" if confidence == 0.0 else f"the upper ends of {confidence:.0%} intervals"
    parts = [
        f"{count} of {total} {'rests' if count == 1 else 'rest'} on {kind}"
        for count, kind in (
            (unstable, "unstable rows"),
            (predicted, "predictions"),
            (kinds.count(COMPUTED), "computed rows"),
            (kinds.count(ASSUMED), "a premise"),
        )
        if count
    ]
    if not parts:
        return "Sure of its times: all measured, planned at " + ("the means." if confidence is None else f"{end}.")
    premise = deployment.planned_with.premise if ASSUMED in kinds else None
    plan_end = f", planned at {end}" if unstable or predicted else ""
    return f"{' and '.join(parts)}{plan_end}." + (f" The premise is {premise}." if premise else "")


def _describe_kind(deployment: DeploymentMap, kind: str) -> str:
    sources = [replica.predicted.source for *_, replica in deployment.places()]
    predicted = [source for source in sources if classify_source(source) == PREDICTED]
    if kind == PREDICTED and all(
        classify_source(source_without_neighbours(source)) != PREDICTED for source in predicted
    ):
        return "measured alone, predicted beside their neighbours"
    return kind


def describe_basis(deployment: DeploymentMap) -> str:
    """Return a line on the sources of a map's times, empty if all are measured.

    The line gives the number of measured models on each kind of device, and the plans at both ends of the estimates'
    intervals where these differ from the map.
    """
    clauses = [
        f"{sum(models.values())} of {count_of(len(models), 'model')} measured on {device}"
        for device, models in _measured_models(deployment).items()
        if not all(models.values())
    ]
    ends = deployment.predicted.at_lower_ends, deployment.predicted.at_upper_ends
    texts = [_describe_end(deployment, end) for end in ends]
    is_partly_known = not is_observed(deployment) and texts.count(None) == 1
    plan_text = _describe_end(deployment, _estimate_plan(deployment))
    if is_partly_known or any(text is not None and text != plan_text for text in texts):
        lower, upper = (text or "not computed" for text in texts)
        clauses.append(f"at the lower ends of the estimates {lower}, at the upper ends {upper}")
    elif name_basis(deployment) == "these estimates" and not is_observed(deployment) and None in texts:
        clauses.append("what it comes to at the ends of the estimates' intervals was not computed")
    return "; ".join(clauses)


def describe_requirements(deployment: DeploymentMap) -> str:
    """Return a line on predicted compute and memory requirements, with their intervals.

    Empty where the policy did not use requirements, or all were profiled.
    """
    requirements: dict[str, None] = {}
    metrics: dict[str, None] = {}
    for _, gpu, _, replica in deployment.places():
        creq = replica.predicted.creq
        if creq is None or classify_source(creq.source) in (MEASURED, INTERPOLATED, COMPUTED):
            continue
        metrics[creq.metric] = None
        interval = "" if creq.interval_pct is None else " ({:.0f} to {:.0f})".format(*creq.interval_pct)
        requirements[f"{replica.model} at batch {replica.batch} {creq.pct:.0f}%{interval} of {gpu.device}"] = None
    sentences = [f"{' and '.join(metrics)} predicted, not profiled: {'; '.join(requirements)}."] if requirements else []
    memory = _describe_memory(deployment)
    return " ".join([*sentences, *([f"Mreq predicted, not measured: {memory}."] if memory else [])]).removesuffix(".")


def _describe_memory(deployment: DeploymentMap) -> str:
    """Return the predicted memory requirements of replicas, with their intervals."""
    needs: dict[str, None] = {}
    for _, gpu, _, replica in deployment.places():
        mreq, planned_bytes = replica.predicted.mreq, replica.predicted.memory_bytes
        if mreq is None or classify_source(mreq.source) in (MEASURED, INTERPOLATED, COMPUTED):
            continue
        range_text = "" if mreq.interval_bytes is None else " ({:.3g} to {:.3g})".format(*_gib(*mreq.interval_bytes))
        (need,) = _gib(mreq.bytes)
        plan = "" if planned_bytes is None else f", planned with {_gib(planned_bytes)[0]:.3g}"
        needs[f"{replica.model} at batch {replica.batch} on {gpu.device} {need:.3g} GiB{range_text}{plan}"] = None
    return "; ".join(needs)


def _gib(*sizes: float) -> tuple[float, ...]:
    return tuple(size / 2**30 for size in sizes)


def is_observed(deployment: DeploymentMap) -> bool:
    """Return whether all times of a map were measured stably, or interpolated between stable measurements."""
    return all(
        classify_source(source) in (MEASURED, INTERPOLATED) and not is_unstable(source)
        for source in (replica.predicted.source for *_, replica in deployment.places())
    )


def name_basis(deployment: DeploymentMap) -> str:
    """Return the basis of a map's bounds in words: ``"these estimates"``, ``"computed rows"``, ``"a premise"``."""
    kinds = {classify_source(replica.predicted.source) for *_, replica in deployment.places()}
    if ASSUMED in kinds:
        return "a premise"
    return "computed rows" if COMPUTED in kinds and kinds <= {MEASURED, INTERPOLATED, COMPUTED} else "these estimates"


def record_basis(deployment: DeploymentMap) -> dict[str, object]:
    """Return the sources of a map's times as plain values for JSON.

    Returns
    -------
    dict
        ``"text"``: the texts of `describe_sources` and `describe_basis`; ``"sources"``: for each kind of source, the
        replicas, their requests per second and their fraction of all requests; ``"measured_models"``: for each kind of
        device, the number of measured models; ``"at_lower_ends"``, ``"at_upper_ends"``: the plan at the ends of the
        estimates' intervals, null where not computed or where everything was measured.
    """
    parts = split_by_source(deployment)
    total_rps = sum(part.rate_rps for part in parts)
    ends = deployment.predicted.at_lower_ends, deployment.predicted.at_upper_ends
    lower, upper = (None if end is None else end.model_dump() for end in ends)
    return {
        "text": "; ".join(filter(None, (describe_sources(deployment), describe_basis(deployment)))),
        "sources": [asdict(part) | {"part": part.rate_rps / total_rps if total_rps else 1.0} for part in parts],
        "measured_models": {
            device: {"measured": sum(models.values()), "models": len(models)}
            for device, models in _measured_models(deployment).items()
        },
        "at_lower_ends": lower,
        "at_upper_ends": upper,
    }


def _measured_models(deployment: DeploymentMap) -> dict[str, dict[str, bool]]:
    """Return, for each kind of device and model, whether all its times without neighbours rest on measurements."""
    measured = defaultdict[str, dict[str, bool]](dict)
    for _, gpu, _, replica in deployment.places():
        kind = classify_source(source_without_neighbours(replica.predicted.source))
        is_measured = kind not in (PREDICTED, COMPUTED)
        measured[gpu.device][replica.model] = measured[gpu.device].get(replica.model, True) and is_measured
    return measured


def _estimate_plan(deployment: DeploymentMap) -> PlanAtEnds:
    served_rps = sum(replica.rate_rps for *_, replica in deployment.places())
    return PlanAtEnds(gpus=deployment.predicted.gpus, served_rps=served_rps)


def _describe_end(deployment: DeploymentMap, end: PlanAtEnds | None) -> str | None:
    if end is None or end.gpus is None:
        return None
    demanded_rps = sum(model.rate_rps for model in deployment.models.values())
    text = count_of(end.gpus, "device")
    if end.served_rps < demanded_rps * (1.0 - _ROUNDING):
        text += f" for {end.served_rps:,.4g} of {demanded_rps:,.4g} requests/s"
    return text
