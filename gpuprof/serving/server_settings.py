"""How a server listens and what it allows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuprof.serving.change.adapt import AdaptSettings
from gpuprof.serving.transport.security import OPEN, Security
from gpuprof.serving.watch.tracing import SpanTracer


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server listens and what it allows."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None  #: None: no gRPC.
    routing: str = "fastest"  #: Name of a routing rule.
    buffer_bytes: int = 1 << 30  #: Memory for the tensors of all requests and answers together.
    max_body_bytes: int = 64 << 20  #: Of one inference request.
    hang_s: float = 5.0  #: Beyond what its batches should take, silence after which a worker is replaced.
    drain_s: float = 30.0  #: How long requests may take to be answered after the server was told to stop.
    #: Time after which a connection that stalls in the middle of a request or an answer is closed.
    stall_s: float = 30.0
    idle_s: float = 300.0  #: Time after which an idle connection is closed.
    max_connections: int = 16_384
    public: bool = False  #: Whether HTTP, too, goes through the edge.
    envoy: Path | None = None  #: The edge's binary; None: that of the extra ``edge``.
    shadow: bool = False  #: Whether the standbys of the plan take over from replicas whose model breaks its SLO.
    adapt: AdaptSettings | None = None  #: When and how the map is replanned; None: never.
    tracer: SpanTracer | None = None  #: Makes spans of requests.
    security: Security = OPEN  #: Token and certificate.

    @property
    def http_through_edge(self) -> bool:
        """Whether HTTP goes through the edge."""
        return self.public or bool(self.security.certificate)

    @property
    def needs_edge(self) -> bool:
        """Whether anything goes through the edge."""
        return self.http_through_edge or self.grpc_port is not None
