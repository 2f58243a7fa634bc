"""Measurement requests: a model under a share, limits on repeats, and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.kernel_db.schema import workload_label

if TYPE_CHECKING:
    from gpuprof.graph.inputs import Array, InputData, Sample


@dataclass(frozen=True, slots=True)
class TimingLimits:
    """Stopping criteria of a measurement.

    A measurement ends when the median is precise enough, at least ``min_time_s`` and ``min_repeats`` are reached, and
    either ``want_repeats`` (needed for a 99th percentile) or ``want_time_s`` are reached; or after ``max_time_s``.
    """

    #: Required half-width of the median's 95% confidence interval, as a fraction of the median.
    precision: float = 0.02
    min_repeats: int = 6
    min_time_s: float = 1.0
    want_repeats: int = 100
    want_time_s: float = 3.0
    max_time_s: float = 10.0
    #: Duration of batches before the first one timed; a GPU's clocks need ``min_time_s`` to rise.
    warm_up_s: float = 0.3
    #: Time after which a profiler, its loading and post-processing included, is considered hung.
    tool_s: float = 900.0


DEFAULT_LIMITS = TimingLimits()


def limits_within(max_time_s: float) -> TimingLimits:
    """Return the default limits, cut down to ``max_time_s`` per measurement."""
    return replace(
        DEFAULT_LIMITS,
        warm_up_s=min(DEFAULT_LIMITS.warm_up_s, max_time_s),
        min_time_s=min(DEFAULT_LIMITS.min_time_s, max_time_s),
        want_time_s=min(DEFAULT_LIMITS.want_time_s, max_time_s),
        max_time_s=max_time_s,
    )


@dataclass(frozen=True, slots=True)
class Job:
    """Copies of a model in a common share."""

    graph: ModelGraph  #: Bound to the batch size.
    path: Path  #: Model file; its batch dimension accepts ``graph.batch``.
    share: Share = field(default_factory=Share)  #: Share of all ``processes`` copies together.
    processes: int = 1
    data: InputData | None = field(default=None, compare=False)  #: Source of the inputs; None: random.
    samples: tuple[Sample, ...] = field(default=(), compare=False)  #: Samples of ``data`` with the graph's sizes.

    def inputs(self) -> dict[str, Array]:
        """Return the arrays of a batch, equal for equal model, batch, sizes and data."""
        from gpuprof.graph.inputs import join_samples, model_inputs, random_inputs

        if self.samples:
            return join_samples(self.samples, self.graph.batch, model_inputs(self.path))
        return random_inputs(self.graph)

    @property
    def title(self) -> str:
        """``"resnet50 at batch 8 on 50%"``."""
        return f"{self.graph.sized_name} at batch {self.graph.batch} on {self.share}"

    @property
    def label(self) -> str:
        """The workload as written in the column ``beside``."""
        share = self.share
        return workload_label(self.graph.sized_name, self.graph.batch, share.sm_pct, share.mig, self.processes)

    @property
    def workload(self) -> Workload:
        """The same by name, the sizes of free dimensions included."""
        return Workload(self.graph.sized_name, self.graph.batch, self.share, self.processes)


@dataclass(frozen=True, slots=True)
class Request:
    """A run: a job with its neighbours on a device, and the run's id."""

    run_id: str
    started_at: datetime
    device: Device
    job: Job
    beside: tuple[Job, ...] = ()
    limits: TimingLimits = DEFAULT_LIMITS

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The job and its neighbours."""
        return (self.job, *self.beside)

    def columns(self) -> dict[str, Any]:
        """Return the identifying database columns, common to rows of every table."""
        job = self.job
        return {
            "run_id": self.run_id,
            "model": job.graph.name,
            "device": self.device.name,
            "batch": job.graph.batch,
            "sm_share_pct": job.share.sm_pct,
            "mig_profile": job.share.mig,
        }
