"""Options of planning, and of the map's output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpuprof.domain.estimate import Estimator
from gpuprof.domain.validation import NotNegative, Positive, Seed
from gpuprof.pipeline.settings import DEVICE_FILE, HOST_US, PRECISION, RUNTIME, Dims, Settings, option

if TYPE_CHECKING:
    from gpuprof.estimators.cross_gpu.execution import Execution
    from gpuprof.placement.problem import Options

#: Default seconds of a search without a natural end, or of one among many.
DEFAULT_LIMIT_S = 10.0
_SEARCH, _OUTPUT = "Search", "Output"


class PlanningOptions(Settings):
    """Constraints of a map, limits of its replicas, and the search."""

    title: ClassVar[str] = "Constraints and estimator"

    estimator: str | Estimator = option(
        "database", "Estimator: database, measured, gk, igniter, usher, or package.module:Class."
    )
    arrivals: str | None = option(
        None, "Arrival process: gamma:4, batch:8, mmpp:3,2s, or a trace (of each model by name); default: poisson."
    )
    confidence: float | None = option(
        None,
        "Confidence to plan at: 0.9 is the upper ends of all intervals, 0 the means; default: upper ends of everything "
        "that was not measured or is unstable, means of the rest.",
    )
    latency_budget: float | None = option(
        None, "Fraction of the SLO that a batch may take, in place of the queueing model."
    )
    max_batch: int = option(256, "Largest batch size.")
    max_processes: int | None = option(
        None, "Maximum number of processes of a replica; default: 3 in a MIG instance of measured models, else 1."
    )
    isolate: bool = option(
        False, "Separate process and share for every replica; by default, light models share workers."
    )
    overhead_ms: NotNegative | None = option(
        None, "Time in ms that a request spends outside its replica; default: measured by profile.", unit="ms"
    )
    precision: str | None = option(None, PRECISION)
    runtime: str | None = option(None, RUNTIME)
    host_us: Positive | None = option(None, HOST_US)
    device_file: Path | None = option(None, DEVICE_FILE, metavar="FILE")
    strict: bool = option(False, "Refuse estimates with unknown ops or wide intervals.")
    dims: Dims = option(
        {},
        "Size of a free dimension where the CSV gives none; repeatable.",
        "--dim",
        metavar="NAME=SIZE",
        repeated=True,
    )
    time_limit_s: Positive | None = option(
        None,
        "Time of the search, after which the best map so far is taken, as at Ctrl-C; default: 10s, in compare for each "
        "policy or GPU.",
        "--time-limit",
        unit="s",
        panel=_SEARCH,
    )
    seed: Seed = option(0, "Seed of policies that draw random numbers.", panel=_SEARCH)
    created: str | None = option(
        None, "Time of creation to write into the map; default: SOURCE_DATE_EPOCH, or none.", panel=_OUTPUT
    )

    def execution(self) -> Execution:
        """Return precision and runtime of unmeasured models.

        Raises
        ------
        InputError
            When the precision or the runtime is unknown.
        """
        from gpuprof.estimators.cross_gpu.execution import parse_execution

        return parse_execution(self.precision, self.runtime, self.host_us)

    def problem_options(self) -> Options:
        """Return the options in the form of policies, with an overhead of 0 unless given.

        Raises
        ------
        InputError
            When a number is out of range.
        """
        from gpuprof.placement.problem import Options

        return Options(
            confidence=self.confidence,
            latency_budget=self.latency_budget,
            max_batch=self.max_batch,
            max_processes=self.max_processes,
            overhead_ms=self.overhead_ms or 0.0,
            isolate=self.isolate,
            time_limit_s=self.time_limit_s,
            seed=self.seed,
        )


class MapOutput(Settings):
    """The output of a plan: the file, and conditions for writing the map."""

    title: ClassVar[str] = _OUTPUT

    path: Path = option(
        Path("map.json"),
        "File to write the map to; merged models are written beside it.",
        "-o",
        "--output",
        output=True,
    )
    merge: bool = option(False, "Let models that share a device and weights run as one graph where it pays.")
    best_effort: bool = option(False, "Write the map even when some demands cannot be met.")
    triton_repository: Path | None = option(
        None,
        "Triton model repository: the SLO file names its models, and a configuration of each for the plan is written "
        "to MODEL/configs/NODE.pbtxt.",
    )


class ComparisonOptions(PlanningOptions):
    """Constraints and search of maps for comparison only."""

    created: str | None = option(None, "Time of creation that maps hold.", hidden=True)
