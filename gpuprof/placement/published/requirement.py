"""USHER's requirements of a model at a batch size: compute (Creq) and memory (Mreq)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure, Workload
from gpuprof.domain.occupancy import cap_occupancy
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.placement import TOLERANCE, PlacedReplica
from gpuprof.placement.problem import Problem
from gpuprof.placement.search_space import SHARE_STEP
from gpuprof.placement.segment import Segment, Segments

CreqMetric = Literal["max-occupancy", "wao", "wsm"]

_METRICS = {"max-occupancy": "max_occupancy", "wao": "wavg_occupancy", "wsm": "wavg_sm_util"}


@dataclass(frozen=True, slots=True)
class Requirement:
    """A replica by its requirements."""

    #: Under a share of Creq percent, as given by USHER (thesis §5.2.2), or without a share; its capacity is the
    #: goodput.
    segment: Segment
    #: ``creq_pct``, ``mreq_pct``: Percent of the device.
    creq_pct: float
    mreq_pct: float
    figure: Figure | None = None  #: Measured or predicted Creq, with its interval.
    metric: str | None = None  #: Metric of Creq, by its name in estimates.

    def replica(self, rate_rps: float) -> PlacedReplica:
        """Return the replica serving ``rate_rps``, with its assumed requirement."""
        return replace(self.segment.replica(rate_rps), creq=self.figure, creq_metric=self.metric)

    @property
    def total_pct(self) -> float:
        """Rreq = Creq + Mreq."""
        return self.creq_pct + self.mreq_pct


def requirements(
    segments: Segments, demand: Demand, device: Device, metric: CreqMetric, unshared: bool = False
) -> tuple[dict[int, Requirement], tuple[float, float] | None]:
    """Return the requirement at each batch meeting the SLO, and the mean (Creq, Mreq) over all batches.

    With ``unshared`` a replica may use the whole device, and is not limited to its requirement. Raises `InputError`
    when ``metric`` is known at no batch.
    """
    by_batch: dict[int, Requirement] = {}
    pairs: list[tuple[float, float]] = []
    full = Share()
    for batch in segments.search_space.listed_batches(demand.model, device, full):
        try:
            estimate = segments.estimate(device, Workload(demand.model, batch, full))
        except InputError:
            continue
        creq = estimate.creq(_METRICS[metric])
        if creq is None or creq.value <= 0.0:
            continue
        required = _required_pct(creq)
        mreq = 100.0 * (segments.memory_bytes(estimate) or 0) / device.dram_bytes
        if mreq > 100.0 and pairs:
            break  # USHER stops at the batch that exceeds the memory (§3.3.1)
        pairs.append((required, mreq))
        segment = segments.make(demand, device, Workload(demand.model, batch, full if unshared else Share(required)))
        if segment is not None:
            by_batch[batch] = Requirement(segment, required, mreq, creq, _METRICS[metric])
    if not pairs:
        return {}, None
    return by_batch, (sum(c for c, _ in pairs) / len(pairs), sum(m for _, m in pairs) / len(pairs))


def _required_pct(creq: Figure) -> float:
    """Return the planning percentage: profiled values as they are, predicted values rounded up to the steps of
    shares.
    """
    value = float(cap_occupancy(creq.value))
    if creq.is_observed:
        return value
    return min(100.0, SHARE_STEP * math.ceil(value / SHARE_STEP - TOLERANCE))


def require_gpus(policy: str, problem: Problem) -> None:
    """Raise when a device of the fleet cannot be left unshared: on a CPU, shares are cores.

    Raises `InputError` naming the device.
    """
    for entry in problem.fleet.entries:
        if entry.device.kind != "gpu":
            raise InputError(
                f"{policy} cannot leave {entry.device.name} unshared: its replicas are held to cores",
                "leave out -O unshared, or name a GPU",
            )


def require_metric(is_known: bool, metric: CreqMetric) -> None:
    """Raise when no model has a known compute requirement.

    Raises `InputError` naming the required profiling.
    """
    if not is_known:
        raise InputError(
            f"no model of the demands has a compute requirement by {metric}",
            "profile them with a collector that measures it, give their ONNX files, or choose another policy",
        )
