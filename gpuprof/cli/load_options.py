"""Options of ``gpuprof load``, in groups: what is sent, and how the server is reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.data_files import parse_data_files
from gpuprof.cli.option_groups import fill_settings
from gpuprof.cli.shared_options import AllowChangedOption, InputDataOption, RateScaleOption, ReplayedTraceOption
from gpuprof.domain.named_values import collect_distinct
from gpuprof.domain.sizes import parse_dims, single_sizes
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.pipeline.load_traffic import LoadTraffic, ServerAccess


_MOST_RPS = 1e7
#: Of what is measured, at least.
_LEAST_S = 0.1


@dataclass(frozen=True)
class TrafficOptions:
    """Which requests are sent, and how long."""

    duration: Annotated[
        str | None, typer.Option(help="Measured time, such as 60s or 5m; default: 20s, or the length of the trace.")
    ] = None
    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZE", help="Size of a free dimension in what is sent; may be repeated."),
    ] = None
    input_data: InputDataOption = None
    rate: Annotated[
        list[str] | None, typer.Option(help="Rate as MODEL=REQUESTS_PER_S in place of the map's; may be repeated.")
    ] = None
    rate_scale: RateScaleOption = 1.0
    trace: ReplayedTraceOption = None
    arrivals: Annotated[str, typer.Option(help="Arrival process: poisson, gamma or constant.")] = "poisson"
    scv: Annotated[
        float, typer.Option(help="Squared coefficient of variation of gamma arrivals; Poisson has 1.", min=0.01)
    ] = 4.0
    concurrency: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[MODEL=]REQUESTS",
            help="Closed loop: requests on their way at any time, of each model; in place of rates. May be repeated.",
        ),
    ] = None
    stability: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT", help="Measure until three windows in a row differ by no more than this.", min=0.1
        ),
    ] = None
    window: Annotated[str, typer.Option(help="Length of a window of --stability.")] = "5s"
    max_windows: Annotated[int, typer.Option(help="Windows after which --stability gives up.", min=3)] = 10
    warmup: Annotated[str, typer.Option(help="Time before the measured time.")] = "2s"
    clients: Annotated[int | None, typer.Option(help="Client processes; default: as many as needed.", min=1)] = None
    allow_changed: AllowChangedOption = False
    seed: Annotated[int, typer.Option(help="Seed of the traffic.", min=0)] = 0

    def load_traffic(self) -> LoadTraffic:
        """Return the traffic as `gpuprof.load` takes it.

        Raises `InputError` when a rate or a duration cannot be read.
        """
        from gpuprof.domain.duration import parse_duration
        from gpuprof.pipeline.load_traffic import LoadTraffic

        return fill_settings(
            LoadTraffic,
            self,
            duration_s=None if self.duration is None else parse_duration(self.duration, "--duration", _LEAST_S),
            rates_rps=collect_distinct("the rate", map(_parse_rate, self.rate or ())),
            warmup_s=parse_duration(self.warmup, "--warmup", least_s=0.0),
            input_data=parse_data_files(self.input_data or ()),
            dims=single_sizes(parse_dims(self.dim or ())),
            concurrency=collect_distinct("the concurrency", map(_parse_concurrency, self.concurrency or ())),
            stability_pct=self.stability,
            window_s=parse_duration(self.window, "--window", _LEAST_S),
        )


@dataclass(frozen=True)
class PredictionOptions:
    """What the measured figures are compared with."""

    db: Annotated[Path | None, typer.Option(help="Kernel database, for --estimator.")] = None
    estimator: Annotated[
        str | None, typer.Option(help="Predict with the times of this estimator, not those of the map.")
    ] = None


@dataclass(frozen=True)
class AccessOptions:
    """What the server must be shown, and whom to trust."""

    token_file: Annotated[Path | None, typer.Option(help="File with the server's token; default: GPUPROF_TOKEN.")] = (
        None
    )
    ca_file: Annotated[
        Path | None, typer.Option(help="Certificate (PEM) to trust on https; default: those of the system.")
    ] = None

    def server_access(self) -> ServerAccess:
        """Return them as `gpuprof.load` takes them."""
        from gpuprof.pipeline.load_traffic import ServerAccess

        return ServerAccess(self.token_file, self.ca_file)


def _parse_concurrency(text: str) -> tuple[str, int]:
    model, separator, count = text.rpartition("=")
    if not count.isdecimal() or (separator and not model):
        raise InputError(f"cannot read the concurrency {text!r}", "write REQUESTS or MODEL=REQUESTS, such as 4")
    return model, int(count)


def _parse_rate(text: str) -> tuple[str, float]:
    model, _, value = text.rpartition("=")
    try:
        rate = float(value)
    except ValueError:
        rate = -1.0
    if model and rate >= _MOST_RPS:
        raise InputError(f"a rate must be below {_MOST_RPS:,.0f} requests/s but got {text!r}", "no machine sends more")
    if not model or not 0.0 < rate < _MOST_RPS:
        raise InputError(f"cannot read the rate {text!r}", "write MODEL=REQUESTS_PER_S, such as resnet50=20")
    return model, rate
