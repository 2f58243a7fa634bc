"""What the protocols count, for metrics and readiness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuprof.serving.watch.stalls import StallMeter


@dataclass(frozen=True, slots=True)
class RelayFigures:
    """How the relay of gRPC has fared since the server started."""

    ended: int  #: How often it ended, killed by others or by itself.
    hung: int  #: How often it was killed because it did not answer.
    silent_s: float  #: For how long it has owed an answer now, without the time in which it or the router had no core.


@dataclass(frozen=True, slots=True)
class ProtocolFigures:
    """Counts of the protocols, beside those of the router."""

    #: Answers that say no, by protocol, HTTP's status for what is wrong, and reason.
    refusals: Mapping[tuple[str, int, str], int]
    turned_away: int  #: Connections, and calls of gRPC, beyond those that an address may have.
    stalls: StallMeter
    relay: RelayFigures | None = None  #: None: gRPC is not served.
