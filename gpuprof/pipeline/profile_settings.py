"""Settings of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from gpuprof.domain.share import Share
from gpuprof.domain.validation import Count, NotNegative, Positive
from gpuprof.pipeline.settings import Batches, DataFiles, ManyDims, Settings, option, split_names

if TYPE_CHECKING:
    from gpuprof.profiling.worker.job import TimingLimits


class ProfileWorkloads(Settings):
    """Workloads to measure, and the database."""

    title: ClassVar[str] = "Workloads"
    usual_batches: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)  #: Default batch sizes.

    batches: Batches | None = option(
        None,
        "Batch sizes, separated by commas; default: 1,2,4,8, or the only one that a model can be run at.",
        "--batch",
    )
    shares: Annotated[tuple[str | Share, ...] | None, BeforeValidator(split_names)] = option(
        None,
        "Shares to measure: 50 (percent), 1core, 3g.40gb. Default on a CPU: 1, 2, 4, … and all cores.",
        "--share",
    )
    beside: tuple[str, ...] = option(
        (),
        "Model to run beside the measured ones; may be repeated.",
        metavar="MODEL[@BATCH[:SHARE]]",
        repeated=True,
    )
    device: str | None = option(
        None,
        "Device to measure: cpu, gpu or a GPU's name; default: the first GPU that can be measured, else the CPU; with "
        "--from-report the recorded GPU, where the report does not name it.",
        values="devices",
    )
    igniter: bool = option(False, "Measure the data for calibrate: 11 configurations, and 2 to 5 copies at once.")
    db: Path | None = option(None, "Kernel database, created if missing; default: GPUPROF_DB, or gpuprof-db.")


class ProfileSettings(Settings):
    """Collector, processes, inputs and time limits of measurements."""

    title: ClassVar[str] = "Measurement"

    collector: str = option("auto", "Collector; auto takes the first that is available.")
    processes: Batches = option((1,), "Numbers of processes that share one share, separated by commas.")
    dims: ManyDims = option(
        {},
        "Sizes of a free dimension, measured in every combination; may be repeated.",
        "--dim",
        metavar="NAME=SIZE[,SIZE...]",
        repeated=True,
    )
    precision: Literal["float16"] | None = option(
        None,
        "Precision of the measured models: float16 measures converted copies, as NAME-float16; default: the files as "
        "they are.",
    )
    input_data: DataFiles = option(
        {},
        "Input data: .npz, or JSON as perf_analyzer's; default: random. May be repeated.",
        metavar="[MODEL=]FILE",
        repeated=True,
    )
    time_limit_s: Positive = option(10.0, "Longest time to measure one row.", "--time-limit", unit="s")
    repeat: Count = option(1, "Runs of each row in separate processes; all rows are run once before any is run again.")
    repeat_every_s: NotNegative = option(0.0, "Minimum time between the runs of --repeat.", "--repeat-every", unit="s")
    force: bool = option(False, "Measure rows again that the database already has.")
    keep_unstable: bool = option(False, "Keep unstable rows as they are instead of measuring them again.")

    def limits(self) -> TimingLimits:
        """Return the time limits of a measurement."""
        from gpuprof.profiling.worker.job import limits_within

        return limits_within(self.time_limit_s)


class ReportSettings(Settings):
    """Reports of profilers, in place of measurements."""

    title: ClassVar[str] = "Reports of profilers"

    reports: tuple[Path, ...] = option(
        (),
        "Report to read in place of running: .nsys-rep, .sqlite, .ncu-rep, .csv, trace.json or ONNX Runtime's profile; "
        "reports of one run are joined: kernels, counters, nodes.",
        "--from-report",
        metavar="REPORT",
        repeated=True,
    )
    runs: str | None = option(
        None,
        "Runs of the model in a report: a regular expression for names of ranges, whose groups model and batch tell "
        "several apart, or their number.",
        metavar="PATTERN|N",
    )
    device_file: Path | None = option(
        None, "TOML file with GPUs that gpuprof does not know, for --from-report.", metavar="FILE"
    )
