"""Counts of the protocols, for metrics and readiness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuprof.serving.watch.stalls import StallMeter


@dataclass(frozen=True, slots=True)
class ProtocolFigures:
    """Counts of the protocols, in addition to the router's."""

    #: Refusals by protocol, the HTTP status of their reason, and the reason.
    refusals: Mapping[tuple[str, int, str], int]
    turned_away: int  #: Connections beyond the bound.
    stalls: StallMeter
    edge_restarts: int | None = None  #: Restarts of the edge; None: no edge.
