"""Options of ``gpuprof load``, in groups: what is sent, and how the server is reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.errors import InputError, unknown_name

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.serving.load.load import LoadSettings, RequestStream
    from gpuprof.serving.load.target import Target
    from gpuprof.simulator.trace import Trace

#: A trace ends with its last request, which is a part of it.
_AFTER_THE_LAST_S = 1e-6
_DURATION_S = 20.0


@dataclass(frozen=True)
class Traffic:
    """Which requests are sent, and how long."""

    duration: Annotated[
        float | None, typer.Option(help="Seconds that count; 20, or as long as the trace.", min=0.1)
    ] = None
    rate: Annotated[list[str] | None, typer.Option(help="MODEL=REQUESTS_PER_S, instead of the map's.")] = None
    rate_scale: Annotated[float, typer.Option(help="Times the rates.", min=1e-6)] = 1.0
    trace: Annotated[Path | None, typer.Option(help="Instead replay this CSV of time_s,model.")] = None
    arrivals: Annotated[str, typer.Option(help="poisson, gamma or constant.")] = "poisson"
    scv: Annotated[float, typer.Option(help="Burstiness of gamma; Poisson is 1.", min=0.01)] = 4.0
    warmup: Annotated[float, typer.Option(help="Seconds before those that count.", min=0.0)] = 2.0
    clients: Annotated[int | None, typer.Option(help="Client processes; as many as needed.", min=1)] = None
    seed: Annotated[int, typer.Option(help="Same seed, same traffic.", min=0)] = 0

    def load(self, deployment: DeploymentMap | None, map_file: Path | None) -> tuple[list[RequestStream], LoadSettings]:
        """Return what is sent to each model of the map, or without one to each that is named, and how.

        Raises
        ------
        InputError
            When nothing says what to send, a model is not in the map, or a trace cannot be read or stands beside rates.
        """
        from gpuprof.pipeline.load_traffic import streams_at_rates, streams_of_trace
        from gpuprof.serving.load.traffic import ARRIVALS

        if self.arrivals not in ARRIVALS:
            raise unknown_name("kind of arrivals", self.arrivals, list(ARRIVALS))
        if self.trace is None:
            streams = streams_at_rates(deployment, map_file, self.rate or [], self.rate_scale)
            return streams, self._settings(self.duration)
        recorded = self._recorded(self.trace)
        whole_s = recorded.duration_s + _AFTER_THE_LAST_S
        streams = streams_of_trace(deployment, map_file, recorded)
        return streams, self._settings(min(self.duration or whole_s, whole_s))

    def _recorded(self, path: Path) -> Trace:
        from gpuprof.simulator.trace import read_trace

        if self.rate or self.rate_scale != 1.0:
            raise InputError("--trace says when requests come: --rate and --rate-scale cannot change that")
        return read_trace(path)

    def _settings(self, duration_s: float | None) -> LoadSettings:
        from gpuprof.serving.load.load import LoadSettings

        return LoadSettings(duration_s or _DURATION_S, self.warmup, self.seed, self.arrivals, self.scv, self.clients)


@dataclass(frozen=True)
class Admission:
    """What the server must be shown, and whom to trust."""

    token_file: Annotated[Path | None, typer.Option(help="File with the server's token; or GPUPROF_TOKEN.")] = None
    ca_file: Annotated[
        Path | None, typer.Option(help="Certificate (PEM) to trust on https; what the system trusts unless given.")
    ] = None

    def target(self, address: str) -> Target:
        """Return the server at ``address``, which answers.

        Raises
        ------
        InputError
            When the address or a file is not what it should be.
        UnavailableError
            When nobody answers there.
        """
        from gpuprof.serving.load.target import Target
        from gpuprof.serving.transport.security import read_token

        server = Target.parse(address, read_token(self.token_file), self.ca_file)
        server.get("/v2")  # before time is spent on predicting what nobody answers
        return server
