"""What a model at a batch size requires of a device: compute (Creq) and memory (Mreq), as USHER sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.segment import Segment, Segments

CreqMetric = Literal["max-occupancy", "wao", "wsm"]

_METRICS = {"max-occupancy": "max_occupancy", "wao": "wavg_occupancy", "wsm": "wavg_sm_util"}


@dataclass(frozen=True, slots=True)
class Requirement:
    """A replica by its requirements.

    Attributes
    ----------
    segment : Segment
        Under a share of Creq percent, which is what USHER gives it (thesis §5.2.2); its capacity is the goodput.
    creq_pct, mreq_pct : float
        Percent of the device.
    """

    segment: Segment
    creq_pct: float
    mreq_pct: float

    @property
    def total_pct(self) -> float:
        """Rreq = Creq + Mreq."""
        return self.creq_pct + self.mreq_pct


def requirements(
    segments: Segments, demand: Demand, device: Device, metric: CreqMetric
) -> tuple[dict[int, Requirement], tuple[float, float] | None]:
    """Return the requirement at each batch that meets the SLO, and the mean (Creq, Mreq) over all batches.

    Raises
    ------
    InputError
        When ``metric`` is known at no batch.
    """
    found: dict[int, Requirement] = {}
    seen: list[tuple[float, float]] = []
    whole = Share()
    for batch in segments.menu.listed_batches(demand.model, device, whole):
        try:
            estimate = segments.estimate(device, Workload(demand.model, batch, whole))
        except InputError:
            continue
        creq = estimate.creq(_METRICS[metric])
        if creq is None or not 0.0 < creq.value <= 100.0:
            continue
        mreq = 100.0 * (segments.memory_bytes(estimate) or 0) / device.dram_bytes
        if mreq > 100.0 and seen:
            break  # USHER stops at the batch that exceeds the memory (§3.3.1)
        seen.append((creq.value, mreq))
        segment = segments.make(demand, device, Workload(demand.model, batch, Share(creq.value)))
        if segment is not None:
            found[batch] = Requirement(segment, creq.value, mreq)
    if not seen:
        return {}, None
    return found, (sum(c for c, _ in seen) / len(seen), sum(m for _, m in seen) / len(seen))


def require_metric(known: bool, metric: CreqMetric) -> None:
    """Raise when nothing is known of the compute requirement of any model.

    Raises
    ------
    InputError
        Naming what has to be profiled.
    """
    if not known:
        raise InputError(
            f"no model of the demands has a compute requirement by {metric}",
            "profile them with a collector that measures it, or choose another policy",
        )
