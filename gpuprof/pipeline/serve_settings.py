"""Settings of a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from gpuprof.domain.validation import Count, Fraction, NotNegative, Port, Positive
from gpuprof.errors import InputError
from gpuprof.pipeline.settings import Settings, option

_LISTENING, _WORKERS, _LIMITS = "Address and routing", "Workers", "Limits of memory and time"
_ADAPTATION, _SECURITY, _TELEMETRY = "Adaptation to load", "Authentication, TLS and edge", "Traces and log"


class ServeSettings(Settings):
    """Address, limits, adaptation and security of a server.

    Raises `InputError` when a request may be larger than all memory for tensors, or HTTP and gRPC are to share a port.
    """

    host: str = option("127.0.0.1", "Address to listen on.", panel=_LISTENING)
    port: Port = option(8000, "HTTP port; 0 takes any free one.", panel=_LISTENING)
    grpc_port: Port | None = option(None, "gRPC port; 0 takes any free one; default: no gRPC.", panel=_LISTENING)
    routing: str = option(
        "fastest", "Rule that picks the replica of a request: fastest or round-robin.", panel=_LISTENING
    )
    node: str | None = option(None, "Node of the map that this machine is.", panel=_WORKERS)
    simulate: bool = option(
        False, "Simulate the models: each batch takes the time predicted in the map.", panel=_WORKERS
    )
    engine: str = option(
        "local",
        "Place of the workers: local, or ray for the nodes of a Ray cluster that the map names.",
        panel=_WORKERS,
    )
    ray_address: str | None = option(
        None, "Address of the Ray cluster; default: this machine's.", envvar="RAY_ADDRESS", panel=_WORKERS
    )
    apply_mig: bool = option(
        False, "Cut GPUs into the map's MIG instances, and put the old layout back at the end.", panel=_WORKERS
    )
    allow_changed: bool = option(False, "Serve model files that changed since the map was planned.", panel=_WORKERS)
    buffer_mb: Count = option(1024, "Memory in MiB for the tensors of all requests in progress.", panel=_LIMITS)
    max_body_mb: Count = option(64, "Largest inference request, in MiB.", panel=_LIMITS)
    hang_s: Positive = option(5.0, "Time after which a silent worker is replaced.", unit="s", panel=_LIMITS)
    drain_s: NotNegative = option(30.0, "Time for the last answers after Ctrl-C.", unit="s", panel=_LIMITS)
    max_connections: Count = option(16_384, "Maximum number of client connections.", panel=_LIMITS)
    shadow: bool = option(
        False, "Keep standbys with a larger share, for models whose p99 passes its SLO.", panel=_ADAPTATION
    )
    adapt: bool = option(False, "Plan a new map when rates or latencies deviate from the plan.", panel=_ADAPTATION)
    adapt_period_s: Positive = option(
        5.0, "Time over which --adapt measures.", "--adapt-period", unit="s", panel=_ADAPTATION
    )
    adapt_output: Path | None = option(
        None, "File for the maps of --adapt; default: MAP.adapted.json.", panel=_ADAPTATION
    )
    db: Path | None = option(None, "Kernel database, for --adapt.", panel=_ADAPTATION)
    estimator: str | None = option(None, "Estimator for the plans of --adapt; default: the map's.", panel=_ADAPTATION)
    token_file: Path | None = option(
        None, "File with the token that clients must send; default: GPUPROF_TOKEN.", panel=_SECURITY
    )
    public: bool = option(False, "Listen on every address, behind the edge; needs a token and TLS.", panel=_SECURITY)
    envoy: Path | None = option(
        None, "Envoy binary, for gRPC, TLS and --public; default: that of the extra edge.", panel=_SECURITY
    )
    tls_cert: Path | None = option(None, "Certificate chain (PEM), to serve https and grpcs.", panel=_SECURITY)
    tls_key: Path | None = option(None, "Private key of the certificate (PEM).", panel=_SECURITY)
    insecure: bool = option(False, "Accept clients on other machines without a token or TLS.", panel=_SECURITY)
    otlp: str | None = option(
        None, "Send OpenTelemetry traces to this collector, http://HOST:4318.", metavar="URL", panel=_TELEMETRY
    )
    otlp_sample: Fraction = option(1.0, "Fraction of the requests to trace.", panel=_TELEMETRY)
    log: str = option("text", "Form of the log on stderr: text or json.", panel=_TELEMETRY)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.buffer_mb < self.max_body_mb:
            raise InputError(
                f"--buffer-mb must be at least --max-body-mb but got {self.buffer_mb} and {self.max_body_mb}"
            )
        if self.port and self.port == self.grpc_port:
            raise InputError(f"--port and --grpc-port are both {self.port}", "give them different ports")
        return self

    def to_message(self) -> dict[str, Any]:
        """Return the settings as plain values for JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> ServeSettings:
        """Return the settings that `to_message` described."""
        return cls(**message)
