"""Settings of a server: addresses, limits and security."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuprof.serving.change.adapt import AdaptSettings
from gpuprof.serving.transport.security import OPEN, Security
from gpuprof.serving.watch.statistics import SpanTracer


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of a server: addresses, limits and security."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None  #: Port of gRPC; None: no gRPC.
    buffer_bytes: int = 1 << 30  #: Memory for the tensors of all requests and answers together.
    max_body_bytes: int = 64 << 20  #: Size limit of an inference request.
    hang_s: float = 5.0  #: Silence, beyond the expected time of its batches, after which a worker is replaced.
    drain_s: float = 30.0  #: Time limit for answering the accepted requests after a stop signal.
    #: Stall, in the middle of a request or an answer, after which a connection is closed.
    stall_s: float = 30.0
    idle_s: float = 300.0  #: Time after which an idle connection is closed.
    max_connections: int = 16_384
    public: bool = False  #: True if HTTP goes through the edge as well.
    envoy: Path | None = None  #: The edge's binary; None: the binary of the extra ``edge``.
    shadow: bool = False  #: True if the standbys of the plan take over from replicas whose model violates its SLO.
    adapt: AdaptSettings | None = None  #: When and how the map is replanned; None: never.
    tracer: SpanTracer | None = None  #: Makes spans of requests.
    security: Security = OPEN  #: Token and certificate.

    @property
    def http_through_edge(self) -> bool:
        """Return whether HTTP goes through the edge."""
        return self.public or bool(self.security.certificate)

    @property
    def needs_edge(self) -> bool:
        """Return whether the server needs an edge."""
        return self.http_through_edge or self.grpc_port is not None
