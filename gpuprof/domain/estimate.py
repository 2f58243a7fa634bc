"""Estimates of models on devices: figures with source and interval, protocols of estimators, failed runs, bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol, cast, runtime_checkable

from gpuprof.domain.device import Device
from gpuprof.domain.number_format import ROUNDING
from gpuprof.domain.runtime_variant import Padding
from gpuprof.domain.share import Share, parse_share
from gpuprof.errors import InputError

MEASURED = "measured"
INTERPOLATED = "interpolated"
EXTRAPOLATED = "extrapolated"
ROOFLINE = "roofline"
UNCALIBRATED = "roofline, uncalibrated"
#: Class of every figure that is not measured, interpolated or extrapolated.
PREDICTED = "predicted"
#: Source of a figure from rows that a program computed (``collector`` is ``"computed"``), not measured.
COMPUTED = "computed"
#: Source of a figure that holds by an estimator's premise, such as USHER's.
ASSUMED = "assumed"
#: Classes of sources, the most certain first.
SOURCE_KINDS = (MEASURED, INTERPOLATED, EXTRAPOLATED, COMPUTED, ASSUMED, PREDICTED)
#: Prefix of the source of a time from rows marked unstable: ``"unstable, measured"``.
UNSTABLE = "unstable"
#: Part of the source of a latency with neighbours beyond the measured co-locations.
BEYOND_SEEN = "beyond what was co-located"
#: Separates a time's own source from the interference model that increased the time.
BESIDE = " × "


def classify_source(source: str) -> str:
    """Return the class of a figure's source.

    The classes are ``"measured"``, ``"interpolated"``, ``"extrapolated"``, ``"computed"``, ``"assumed"`` and
    ``"predicted"``. Figures from computed rows are computed, whatever came after.

    Examples
    --------
    >>> classify_source("interpolated"), classify_source("roofline, uncalibrated")
    ('interpolated', 'predicted')
    >>> classify_source("computed, interpolated"), classify_source("assumed")
    ('computed', 'assumed')
    """
    parts = source.split(", ")
    for kind in (ASSUMED, COMPUTED):
        if kind in parts:
            return kind
    return parts[-1] if parts[-1] in (MEASURED, INTERPOLATED, EXTRAPOLATED) else PREDICTED


def mark_source(source: str, *, stable: bool = True, computed: bool = False) -> str:
    """Return the source of a figure with the marks of the rows under it.

    Examples
    --------
    >>> mark_source("measured", stable=False), mark_source("measured", computed=True)
    ('unstable, measured', 'computed')
    >>> mark_source("interpolated", computed=True)
    'computed, interpolated'
    """
    if computed:
        source = COMPUTED if source == MEASURED else f"{COMPUTED}, {source}"
    return source if stable else f"{UNSTABLE}, {source}"


def is_unstable(source: str) -> bool:
    """Return whether the source of a figure includes measurements marked unstable.

    Examples
    --------
    >>> is_unstable("unstable, measured"), is_unstable("measured")
    (True, False)
    """
    return UNSTABLE in source.split(", ")


def source_without_neighbours(source: str) -> str:
    """Return the source of a time without the mark of its interference model.

    Examples
    --------
    >>> source_without_neighbours("measured × linear"), source_without_neighbours("interpolated")
    ('measured', 'interpolated')
    """
    return source.split(BESIDE, 1)[0]


#: Largest accepted coefficient of variation of a time. Larger values come from wrong units, or from a single stall of
#: the machine against a mean of microseconds, and do not predict the next batch.
MOST_VARIATION = 10.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its source and 90% interval.

    Attributes
    ----------
    value : float
    source : str
        ``"measured"``, ``"interpolated"``, ``"extrapolated"`` (scaled from the nearest measurement), ``"computed"``
        (from rows that a program computed), ``"assumed"`` (by a premise), ``"roofline"``, ``"roofline, uncalibrated"``,
        or the name of the fitted model.
    low, high : float or None
        90% interval; None where the error is unknown.

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
        """Whether plans take the value without a margin.

        True for stable measurements and interpolations between them; and for figures that the user provides, by
        computed rows or by an estimator's premise.
        """
        kinds = (MEASURED, INTERPOLATED, COMPUTED, ASSUMED)
        return classify_source(self.source) in kinds and not is_unstable(self.source)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends of the interval; None where the error is unknown."""
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
    """A model at a batch size under a share, in a number of processes."""

    model: str
    batch: int
    share: Share
    processes: int = 1
    #: Workloads with the same number above 0 take turns in a common share, with a single batch running at a time.
    #: Estimators never receive workloads with turns, see `gpuprof.rules.turns`.
    turns: int = 0


class PredictedRequirements(Sequence[tuple[str, Figure]]):
    """Pairs of metric and compute requirement, predicted at first access.

    A prediction takes milliseconds, and most plans need none. ``predict`` returns the pairs; their figures are not
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
        """Return the number of metrics."""
        return len(self._look())

    def __getitem__(self, place: Any) -> Any:
        """Return the pair at an index, or the pairs of a slice."""
        return self._look()[place]

    def __eq__(self, other: object) -> bool:
        """Return whether the pairs equal those of another sequence."""
        return isinstance(other, Sequence) and self._look() == tuple(other)

    def __hash__(self) -> int:
        """Return the hash of the pairs as a tuple."""
        return hash(self._look())

    def __repr__(self) -> str:
        """Return the representation of the pairs as a tuple."""
        return repr(self._look())

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Pickle and copy this read-only mapping by a tuple of its (key, value) pairs."""
        return tuple, (self._look(),)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Behaviour of a workload on a device, alone or with neighbours.

    Attributes
    ----------
    workload : Workload
    device : str
    latency_ms : Figure
        Mean time of a batch in a process, without queueing.
    latency_cv : float
        Coefficient of variation of ``latency_ms`` from batch to batch.
    pause_factor, pause_cv : float
        Ratio of the time of a batch on an idle process to ``latency_ms``, the time in a sequence of batches, and
        coefficient of variation of the time on an idle process; ``pause_cv`` None: ``latency_cv``.
    memory_bytes : Figure or None
        Peak memory of a process (Mreq), weights included.
    weight_bytes : int or None
        Weights within ``memory_bytes``.
    context_bytes : int
        Part of ``memory_bytes`` that a process holds once for all its models: context and code. 0: unknown.
    creq_pct : mapping of str to Figure, as pairs
        Compute requirement by metric: ``max_occupancy``, ``wavg_occupancy`` (WAO), ``wavg_sm_util`` (WSM).
    dram_pct, l2_pct : Figure or None
        Fraction of the device's DRAM and L2 bandwidth in use, in percent.
    power_w : Figure or None
    unknown_ops : tuple of str
        Op types without a known cost, which widen the estimate's interval.
    overlapped_ms : float
        Part of the latency that overlaps with another batch's device time: loading of inputs (iGniter equation 2).
        This part adds to a request's latency but does not reduce the throughput.
    variant : str or None
        Runtime, execution and precision of the measurements, as printed by `RuntimeVariant`; None: nothing was
        measured.
    padding : Padding
        Size to which a replica pads partial batches, which then take as long as a batch of this size; see
        `gpuprof.rules.batching`.
    """

    workload: Workload
    device: str
    latency_ms: Figure
    latency_cv: float = 0.0
    pause_factor: float = 1.0
    pause_cv: float | None = None
    memory_bytes: Figure | None = None
    weight_bytes: int | None = None
    context_bytes: int = 0
    creq_pct: Sequence[tuple[str, Figure]] = ()
    dram_pct: Figure | None = None
    l2_pct: Figure | None = None
    power_w: Figure | None = None
    unknown_ops: tuple[str, ...] = ()
    overlapped_ms: float = 0.0
    variant: str | None = None
    padding: Padding = Padding.NONE

    @property
    def throughput_rps(self) -> Figure:
        """Requests per second of all processes together, batches always full."""
        per_ms = self.workload.batch * self.workload.processes * 1000.0
        latency = self.latency_ms
        overlap_ms = self.overlapped_ms
        # The ends are swapped: the longest time gives the lowest throughput.
        low = None if latency.high is None else per_ms / (latency.high - overlap_ms)
        high = None if not latency.low or latency.low <= overlap_ms else per_ms / (latency.low - overlap_ms)
        return Figure(per_ms / (latency.value - overlap_ms), latency.source, low, high)

    def added_bytes(self, process_bytes: int) -> int:
        """Return the memory that the model adds to a process with a context; ``process_bytes``: alone in a process."""
        return max(process_bytes - self.context_bytes, self.weight_bytes or 0)

    def creq(self, metric: str) -> Figure | None:
        """Return the compute requirement by ``metric``, None where the metric is missing."""
        return dict(self.creq_pct).get(metric)


@runtime_checkable
class Estimator(Protocol):
    """Predicts workloads; plug-ins of the group ``gpuprof.estimators`` implement it."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Predict ``processes`` copies of ``model`` under ``share``, with neighbours ``beside`` on the same device.

        Raises `InputError` for a model, batch or share without a possible estimate.
        """

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the candidate batch sizes for ``model``: measured sizes, else powers of two within the memory."""

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the candidate shares for ``model`` on ``device``, the smallest first, the whole device included."""


@runtime_checkable
class BatchSeriesEstimator(Estimator, Protocol):
    """An estimator that returns the times of many batch sizes in a single, faster call."""

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return ``latency_ms`` of `estimate` at each of the batch sizes, without neighbours.

        Raises `InputError` as `estimate` for any of the batch sizes.
        """


def describe_unknown_ops(model: str, op_types: Sequence[str]) -> str:
    """Return a remark on ops without a known cost, with the option for the iterations of a Loop."""
    turns = "; give the turns of a Loop that its data end: --dim NODE.turns=N" if "Loop" in op_types else ""
    return f"{model}: nothing is known of {', '.join(op_types)}; counted by their traffic alone{turns}"


def batch_times(
    estimator: Estimator, model: str, device: Device, batches: Sequence[int], share: Share, processes: int
) -> tuple[Figure, ...]:
    """Return the batch time at each size, in a single call where the estimator is a `BatchSeriesEstimator`.

    Raises `InputError` as the estimator for any of the batch sizes.
    """
    if hasattr(estimator, "batch_times"):  # quicker than a check of the protocol
        return cast(BatchSeriesEstimator, estimator).batch_times(model, device, batches, share, processes)
    return tuple(estimator.estimate(model, device, batch, share, (), processes).latency_ms for batch in batches)


def estimate_smallest(estimator: Estimator, model: str, device: Device) -> Estimate | None:
    """Return the estimate of the smallest batch under the largest share with an estimate; None without an estimate.

    Policies leave out workloads that failed or have no estimate, and report them.
    """
    for share in (Share(), *reversed(estimator.shares(model, device))):
        with suppress(InputError):
            return estimator.estimate(model, device, min(estimator.batches(model, device, share)), share)
    return None


@runtime_checkable
class NamingEstimator(Estimator, Protocol):
    """An estimator that resolves several names of the same model."""

    def source_of(self, name: str) -> str:
        """Return the model denoted by a name: names of the same model have the same estimates."""
        ...


_NEIGHBOUR = re.compile(r"(?P<model>.+?)(?:[@:](?P<batch>\d{1,9})(?::(?P<share>[^:]+(?::[^:]+)?))?)?")


def read_neighbour(text: str, device: Device) -> tuple[str, int | None, Share | None]:
    """Parse ``"MODEL"``, ``"MODEL@batch"`` or ``"MODEL@batch:share"``; a colon may replace the ``@``.

    The batch and the share are None where omitted. Raises `InputError` when the model is missing, or the share is
    invalid.

    Examples
    --------
    >>> from gpuprof.domain.catalogue import device
    >>> read_neighbour("resnet50@4:50", device("a100-80"))
    ('resnet50', 4, Share(sm_pct=50.0, mig=None))
    """
    match = _NEIGHBOUR.fullmatch(text)
    if match is None:
        raise InputError(f"cannot read the neighbour {text!r}", "write MODEL, MODEL@batch or MODEL@batch:share")
    batch = None if match["batch"] is None else int(match["batch"])
    share = None if match["share"] is None else parse_share(match["share"], device.compute_units)
    return match["model"], batch, share


@dataclass(frozen=True, slots=True, order=True)
class FailedRun:
    """A run without a measurement: out of memory, wrong outputs, or refused by the runtime."""

    device: str
    workload: Workload
    reason: str  #: Reason recorded in the database.
    beside: tuple[Workload, ...] = ()  #: Neighbours during the failed run.

    def rename(self, names_of: Callable[[str], Sequence[str]]) -> Iterator[FailedRun]:
        """Yield the run under each combination of names of its models; nothing where a model has no name."""
        for workload, *beside in rename_workloads((self.workload, *self.beside), names_of):
            yield replace(self, workload=workload, beside=tuple(beside))

    @property
    def is_memory(self) -> bool:
        """Whether the run ran out of memory, so that a larger share of the compute units would not help."""
        return "memory" in self.reason.lower()

    def __str__(self) -> str:
        workload = self.workload
        processes = "" if workload.processes == 1 else f" with {workload.processes} processes"
        neighbours = "".join(f" beside {w.model} at batch {w.batch} under {w.share}" for w in self.beside)
        run = f"{workload.model} at batch {workload.batch}{processes} under {workload.share}{neighbours}"
        return f"{run} failed on {self.device}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TriedRuns:
    """Failed and successful runs in a database."""

    failed: tuple[FailedRun, ...] = ()
    #: Device and workload of successful runs, which failures elsewhere do not refute.
    measured: frozenset[tuple[str, Workload]] = frozenset()
    #: Device and workloads (sorted) of successful co-located runs.
    together: frozenset[tuple[str, tuple[Workload, ...]]] = frozenset()


def rename_workloads(
    workloads: Sequence[Workload], names_of: Callable[[str], Sequence[str]]
) -> Iterator[tuple[Workload, ...]]:
    """Yield the workloads under each combination of names of their models."""
    renamings = [[replace(workload, model=name) for name in names_of(workload.model)] for workload in workloads]
    yield from product(*renamings)


#: No failures known.
NOTHING_TRIED = TriedRuns()


@runtime_checkable
class WorkEstimator(Estimator, Protocol):
    """An estimator of the work of a request."""

    def board_work_ms(self, model: str, device: Device) -> Figure | None:
        """Return a lower bound, in ms, of the time of the whole device per request; None where unknown.

        Raises `InputError` as `estimate` does.
        """
        ...


def board_work(estimator: Estimator, model: str, device: Device) -> Figure | None:
    """Return a lower bound, in ms and with its interval, of the time of the whole device per request.

    None where the estimator has no bound or the device cannot run the model. The figure's source is ``measured``
    where the bound follows from measurements; batch sizes between and beyond them may be estimated slightly better.
    """
    if not isinstance(estimator, WorkEstimator):
        return None
    try:
        return estimator.board_work_ms(model, device)
    except InputError:
        return None


@runtime_checkable
class InterferenceEstimator(Estimator, Protocol):
    """An estimator that bounds the effect of neighbours from below."""

    def least_beside(self, model: str, device: Device, alone: Figure) -> Figure:
        """Return a lower bound of a batch's time beside any neighbours in its partition, from its time alone."""
        ...


@dataclass(frozen=True, slots=True)
class WorkBound:
    """Lower bounds of the devices and the cost for a set of demands."""

    gpus: int
    cost_per_hour: float


def bound_by_work(
    rates_rps: Mapping[str, float],
    kinds: Sequence[tuple[Device, float]],
    work_ms: Callable[[str, Device], float | None],
) -> WorkBound:
    """Return lower bounds of the number of devices and of the cost per hour for the work of demands.

    Conservation of work: a request takes at least a certain time of the whole board (`board_work`), the time of its
    kernels at the most efficient batch size, with launches and copies hidden behind other processes. Shares, MIG
    instances and processes divide this time; none of them adds to it. So demands with a total work of 11.2 boards need
    12 or more, and a GPU with 1.75 seconds of work per second is overloaded, whatever times the map predicts.

    ``rates_rps``: model → served requests per second; ``kinds``: the available kinds of device, each with its price per
    hour; ``work_ms``: model and device → `board_work` at the plan's confidence (the mean, or an end of the interval).
    None: unknown, and counted as 0.

    Examples
    --------
    >>> from gpuprof.domain.catalogue import device
    >>> bound_by_work({"bert": 400.0}, [(device("t4"), 0.5)], lambda model, kind: 72.0)
    WorkBound(gpus=29, cost_per_hour=14.5)
    """
    devices = cost = 0.0
    for model, rate_rps in rates_rps.items():
        options = [(rate_rps * (work_ms(model, device) or 0.0) / 1e3, price) for device, price in kinds]
        devices += min((boards for boards, _ in options), default=0.0)
        cost += min((boards * price for boards, price in options), default=0.0)
    gpus = math.ceil(devices - ROUNDING)
    prices = {price for _, price in kinds}
    return WorkBound(gpus, max(cost, gpus * min(prices, default=0.0)))
