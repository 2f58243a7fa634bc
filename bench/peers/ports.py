"""Where a peer listens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ports:
    """Ports of the loopback interface."""

    http: int
    grpc: int
