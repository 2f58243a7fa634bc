"""What is to be measured: a model under a share, how often it is repeated, and what runs beside it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share

if TYPE_CHECKING:
    from gpuprof.graph.input_data import Array, InputData, Sample


@dataclass(frozen=True, slots=True)
class TimingLimits:
    """When a measurement ends.

    It ends when the median is known well enough, at least ``min_time_s`` and ``min_repeats`` have passed, and
    either there are ``want_repeats`` (which a 99th percentile needs) or ``want_time_s`` have passed; or when
    ``max_time_s`` are over.
    """

    #: Half the width of the median's 95% confidence interval, as a fraction of the median, that counts as known.
    precision: float = 0.02
    min_repeats: int = 6
    min_time_s: float = 1.0
    want_repeats: int = 100
    want_time_s: float = 3.0
    max_time_s: float = 10.0
    #: Silence of a child, beyond its time limit, after which it is considered dead.
    hang_s: float = 300.0
    #: Time after which a profiler, its loading and post-processing included, is considered hung.
    tool_s: float = 900.0


DEFAULT_LIMITS = TimingLimits()


def limits_within(max_time_s: float, tool_s: float = DEFAULT_LIMITS.tool_s) -> TimingLimits:
    """Return the default limits, cut down to ``max_time_s`` for one measurement and ``tool_s`` for a profiler's run."""
    return replace(
        DEFAULT_LIMITS,
        min_time_s=min(DEFAULT_LIMITS.min_time_s, max_time_s),
        want_time_s=min(DEFAULT_LIMITS.want_time_s, max_time_s),
        max_time_s=max_time_s,
        tool_s=tool_s,
    )


@dataclass(frozen=True, slots=True)
class Job:
    """Copies of one model that run in one share."""

    graph: ModelGraph  #: Bound to the batch size.
    path: Path  #: The file to run, whose batch dimension takes ``graph.batch``.
    share: Share = field(default_factory=Share)  #: What all ``processes`` copies have together.
    processes: int = 1
    data: InputData | None = field(default=None, compare=False)  #: Where its inputs come from; None: random ones.
    samples: tuple[Sample, ...] = field(default=(), compare=False)  #: Those of them that have the graph's sizes.

    def inputs(self) -> dict[str, Array]:
        """Return the arrays of one batch, the same for the same model, batch, sizes and data."""
        from gpuprof.graph.input_data import join_samples, model_inputs
        from gpuprof.graph.inputs import random_inputs

        if self.samples:
            return join_samples(self.samples, self.graph.batch, model_inputs(self.path))
        return random_inputs(self.graph)

    @property
    def workload(self) -> Workload:
        """The same by name, the sizes of free dimensions included."""
        return Workload(self.graph.sized_name, self.graph.batch, self.share, self.processes)


@dataclass(frozen=True, slots=True)
class Request:
    """One run: a job, what runs beside it, on which device, and the id under which it is kept."""

    run_id: str
    started_at: datetime
    device: Device
    job: Job
    beside: tuple[Job, ...] = ()
    limits: TimingLimits = DEFAULT_LIMITS

    def columns(self) -> dict[str, Any]:
        """Return the columns of the database by which rows of every table say what they are of."""
        job = self.job
        return {
            "run_id": self.run_id,
            "model": job.graph.name,
            "device": self.device.name,
            "batch": job.graph.batch,
            "sm_share_pct": job.share.sm_pct,
            "mig_profile": job.share.mig,
        }
