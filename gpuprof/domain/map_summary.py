"""Summarises a map in a few sentences: devices and cost, goodput, unused capacity, bounds and moves."""

from __future__ import annotations

import math
from collections import Counter

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.map_sources import is_observed, name_basis
from gpuprof.domain.plural import count_of

#: Relative: sums of costs and rates differ by rounding.
_ROUNDING = 1e-6
#: Least rate shown without decimals.
_WHOLE_RPS = 1000.0


def summarize_map(deployment: DeploymentMap) -> str:
    """Return ``"1 × a100-80 ($3.43/h), proven minimum. 3,149 of 3,150 requests/s within SLO. Unused: …"``."""
    return " ".join(
        filter(
            None,
            (
                make(deployment)
                for make in (
                    _describe_devices,
                    _describe_goodput,
                    _describe_chains,
                    _describe_unused,
                    _describe_moves,
                    _describe_search,
                )
            ),
        )
    )


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
        proven = predicted.cost_per_hour <= predicted.lower_bound_cost_per_hour * (1.0 + _ROUNDING)
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
        demand if goodput >= demanded_rps * (1.0 - _ROUNDING) else f"{_round_down(goodput, decimals):,.{decimals}f}"
    )
    steps = ", counted at each step of a chain" if deployment.chains else ""
    text = f"{goodput_text} of {demand} requests/s within SLO{steps}"
    bound_rps = deployment.predicted.upper_bound_goodput_rps
    if bound_rps is not None and bound_rps < demanded_rps * (1.0 - _ROUNDING):
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
    return abs(value - round(value)) < _ROUNDING


def describe_unshared(deployment: DeploymentMap) -> str | None:
    """Return a sentence on the GPUs whose replicas are unshared, without a full stop; None where all have shares."""
    unshared = [any(part.unshared for part in gpu.partitions) for node in deployment.nodes for gpu in node.gpus]
    if not any(unshared):
        return None
    extent = "" if all(unshared) else f" on {sum(unshared):,} of the GPUs"
    return f"No replica is held to a share{extent}: each may use all SMs of its device"


def describe_turns(deployment: DeploymentMap) -> str | None:
    """Return the numbers of replicas with turns and of their workers, without a full stop; None without turns."""
    replicas = [
        (node.name, gpu.index, number, replica.turns)
        for node in deployment.nodes
        for gpu in node.gpus
        for number, partition in enumerate(gpu.partitions)
        for replica in partition.replicas
        if replica.turns
    ]
    if not replicas:
        return None
    return f"{count_of(len(replicas), 'replica')} take turns in {count_of(len(set(replicas)), 'worker')}"


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
    """Return the variant of a published policy that produced the map, where the policy tried several."""
    heuristic = deployment.planned_with.found_by
    return "" if heuristic is None or deployment.policy == "optimal" else f"Found by {heuristic}."
