"""The loads replicas sustained within their SLOs, for guessing the limits of similar replicas."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from gpuprof.domain.demand import Slo
from gpuprof.domain.sojourn import BatchServer

#: Precision of similarity: similar replicas have the same ratio of single requests' to full batches' times.
_ALIKE = 20


@dataclass(slots=True)
class SustainedLoads:
    """Stores loads by the SLO's slack in batch times; interpolates between two known loads."""

    _loads: dict[tuple[float, ...], list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, server: BatchServer, slo: Slo, load: float) -> None:
        """Store the largest load a replica sustains, as a part of its capacity."""
        insort(self._loads.setdefault(_similarity_key(server, slo), []), (_relative_slack(server, slo), load))

    def load(self, server: BatchServer, slo: Slo) -> float:
        """Return about the load a replica sustains, 0.0 without a known load on both sides."""
        known, slack = self._loads.get(_similarity_key(server, slo), []), _relative_slack(server, slo)
        place = bisect_left(known, (slack, 0.0))
        if not 0 < place < len(known):
            return 0.0
        (low, least), (high, most) = known[place - 1], known[place]
        return least if high <= low else least + (most - least) * (slack - low) / (high - low)


def _similarity_key(server: BatchServer, slo: Slo) -> tuple[float, ...]:
    shape = round(_ALIKE * server.latency_ms[0] / server.latency_ms[-1])
    return server.batch, server.processes, shape, round(_ALIKE * server.latency_cv), slo.percentile


def _relative_slack(server: BatchServer, slo: Slo) -> float:
    return (slo.latency_ms - server.overhead_ms) / server.latency_ms[-1]
