"""Measurement requests: a model under a share, limits on repeats, and its neighbours; figures of their samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import NormalDist, fmean, median, quantiles, stdev
from typing import TYPE_CHECKING, Any

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.kernel_db.schema import workload_label

if TYPE_CHECKING:
    from gpuprof.graph.inputs import Array, InputData, Sample

#: Runs of a fresh session that allocate and choose algorithms.
WARM_UP_RUNS = 3
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Figures of a sample, named as the columns in the database."""

    repeats: int
    latency_mean_ms: float
    latency_std_ms: float
    latency_p50_ms: float
    #: ``latency_p50_low_ms``, ``latency_p50_high_ms``: 95% confidence interval of the median, from order statistics:
    #: nothing is assumed of the distribution.
    latency_p50_low_ms: float | None
    latency_p50_high_ms: float | None
    #: ``latency_p95_ms``, ``latency_p99_ms``: None for samples of fewer than 20 or 100 values, too small for the
    #: percentile.
    latency_p95_ms: float | None
    latency_p99_ms: float | None
    stable: bool  #: The interval is within the requested precision, the halves agree, nothing disturbed.


def summarize(latencies_ms: Sequence[float], precision: float, undisturbed: bool = True) -> LatencyStats:
    """Return the figures of ``latencies_ms``, given in order of measurement; at least one value is required.

    ``undisturbed``: False marks the sample unstable.
    """
    ordered = sorted(latencies_ms)
    interval = median_interval(ordered)
    return LatencyStats(
        repeats=len(ordered),
        latency_mean_ms=fmean(ordered),
        latency_std_ms=stdev(ordered) if len(ordered) > 1 else 0.0,
        latency_p50_ms=median(ordered),
        latency_p50_low_ms=interval[0] if interval else None,
        latency_p50_high_ms=interval[1] if interval else None,
        latency_p95_ms=percentile(ordered, 95),
        latency_p99_ms=percentile(ordered, 99),
        stable=undisturbed and is_median_known(ordered, precision) and _halves_agree(latencies_ms, precision),
    )


def median_interval(ordered: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% confidence interval of the median of a sorted sample; None for fewer than six values.

    The number of values below the true median is binomial with p = 1/2; the interval runs between the order
    statistics that this leaves out on either side, by its normal approximation, rounded outwards.
    """
    n = len(ordered)
    if 1.0 - 2.0 * 0.5**n < _CONFIDENCE:  # not even the whole range holds the median with that probability
        return None
    reach = NormalDist().inv_cdf((1.0 + _CONFIDENCE) / 2) * math.sqrt(n)
    low, high = max(0, math.floor((n - reach) / 2)), min(n - 1, math.ceil((n + reach) / 2))
    return ordered[low], ordered[high]


def is_median_known(ordered: Sequence[float], precision: float) -> bool:
    """Return whether the interval's half-width is within ``precision`` of the median of a sorted sample."""
    interval = median_interval(ordered)
    if interval is None:
        return False
    return (interval[1] - interval[0]) / 2.0 <= precision * median(ordered)


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """Return a percentile from 50 to 99 of a sample, linear between its neighbours.

    None for a sample too small to have a value beyond it.
    """
    if len(ordered) * (100 - percent) < 100:
        return None
    return quantiles(ordered, n=100, method="inclusive")[percent - 1]


def _halves_agree(latencies: Sequence[float], precision: float) -> bool:
    """Return whether the medians of both halves differ by no more than this precision allows.

    An interval from order statistics assumes independent values; a clock that drops, or a neighbour that wakes up
    halfway, makes the interval narrow around a median valid for neither half.
    """
    middle = len(latencies) // 2
    first, second = median(latencies[:middle]), median(latencies[middle:])
    return abs(first - second) <= 2.0 * precision * median(latencies)


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


def limits_within(max_time_s: float, tool_s: float = DEFAULT_LIMITS.tool_s) -> TimingLimits:
    """Return the default limits, cut down to ``max_time_s`` per measurement and ``tool_s`` per profiler run."""
    return replace(
        DEFAULT_LIMITS,
        warm_up_s=min(DEFAULT_LIMITS.warm_up_s, max_time_s),
        min_time_s=min(DEFAULT_LIMITS.min_time_s, max_time_s),
        want_time_s=min(DEFAULT_LIMITS.want_time_s, max_time_s),
        max_time_s=max_time_s,
        tool_s=tool_s,
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
        """The workload of the job; its name includes the sizes of free dimensions."""
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
    records: bool = True  #: False: only timed; another run of the same workload is recorded by a profiler.

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
