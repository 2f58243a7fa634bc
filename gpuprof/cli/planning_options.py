"""Options that ``gpuprof place`` and ``gpuprof compare`` share, in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.completion import complete_devices
from gpuprof.cli.duration_option import duration_option
from gpuprof.cli.option_groups import fill_settings
from gpuprof.cli.shared_options import DeviceFileOption, OptionalDbOption, PrecisionOption, RuntimeOption, StrictOption
from gpuprof.domain.demand import Demand, read_demands
from gpuprof.domain.sizes import parse_dims, single_sizes
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.pipeline.planning_options import PlanningOptions


@dataclass(frozen=True)
class DemandOptions:
    """Which demands are placed, and onto which devices."""

    slo_file: Annotated[Path, typer.Option(help="CSV file with the columns model,rate_rps,slo_ms.")] = Path("slo.csv")
    gpus: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete_devices,
            help="Devices to place on: a100-80:8,v100 or any; without a count, as many as needed.",
        ),
    ] = None
    fleet: Annotated[Path | None, typer.Option(help="TOML file with devices, counts and prices.")] = None
    db: OptionalDbOption = None

    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZE", help="Size of a free dimension where the CSV gives none; repeatable."),
    ] = None

    def read_file(self) -> Sequence[Demand]:
        """Return the demands of the file, before what plans them is imported: a wrong line is reported at once.

        Raises `InputError` when the file holds no demands.
        """
        return read_demands(self.slo_file)

    def dims(self) -> dict[str, int]:
        """Return the size of each free dimension that is named.

        Raises `InputError` when one cannot be read, or is given several.
        """
        return single_sizes(parse_dims(self.dim or ()))

    def devices(self) -> Path | str | None:
        """Return the devices as `gpuprof.place` takes them. Raises `InputError` when they are named twice."""
        if self.gpus is not None and self.fleet is not None:
            raise InputError("--gpus and --fleet exclude each other", "leave one of them out")
        return self.fleet if self.gpus is None else self.gpus


@dataclass(frozen=True)
class PlanningRuleOptions:
    """What a map must keep, how large its replicas may be, and whose times it rests on."""

    estimator: Annotated[
        str, typer.Option(help="Estimator: database, measured, gk, igniter, usher, or package.module:Class.")
    ] = "database"
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Arrival process: gamma:4, batch:8, mmpp:3,2s, or a trace (of each model by name); default: poisson."
        ),
    ] = None
    confidence: Annotated[
        float | None, typer.Option(help="Confidence to plan at: 0.9 is the upper ends of all intervals, 0 the means.")
    ] = None
    latency_budget: Annotated[
        float | None, typer.Option(help="Fraction of the SLO that a batch may take, in place of the queueing model.")
    ] = None
    max_batch: Annotated[int, typer.Option(help="Largest batch size.")] = 256
    max_processes: Annotated[
        int | None,
        typer.Option(help="Most processes of one replica; default: 3 in a MIG instance of measured models, else 1."),
    ] = None
    isolate: Annotated[
        bool,
        typer.Option(
            "--isolate", help="Share of its own for every replica; by default, models may take turns on a CPU."
        ),
    ] = False
    overhead_ms: Annotated[
        float | None,
        duration_option(
            "--overhead-ms",
            "Time in ms that a request spends outside its replica; default: as profile measured it.",
            least_s=0.0,
            unit="ms",
        ),
    ] = None

    precision: PrecisionOption = None
    runtime: RuntimeOption = None
    device_file: DeviceFileOption = None
    strict: StrictOption = False

    def planning_options(
        self, time_limit_s: float | None, seed: int, dims: Mapping[str, int], created: str | None = None
    ) -> PlanningOptions:
        """Return them, with how policies are to search and when the map is made, as the pipeline takes them."""
        from gpuprof.pipeline.planning_options import PlanningOptions

        return fill_settings(PlanningOptions, self, time_limit_s=time_limit_s, seed=seed, created=created, dims=dims)
