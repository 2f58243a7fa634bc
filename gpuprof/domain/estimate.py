"""What is known or predicted of a model on a device: figures with their source and interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share

MEASURED = "measured"
INTERPOLATED = "interpolated"
EXTRAPOLATED = "extrapolated"
ROOFLINE = "roofline"
UNCALIBRATED = "roofline, uncalibrated"
#: What any figure is that is none of the first three.
PREDICTED = "predicted"
#: Begins the source of a time that rests on rows marked unstable: ``"unstable, measured"``.
UNSTABLE = "unstable"
#: Stands in the source of a latency beside neighbours as none were measured together.
BEYOND_SEEN = "beyond what was co-located"
#: Stands before the model of interference in the source of a time that it has stretched.
BESIDE = " × "


def classify_source(source: str) -> str:
    """Return ``"measured"``, ``"interpolated"``, ``"extrapolated"`` or ``"predicted"`` for the source of a figure.

    Examples
    --------
    >>> classify_source("interpolated"), classify_source("roofline, uncalibrated")
    ('interpolated', 'predicted')
    """
    last = source.rsplit(", ", 1)[-1]
    return last if last in (MEASURED, INTERPOLATED, EXTRAPOLATED) else PREDICTED


def is_unstable(source: str) -> bool:
    """Return whether a figure with this source rests on measurements marked unstable.

    Examples
    --------
    >>> is_unstable("unstable, measured"), is_unstable("measured")
    (True, False)
    """
    return UNSTABLE in source.split(", ")


def source_without_neighbours(source: str) -> str:
    """Return the source of the time without neighbours, for a time that a model of interference has increased.

    Examples
    --------
    >>> source_without_neighbours("measured × linear"), source_without_neighbours("interpolated")
    ('measured', 'interpolated')
    """
    return source.split(BESIDE, 1)[0]


#: The largest coefficient of variation of a time. Beyond it units were mistaken, or a machine that stood still once
#: made a mean of microseconds vary by hundreds, which says nothing of the next batch.
MOST_VARIATION = 10.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, where it comes from, and the 90% interval around it.

    Attributes
    ----------
    value : float
    source : str
        ``"measured"``, ``"interpolated"``, ``"extrapolated"`` (beyond what was measured, scaled from the nearest that
        was), ``"roofline"``, ``"roofline, uncalibrated"``, or the name of the fitted model that predicted it.
    low, high : float or None
        90% interval; None where nothing is known of the error.

    Examples
    --------
    >>> Figure(4.0, "roofline", low=3.0, high=6.0).scale_by(2.0)
    Figure(value=8.0, source='roofline', low=6.0, high=12.0)
    """

    value: float
    source: str
    low: float | None = None
    high: float | None = None

    @property
    def is_observed(self) -> bool:
        """Whether it was measured stably, or interpolated between such measurements."""
        return classify_source(self.source) in (MEASURED, INTERPOLATED) and not is_unstable(self.source)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends of the interval; None where nothing is known of the error."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def scale_by(self, factor: float) -> Figure:
        """Return the figure times ``factor``, interval included."""
        low = None if self.low is None else self.low * factor
        high = None if self.high is None else self.high * factor
        return Figure(self.value * factor, self.source, low, high)

    def upper(self) -> float:
        """Return the upper end of the interval, or the value where there is none."""
        return self.value if self.high is None else self.high


@dataclass(frozen=True, slots=True, order=True)
class Workload:
    """Something that runs: a model at a batch size under a share, in one or more processes."""

    model: str
    batch: int
    share: Share
    processes: int = 1
    #: Workloads with one number above 0 have one share together and take turns in it: one batch runs at a time.
    #: Estimators are never asked about turns, see `gpuprof.rules.turns`.
    turns: int = 0


class PredictedRequirements(Sequence[tuple[str, Figure]]):
    """Compute requirements by metric, as pairs, that are predicted when they are first looked at.

    A prediction takes milliseconds, and most plans look at none. ``predict``: gives the pairs; none of their figures is
    observed.

    Examples
    --------
    >>> found = PredictedRequirements(lambda: (("max_occupancy", Figure(40.0, "creq from launches")),))
    >>> dict(found)["max_occupancy"].value
    40.0
    """

    __slots__ = ("_pairs", "_predict")

    def __init__(self, predict: Callable[[], tuple[tuple[str, Figure], ...]]) -> None:
        self._predict = predict
        self._pairs: tuple[tuple[str, Figure], ...] | None = None

    def _look(self) -> tuple[tuple[str, Figure], ...]:
        if self._pairs is None:
            self._pairs = self._predict()
        return self._pairs

    def __len__(self) -> int:
        """Return how many metrics there are."""
        return len(self._look())

    def __getitem__(self, place: Any) -> Any:
        """Return a pair, or those of a slice."""
        return self._look()[place]

    def __eq__(self, other: object) -> bool:
        """Whether the pairs are the same as another sequence's."""
        return isinstance(other, Sequence) and self._look() == tuple(other)

    def __hash__(self) -> int:
        """Return the hash of the pairs as a tuple."""
        return hash(self._look())

    def __repr__(self) -> str:
        """Return the pairs as a tuple shows them."""
        return repr(self._look())

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Go to other processes, and into copies, as a tuple."""
        return tuple, (self._look(),)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Behaviour of one workload on one device, alone or beside others.

    Attributes
    ----------
    workload : Workload
    device : str
    latency_ms : Figure
        Mean time of one batch in one process, without queueing.
    latency_cv : float
        Coefficient of variation of that time from batch to batch.
    pause_factor, pause_cv : float
        Time of a batch that finds its process at rest over ``latency_ms``, that of one that follows another, and its
        own coefficient of variation; ``pause_cv`` None: the same as ``latency_cv``.
    memory_bytes : Figure or None
        Peak memory held by one process (Mreq), weights included.
    weight_bytes : int or None
        The part of it that is weights.
    creq_pct : mapping of str to Figure, as pairs
        Compute requirement by metric: ``max_occupancy``, ``wavg_occupancy`` (WAO), ``wavg_sm_util`` (WSM).
    dram_pct, l2_pct : Figure or None
        Share of the device's DRAM and L2 bandwidth taken.
    power_w : Figure or None
    unknown_ops : tuple of str
        Op types of which nothing is known: the estimate's interval is wide because of them.
    overlapped_ms : float
        Part of the latency in which the next batch's device time can already run: loading its inputs (iGniter
        equation 2). It lengthens a request's latency and not the throughput.
    variant : str or None
        By which runtime, how and in which arithmetic the figures were measured, as `RuntimeVariant` says it; None:
        nothing was measured.
    is_padded : bool
        Whether a replica with this batch fills partial batches up, so that each takes as long as a full one; see
        `gpuprof.rules.padding`.
    """

    workload: Workload
    device: str
    latency_ms: Figure
    latency_cv: float = 0.0
    pause_factor: float = 1.0
    pause_cv: float | None = None
    memory_bytes: Figure | None = None
    weight_bytes: int | None = None
    creq_pct: Sequence[tuple[str, Figure]] = ()
    dram_pct: Figure | None = None
    l2_pct: Figure | None = None
    power_w: Figure | None = None
    unknown_ops: tuple[str, ...] = ()
    overlapped_ms: float = 0.0
    variant: str | None = None
    is_padded: bool = False

    @property
    def throughput_rps(self) -> Figure:
        """Requests per second of all processes together, batches always full."""
        per_ms = self.workload.batch * self.workload.processes * 1000.0
        latency = self.latency_ms
        hidden = self.overlapped_ms
        # The ends change places: the longest time gives the lowest throughput.
        low = None if latency.high is None else per_ms / (latency.high - hidden)
        high = None if not latency.low or latency.low <= hidden else per_ms / (latency.low - hidden)
        return Figure(per_ms / (latency.value - hidden), latency.source, low, high)

    def creq(self, metric: str) -> Figure | None:
        """Return the compute requirement by ``metric``, None where it was not measured."""
        return dict(self.creq_pct).get(metric)


class Estimator(Protocol):
    """Predicts workloads; plug-ins of the group ``gpuprof.estimators`` implement it."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Predict ``processes`` copies of ``model`` under ``share``, with ``beside`` running on the same device.

        Raises
        ------
        InputError
            For a model, batch or share of which nothing can be said.
        """

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes worth considering for ``model``: those measured, else powers of two that fit."""

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares worth considering for ``model`` on ``device``, smallest first, the whole included."""


@runtime_checkable
class BatchSeriesEstimator(Estimator, Protocol):
    """An estimator that gives the times of many batch sizes of one workload in one call, faster than one by one."""

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return ``latency_ms`` of `estimate` at each of the batches, without neighbours.

        Raises
        ------
        InputError
            As `estimate` for any of them.
        """


def describe_unknown_ops(model: str, op_types: Sequence[str]) -> str:
    """Return a remark on ops without a known cost, with the way to give the turns of a Loop."""
    turns = "; give the turns of a Loop that its data end: --dim NODE.turns=N" if "Loop" in op_types else ""
    return f"{model}: nothing is known of {', '.join(op_types)}; counted by their traffic alone{turns}"


def batch_times(
    estimator: Estimator, model: str, device: Device, batches: Sequence[int], share: Share, processes: int
) -> tuple[Figure, ...]:
    """Return the times of a batch at each size, one by one unless the estimator is a `BatchSeriesEstimator`.

    Raises
    ------
    InputError
        As the estimator does for any of them.
    """
    if isinstance(estimator, BatchSeriesEstimator):
        return estimator.batch_times(model, device, batches, share, processes)
    return tuple(estimator.estimate(model, device, one, share, (), processes).latency_ms for one in batches)


@runtime_checkable
class NamingEstimator(Estimator, Protocol):
    """An estimator that knows which of the names that it is asked for stand for one model."""

    def source_of(self, name: str) -> str:
        """Return the model that a name stands for: names of one model have the same estimates."""
        ...


@runtime_checkable
class SlowingEstimator(Estimator, Protocol):
    """An estimator that knows the least interference that any neighbour causes."""

    def slow_beside_any(self, device: Device, alone: Figure) -> Figure:
        """Return a lower bound of a time where something else runs in the same partition, from the time alone.

        Never more, at either end of its interval, than ``latency_ms`` of `estimate` beside any neighbours of a workload
        that has a part of the device or instance only.
        """
        ...
