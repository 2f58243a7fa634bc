"""A map in words: its devices and cost, goodput, unused capacity, bounds, and the sources of its times."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
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
from gpuprof.domain.number_format import ROUNDING
from gpuprof.domain.plural import count_of


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
    plan_end = f", planned at {end}" if unstable or predicted else ""
    return f"{' and '.join(parts)}{plan_end}."


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

    The line gives the premise of the estimator, the number of measured models on each kind of device, and the plans at
    both ends of the estimates' intervals where these differ from the map.
    """
    premise = _find_premise(deployment)
    clauses = [f"the premise is {premise}"] if premise else []
    clauses += [
        f"{sum(models.values())} of {count_of(len(models), 'model')} measured on {device}"
        for device, models in _measured_models(deployment).items()
        if not all(models.values())
    ]
    ends = deployment.predicted.at_lower_ends, deployment.predicted.at_upper_ends
    texts = [_describe_end(deployment, end) for end in ends]
    is_partly_known = not is_observed(deployment) and texts.count(None) == 1
    served_rps = sum(replica.rate_rps for *_, replica in deployment.places())
    plan_text = _describe_end(deployment, PlanAtEnds(gpus=deployment.predicted.gpus, served_rps=served_rps))
    if is_partly_known or any(text is not None and text != plan_text for text in texts):
        lower, upper = (text or "not computed" for text in texts)
        clauses.append(f"at the lower ends of the estimates {lower}, at the upper ends {upper}")
    elif name_basis(deployment) == "these estimates" and not is_observed(deployment) and None in texts:
        clauses.append("what it comes to at the ends of the estimates' intervals was not computed")
    return "; ".join(clauses)


def _find_premise(deployment: DeploymentMap) -> str | None:
    """Return the premise of the map's estimator if times of the map depend on it."""
    kinds = {classify_source(replica.predicted.source) for *_, replica in deployment.places()}
    return deployment.planned_with.premise if kinds & {ASSUMED, PREDICTED} else None


def is_observed(deployment: DeploymentMap) -> bool:
    """Return whether all times of a map were measured stably, or interpolated between stable measurements."""
    return all(
        classify_source(source) in (MEASURED, INTERPOLATED) and not is_unstable(source)
        for source in (replica.predicted.source for *_, replica in deployment.places())
    )


def name_basis(deployment: DeploymentMap) -> str:
    """Return the kind of figures behind a map's bounds: ``"these estimates"``, ``"computed rows"``, ``"a premise"``."""
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
        device, the number of measured models; ``"premise"``: the estimator's, or null; ``"at_lower_ends"``,
        ``"at_upper_ends"``: the plan at the ends of the estimates' intervals, null where not computed or where
        everything was measured.
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
        "premise": _find_premise(deployment),
        "at_lower_ends": lower,
        "at_upper_ends": upper,
    }


def _measured_models(deployment: DeploymentMap) -> dict[str, dict[str, bool]]:
    """Return for each (kind of device, model) whether all latencies without neighbours were measured."""
    measured = defaultdict[str, dict[str, bool]](dict)
    for _, gpu, _, replica in deployment.places():
        kind = classify_source(source_without_neighbours(replica.predicted.source))
        is_measured = kind not in (PREDICTED, COMPUTED)
        measured[gpu.device][replica.model] = measured[gpu.device].get(replica.model, True) and is_measured
    return measured


def _describe_end(deployment: DeploymentMap, end: PlanAtEnds | None) -> str | None:
    if end is None or end.gpus is None:
        return None
    demanded_rps = sum(model.rate_rps for model in deployment.models.values())
    text = count_of(end.gpus, "device")
    if end.served_rps < demanded_rps * (1.0 - ROUNDING):
        text += f" for {end.served_rps:,.4g} of {demanded_rps:,.4g} requests/s"
    return text


#: Least rate shown without decimals.
_WHOLE_RPS = 1000.0


def summarize_map(deployment: DeploymentMap) -> str:
    """Return ``"1 × a100-80 ($3.43/h), proven minimum. 3,149 of 3,150 requests/s within SLO. Unused: …"``."""
    parts = (
        _describe_devices,
        _describe_goodput,
        _describe_chains,
        _describe_unused,
        _describe_moves,
        _describe_search,
    )
    return " ".join(filter(None, (describe(deployment) for describe in parts)))


def _describe_devices(deployment: DeploymentMap) -> str:
    kinds = Counter(gpu.device for node in deployment.nodes for gpu in node.gpus)
    text = " + ".join(f"{count:,} × {name}" for name, count in kinds.items()) or "No devices"
    if deployment.predicted.cost_per_hour is not None:
        text += f" (${deployment.predicted.cost_per_hour:,.2f}/h)"
    return f"{text}{_describe_bound(deployment, kinds)}."


def _describe_bound(deployment: DeploymentMap, kinds: Counter[str]) -> str:
    """Return the text on the lower bound of devices or cost; bounds hold for the estimates."""
    predicted = deployment.predicted
    texts, proven = [], False
    fleet_devices = {entry.device for entry in deployment.planned_with.fleet or ()}
    has_choice = max(len(kinds), len(fleet_devices)) > 1  # an expensive device may cost more than two cheap ones
    if has_choice and predicted.lower_bound_cost_per_hour is not None and predicted.cost_per_hour is not None:
        proven = predicted.cost_per_hour <= predicted.lower_bound_cost_per_hour * (1.0 + ROUNDING)
        if not proven:
            texts.append(f"at least ${predicted.lower_bound_cost_per_hour:,.2f}/h needed")
    elif predicted.lower_bound_gpus is not None and len(kinds) < 2:
        proven = predicted.gpus <= predicted.lower_bound_gpus
        if not proven:
            texts.append(f"at least {predicted.lower_bound_gpus:,} needed")
    if proven and kinds:
        texts.append("proven minimum" if is_observed(deployment) else f"minimum by {name_basis(deployment)}")
    elif texts and not is_observed(deployment):
        texts.append(f"by {name_basis(deployment)}")
    ends = [
        f"{end.lower_bound_gpus:,} at their {name} ends"
        for name, end in (("lower", predicted.at_lower_ends), ("upper", predicted.at_upper_ends))
        if end is not None
        and predicted.lower_bound_gpus is not None
        and end.lower_bound_gpus not in (None, predicted.lower_bound_gpus)
    ]
    text = " ".join(texts) + (f" (at least {', '.join(ends)})" if ends else "")
    return f", {text.strip()}" if text else ""


def _describe_goodput(deployment: DeploymentMap) -> str:
    demanded_rps = math.fsum(model.rate_rps for model in deployment.models.values())
    goodput = min(deployment.predicted.goodput_rps, demanded_rps)
    decimals = 0 if demanded_rps >= _WHOLE_RPS or (_is_whole(demanded_rps) and _is_whole(goodput)) else 2
    demand = f"{demanded_rps:,.{decimals}f}"
    # Rounded down, so that missing goodput stays visible.
    goodput_text = (
        demand if goodput >= demanded_rps * (1.0 - ROUNDING) else f"{_round_down(goodput, decimals):,.{decimals}f}"
    )
    steps = ", counted at each step of a chain" if deployment.chains else ""
    text = f"{goodput_text} of {demand} requests/s within SLO{steps}"
    bound_rps = deployment.predicted.upper_bound_goodput_rps
    if bound_rps is not None and bound_rps < demanded_rps * (1.0 - ROUNDING):
        text += f"; no map reaches more than {bound_rps:,.{decimals}f}"
        text += "" if is_observed(deployment) else f" by {name_basis(deployment)}"
    return f"{text}."


def _describe_chains(deployment: DeploymentMap) -> str:
    """Return how the SLO of each chain is divided among its steps."""
    texts = []
    for name, chain in deployment.chains.items():
        parts = (f"{deployment.models[step].slo_ms:.4g} for {step}" for step in chain.steps)
        texts.append(f"{chain.slo_ms:g} ms of {name} are {' + '.join(parts)}")
    return f"{'; '.join(texts)}." if texts else ""


def _round_down(value: float, decimals: int) -> float:
    scale = 10.0**decimals
    return math.floor(value * scale) / scale


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) < ROUNDING


def describe_unshared(deployment: DeploymentMap) -> str | None:
    """Return a sentence on GPUs whose replicas run without shares, without a full stop; None where all have shares."""
    unshared = [any(part.unshared for part in gpu.partitions) for node in deployment.nodes for gpu in node.gpus]
    if not any(unshared):
        return None
    extent = "" if all(unshared) else f" on {sum(unshared):,} of the GPUs"
    return f"No replica is held to a share{extent}: each may use all SMs of its device"


def describe_turns(deployment: DeploymentMap) -> str | None:
    """Return the numbers of replicas with turns and of their workers, without a full stop; None without turns."""
    replicas = [
        (node.name, gpu.index, number, replica.turns, replica.time_slice_ms)
        for node in deployment.nodes
        for gpu in node.gpus
        for number, partition in enumerate(gpu.partitions)
        for replica in partition.replicas
        if replica.turns
    ]
    if not replicas:
        return None
    way = "share time" if any(slice_ms for *_, slice_ms in replicas) else "take turns"
    return f"{count_of(len(replicas), 'replica')} {way} in {count_of(len(set(replicas)), 'worker')}"


def _describe_unused(deployment: DeploymentMap) -> str:
    predicted = deployment.predicted
    if predicted.internal_slack is None or predicted.external_fragmentation is None or not predicted.gpus:
        return ""
    kinds = {gpu.device for node in deployment.nodes for gpu in node.gpus}
    noun = "CPU" if all(kind.startswith("cpu") for kind in kinds) else "GPU"
    devices = noun if predicted.gpus == 1 else f"{noun}s"
    if unshared := describe_unshared(deployment):
        return f"{unshared}."
    turns = describe_turns(deployment)
    return (
        f"{turns + '. ' if turns else ''}Unused: {100 * predicted.internal_slack:.0f}% of allocated shares; "
        f"{100 * predicted.external_fragmentation:.0f}% of the {devices} unallocated."
    )


def _describe_moves(deployment: DeploymentMap) -> str:
    moves, total = deployment.predicted.moves, sum(1 for _ in deployment.places())
    return "" if moves is None else f"Replicas to move: {moves:,} of {total:,}."


def _describe_search(deployment: DeploymentMap) -> str:
    """Return the variant of a published policy that gave the map, if the policy tried several."""
    heuristic = deployment.planned_with.found_by
    return "" if heuristic is None or deployment.policy == "optimal" else f"Found by {heuristic}."
