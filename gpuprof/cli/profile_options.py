"""The options of ``gpuprof profile``, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.completion import complete_devices
from gpuprof.cli.data_files import parse_data_files
from gpuprof.cli.duration_option import duration_option
from gpuprof.cli.shared_options import CollectorOption, InputDataOption, KeepUnstableOption, RayAddressOption
from gpuprof.domain.sizes import parse_dims
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.pipeline.profile_result import ProfileSettings


@dataclass(frozen=True)
class WorkloadOptions:
    """What of the models is measured."""

    batch: Annotated[
        str | None,
        typer.Option(
            help="Batch sizes, separated by commas; default: 1,2,4,8, or the only one that a model can be run at."
        ),
    ] = None
    share: Annotated[
        str | None,
        typer.Option(
            help="Shares to measure: 50 (percent), 1core, 3g.40gb. Default on a CPU: 1, 2, 4, … and all cores."
        ),
    ] = None
    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZE[,SIZE...]", help="Sizes of a free dimension to measure at; may be repeated."),
    ] = None
    processes: Annotated[str, typer.Option(help="Numbers of processes that share one share, separated by commas.")] = (
        "1"
    )
    input_data: InputDataOption = None
    beside: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL[@BATCH[:SHARE]]", help="Model to run beside the measured ones; may be repeated."),
    ] = None

    def batches(self) -> tuple[int, ...] | None:
        """Return the batch sizes, ascending; None: those that fit the model.

        Raises `InputError` when one cannot be read.
        """
        from gpuprof.profiling.sweep.planning import parse_batches

        return None if self.batch is None else parse_batches(self.batch)

    def dims(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of each free dimension that is named. Raises `InputError` when one cannot be read."""
        return parse_dims(self.dim or ())

    def shares(self) -> list[str] | None:
        """Return the shares as they were written; None: those of the device."""
        return None if self.share is None else self.share.split(",")

    def copies(self) -> tuple[int, ...]:
        """Return the numbers of processes, ascending. Raises `InputError` when one cannot be read."""
        from gpuprof.pipeline.profile import MOST_PROCESSES
        from gpuprof.profiling.sweep.planning import parse_batches

        return parse_batches(self.processes, "--processes", MOST_PROCESSES)


@dataclass(frozen=True)
class MeasurementOptions:
    """With what it is measured, and how long."""

    collector: CollectorOption = "auto"
    device: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete_devices,
            help="Device to measure: cpu, gpu or a GPU's name; default: the first GPU that can be measured, else the "
            "CPU; with --from-report the GPU recorded on, where the report does not say.",
        ),
    ] = None
    device_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file with GPUs that gpuprof does not know, for --from-report."),
    ] = None
    time_limit: Annotated[
        float, duration_option("--time-limit", "Longest time to measure one row.", least_s=0.1, most_s=86400.0)
    ] = 10.0
    profiler_limit: Annotated[
        float,
        duration_option(
            "--profiler-limit", "Time after which a profiler counts as hung and is ended.", least_s=1.0, most_s=86400.0
        ),
    ] = 900.0
    force: Annotated[bool, typer.Option("--force", help="Measure again what is in the database already.")] = False
    keep_unstable: KeepUnstableOption = False

    def settings(self, workloads: WorkloadOptions, processes: tuple[int, ...] = (1,)) -> ProfileSettings:
        """Return the settings of a measurement of ``workloads`` with ``processes`` processes."""
        from gpuprof.pipeline.profile_result import ProfileSettings

        return ProfileSettings(
            self.collector,
            processes,
            self.time_limit,
            self.profiler_limit,
            self.force,
            self.keep_unstable,
            workloads.dims(),
            parse_data_files(workloads.input_data or ()),
        )


@dataclass(frozen=True)
class OtherMeasurements:
    """What is done instead of measuring whole models at these batches and shares."""

    per_op: Annotated[
        bool, typer.Option("--per-op", help="Measure each distinct op of all models once, as a model of its own.")
    ] = False
    igniter: Annotated[
        bool, typer.Option("--igniter", help="Measure what calibrate needs: 11 configurations, 2 to 5 copies at once.")
    ] = False
    from_report: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="REPORT",
            help="Report to read in place of running: .nsys-rep, .sqlite, .ncu-rep, .csv, trace.json or ONNX Runtime's "
            "profile; reports of one run are joined: kernels, counters, nodes.",
        ),
    ] = None
    runs: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN|N",
            help="Runs of the model in a report: a regular expression for names of ranges, whose groups model and "
            "batch tell several apart, or their number.",
        ),
    ] = None


@dataclass(frozen=True)
class ClusterOptions:
    """Where it is measured."""

    engine: Annotated[
        str, typer.Option(help="Place to measure: local, or ray for the GPUs or machines of a Ray cluster.")
    ] = "local"
    ray_address: RayAddressOption = None

    def words(self, workloads: WorkloadOptions, means: MeasurementOptions, instead: OtherMeasurements) -> list[str]:
        """Return the options that each place of the cluster is to be given.

        Raises `InputError` when there is no such engine, or it does not measure ops.
        """
        if self.engine != "ray" or instead.per_op:
            raise InputError(f"--engine must be local, or ray without --per-op, but got {self.engine}")
        given = {
            "share": workloads.share,
            "processes": workloads.processes,
            "collector": means.collector,
            "time-limit": f"{means.time_limit:g}",
            "profiler-limit": f"{means.profiler_limit:g}",
        }
        words = [f"--{name}={value}" for name, value in given.items() if value is not None]
        words += [f"--beside={text}" for text in workloads.beside or ()]
        words += [f"--dim={text}" for text in workloads.dim or ()]
        words += [f"--input-data={text}" for text in workloads.input_data or ()]
        words += ["--keep-unstable"] * means.keep_unstable
        return [*words, *["--force"] * means.force, *["--igniter"] * instead.igniter]
