"""Options of planning, and of the map's output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.domain.argument_types import Seed, check_fields
from gpuprof.pipeline.arguments import PathArgument

if TYPE_CHECKING:
    from gpuprof.estimators.cross_gpu.execution import Execution
    from gpuprof.placement.problem import Options


@check_fields
@dataclass(frozen=True, slots=True)
class PlanningOptions:
    """What a map must keep, how large its replicas may be, and how policies search.

    Attributes
    ----------
    estimator : str
        By name: ``"database"``, ``"measured"``, ``"gk"``, ``"igniter"``, ``"usher"``, or ``"module:Class"``.
    arrivals : str or None
        Shape of every model's requests, as in ``"gamma:4"``, ``"batch:8"`` or ``"mmpp:3,2s"``, or the path of a trace,
        of which each model named has its own; None: Poisson.
    confidence : float or None
        Plan on the upper end of the estimates' intervals, 0.9 for 90%, 0 on the means; None: on the means of what was
        measured or interpolated, at the upper ends of everything else.
    latency_budget : float or None
        Instead of queueing: a batch may take this fraction of the SLO.
    max_batch : int
        Largest batch size.
    max_processes : int or None
        Most processes of one replica; None: three in a MIG instance where some model was measured on a device of the
        fleet, else one: what several do to one another is not guessed.
    overhead_ms : float or None
        Time of a request outside its replica; None: as ``profile`` measured it.
    isolate : bool
        Give every replica a share of its own, on CPUs too; by default lightly loaded models take turns in one share.
    time_limit_s : float or None
        After so long, policies that search take the best map so far. `gpuprof.place` counts reading the models and
        checking the map towards it, but leaves 1.5 s of it to the search, of less than three seconds the half.
    limit_since_s : float or None
        What ``time.monotonic()`` said when the limit of `gpuprof.place` began; None: when it is called.
    seed : int
        Of policies that draw random numbers.
    created : str or None
        Time that the map says it was made at; None: that of ``SOURCE_DATE_EPOCH``, else none.
    precision, runtime : str or None
        In which arithmetic and by which runtime models run of which nothing was measured on a GPU; see
        `gpuprof.estimate`.
    strict : bool
        Refuse estimates with ops that nothing is known of, or whose interval reaches over twice the value.
    device_file : path or None
        TOML file with GPUs that the catalogue lacks.
    dims : mapping of str to int
        Sizes of free dimensions in what is sent, for demands that do not say their own.
    """

    estimator: str = "database"
    arrivals: str | None = None
    confidence: float | None = None
    latency_budget: float | None = None
    max_batch: int = 256
    max_processes: int | None = None
    overhead_ms: float | None = None
    isolate: bool = False
    time_limit_s: float | None = None
    limit_since_s: float | None = None
    seed: Seed = 0
    created: str | None = None
    precision: str | None = None
    runtime: str | None = None
    strict: bool = False
    device_file: PathArgument | None = None
    dims: Mapping[str, int] = field(default_factory=dict)

    def execution(self) -> Execution:
        """Return how models run of which nothing was measured.

        Raises
        ------
        InputError
            When the precision or the runtime is not known.
        """
        from gpuprof.estimators.cross_gpu.execution import parse_execution

        return parse_execution(self.precision, self.runtime)

    def problem_options(self) -> Options:
        """Return them as policies take them; without a given overhead it is 0 there.

        Raises
        ------
        InputError
            When a number is out of its range.
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


@check_fields
@dataclass(frozen=True, slots=True)
class MapOutput:
    """Which map is wanted, and where it is to be written.

    Attributes
    ----------
    path : Path
        Merged models are written beside it.
    merge : bool
        Let models that share a device and weights run as one graph where it pays.
    best_effort : bool
        Whether a map that leaves some demands out may be written.
    """

    path: Path = Path("map.json")
    merge: bool = False
    best_effort: bool = False
