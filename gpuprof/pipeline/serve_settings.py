"""How a map is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpuprof.domain.argument_types import Count, Fraction, NotNegative, Port, Positive, check_fields
from gpuprof.errors import InputError
from gpuprof.pipeline.arguments import PathArgument

#: Where a server listens unless told otherwise.
DEFAULT_PORT = 8000


@check_fields
@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How a server listens, what it allows, how it follows its load, and whom it answers.

    Attributes
    ----------
    host : str
        Address to listen on; loopback unless said otherwise.
    port, grpc_port : int, int or None
        HTTP port, and gRPC port where there is to be one; 0: any that is free.
    routing : str
        Choice among replicas: ``"fastest"`` or ``"round-robin"``.
    node : str or None
        Which node of the map this machine is.
    simulate : bool
        Compute nothing; batches take the time that the map predicts.
    engine : str
        Where the workers run: ``"local"``, or ``"ray"``: on the nodes of a Ray cluster that the map names.
    ray_address : str or None
        The Ray cluster; None: the one of this machine.
    apply_mig : bool
        Cut GPUs into the map's MIG instances, and put them back in the end.
    allow_changed : bool
        Serve model files that are others than the map was planned with.
    buffer_mb, max_body_mb : int
        Memory for all tensors on their way, and the largest inference request, in MiB.
    hang_s : float
        Silence after which a worker is replaced.
    drain_s : float
        Time for the last answers after the server was told to stop.
    max_connections : int
        Most connections of clients.
    shadow : bool
        Keep standbys with a larger share for models whose p99 passes its SLO.
    adapt : bool
        Replan the map when rates or latencies leave the bounds that it was planned for.
    adapt_period_s : float
        Over which that is measured.
    adapt_output : path or None
        Where the new maps are written; None: ``MAP.adapted.json`` beside the map.
    db : path or None
        Kernel database, for `adapt`.
    estimator : str or None
        Name of another estimator than the map was planned with, for `adapt`.
    token_file : path or None
        File with the token that clients must send; None: that of ``GPUPROF_TOKEN``, if there is one.
    public : bool
        Listen on every address, behind the edge, which needs a token and TLS.
    envoy : path or None
        Envoy binary for gRPC, TLS and `public`; None: that of the extra ``edge``.
    tls_cert, tls_key : path or None
        Certificate chain and private key (PEM): serve https and grpcs.
    insecure : bool
        Let other machines in without a token or without TLS.
    otlp : str or None
        OpenTelemetry collector for traces, ``http://HOST:4318``.
    otlp_sample : float
        Part of the requests to trace.
    log : str
        Form of the log on stderr: ``"text"`` or ``"json"``.

    Raises
    ------
    InputError
        When a request may be larger than all memory for tensors, or HTTP and gRPC are to share a port.
    """

    host: str = "127.0.0.1"
    port: Port = DEFAULT_PORT
    grpc_port: Port | None = None
    routing: str = "fastest"
    node: str | None = None
    simulate: bool = False
    engine: str = "local"
    ray_address: str | None = None
    apply_mig: bool = False
    allow_changed: bool = False
    buffer_mb: Count = 1024
    max_body_mb: Count = 64
    hang_s: Positive = 5.0
    drain_s: NotNegative = 30.0
    max_connections: Count = 16_384
    shadow: bool = False
    adapt: bool = False
    adapt_period_s: Positive = 5.0
    adapt_output: PathArgument | None = None
    db: PathArgument | None = None
    estimator: str | None = None
    token_file: PathArgument | None = None
    public: bool = False
    envoy: PathArgument | None = None
    tls_cert: PathArgument | None = None
    tls_key: PathArgument | None = None
    insecure: bool = False
    otlp: str | None = None
    otlp_sample: Fraction = 1.0
    log: str = "text"

    def __post_init__(self) -> None:
        if self.buffer_mb < self.max_body_mb:
            raise InputError(
                f"--buffer-mb must be at least --max-body-mb but got {self.buffer_mb} and {self.max_body_mb}"
            )
        if self.port and self.port == self.grpc_port:
            raise InputError(f"--port and --grpc-port are both {self.port}", "give them different ports")

    def to_message(self) -> dict[str, Any]:
        """Return the settings as plain values for JSON."""
        paths = ("adapt_output", "db", "token_file", "envoy", "tls_cert", "tls_key")
        return {k: str(v) if k in paths and v is not None else v for k, v in asdict(self).items()}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> ServeSettings:
        """Return the settings that `to_message` described."""
        return cls(**message)
