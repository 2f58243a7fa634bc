"""Latency beside neighbours: measured for the same co-location, else by the device's interference model.

The interference model of a device is that with the least error on its measured co-locations, each held out.

Without shares, replicas contend for all SMs of a GPU. Elvinger's thesis (ETH, 2024) runs `milp` without shares (§6.1.3)
and packs models by their weighted SM utilisation (WSM, §5.3.2), on the premise that models with a total WSM of at most
100% do not slow each other down (§5.4.3). Here the premise gives the mean: demand beyond all SMs stretches each model
in proportion. The upper end assumes that every neighbour always runs and never overlaps: as in time slices, each of its
busy SMs is taken from the others. The thesis measured one pair: resnet50 (WSM 36%) beside alexnet (WSM 47%) takes 8 ms
for 6.8 (§6.2.1), which lies between 6.8 and 10.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import BESIDE, BEYOND_SEEN, Figure, Workload
from gpuprof.domain.runtime_variant import RuntimeVariant, variant_of
from gpuprof.errors import InputError
from gpuprof.estimators.conformal import quantile
from gpuprof.estimators.constants import constant
from gpuprof.estimators.igniter.igniter import (
    Coefficients,
    HardwareCoefficients,
    PlacedWorkload,
    WorkloadCoefficients,
    added_launch_ms,
    coefficients_path,
    predict,
    read_coefficients,
)
from gpuprof.estimators.measured.known_models import parse_label
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import ColocationRow, model_at_dims, workload_label
from gpuprof.kernel_db.store import KernelDb

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class RunningWorkload:
    """Latency and resource use of a workload alone under its share; 0 for unmeasured figures."""

    model: str
    batch: int
    share: float  #: Fraction of the device.
    solo_ms: float  #: Latency alone, transfers included.
    #: ``l2_pct``, ``dram_pct``: Mean use of the L2 cache's and the DRAM's bandwidth.
    l2_pct: float = 0.0
    dram_pct: float = 0.0
    kernels: int = 0  #: Launches per batch.
    transfer_ms: float = 0.0  #: Time alone of a batch's transfers between host and device.
    power_w: float = 0.0  #: Above idle.


@dataclass(frozen=True, slots=True)
class ColocatedWorkload:
    """A measurement: ``victim`` took ``latency_ms`` while ``beside`` ran."""

    victim: RunningWorkload
    beside: tuple[RunningWorkload, ...]
    latency_ms: float

    @property
    def slowdown(self) -> float:
        """Latency over latency alone."""
        return self.latency_ms / self.victim.solo_ms


class InterferenceModel(Protocol):
    """Predicts slowdowns."""

    def fit(self, measured: Sequence[ColocatedWorkload]) -> Self:
        """Learn from measurements; return self."""

    def slowdown(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> float:
        """Return latency beside others over latency alone, at least 1."""


class NoInterference:
    """No slowdown by neighbours."""

    def fit(self, measured: Sequence[ColocatedWorkload]) -> Self:
        """Learn nothing."""
        return self

    def slowdown(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> float:
        """Return 1."""
        return 1.0


class ConstantInterference:
    """The same slowdown by any neighbours: the mean of the measurements."""

    def fit(self, measured: Sequence[ColocatedWorkload]) -> Self:
        """Take the mean."""
        self.factor_ = float(np.mean([row.slowdown for row in measured]))
        return self

    def slowdown(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> float:
        """Return the mean slowdown if there is a neighbour."""
        return max(1.0, self.factor_) if beside else 1.0


class _AdditiveInterference(ABC):
    """A slow-down above 1 that is a sum with coefficients of at least 0, the same for all models."""

    @abstractmethod
    def _features(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> Array:
        """Return the regression's features for the slowdown of ``victim`` beside its neighbours."""

    def fit(self, measured: Sequence[ColocatedWorkload]) -> Self:
        """Fit the coefficients by non-negative least squares on relative errors."""
        from scipy.optimize import nnls  # half a second to import, not needed without neighbours

        features = np.array([self._features(row.victim, row.beside) for row in measured])
        slow = np.array([row.slowdown for row in measured])
        self.weights_, _ = nnls(features / slow[:, None], (slow - 1.0) / slow)
        return self

    def slowdown(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> float:
        """Return 1 plus the terms."""
        return 1.0 + float(self._features(victim, beside) @ self.weights_) if beside else 1.0


class TrafficInterference(_AdditiveInterference):
    """Our model where only memory traffic is known, as on a CPU: neighbours' traffic slows down workloads with much
    traffic.

    The terms are a constant cost of any neighbour (clock, last-level cache), the neighbours' bandwidth, its product
    with the victim's, and the demand of all beyond the capacity. Bandwidths are those of the workloads alone,
    ``dram_pct``.
    """

    def _features(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> Array:
        victim_use, neighbour_use = victim.dram_pct / 100.0, sum(neighbour.dram_pct for neighbour in beside) / 100.0
        return np.array([1.0, neighbour_use, victim_use * neighbour_use, max(0.0, victim_use + neighbour_use - 1.0)])


class ContentionModel(_AdditiveInterference):
    """Our model: each shared resource adds a part, in proportion to the victim's need and the neighbours' use.

    The terms are:

    - the clock lost to the power limit (iGniter's equations 9 and 10);
    - launches: iGniter's delay of a kernel (equation 6) times the victim's kernels over its time;
    - L2: the neighbours' use (equation 8);
    - the link to the host, which iGniter leaves out: the fraction of the victim's time in transfers, and the
      fraction of the time that the neighbours hold the link;
    - the DRAM: the product of both sides' use.
    """

    def __init__(self, hardware: HardwareCoefficients) -> None:
        self._hardware = hardware

    def _features(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> Array:
        hardware = self._hardware
        demand = hardware.idle_power_w + victim.power_w + sum(neighbour.power_w for neighbour in beside)
        over = max(0.0, demand - hardware.max_power_w)
        delay = added_launch_ms(hardware, 1 + len(beside))
        return np.array(
            [
                min(0.9, -hardware.alpha_f * over / hardware.max_clock_mhz),
                delay * victim.kernels / victim.solo_ms,
                sum(neighbour.l2_pct for neighbour in beside) / 100.0,
                victim.transfer_ms / victim.solo_ms,
                sum(neighbour.transfer_ms / neighbour.solo_ms for neighbour in beside),
                victim.dram_pct * sum(neighbour.dram_pct for neighbour in beside) / 1e4,
            ]
        )


class IgniterInterference:
    """iGniter's model: its prediction beside others over its prediction alone."""

    def __init__(self, hardware: HardwareCoefficients, workloads: Mapping[str, WorkloadCoefficients]) -> None:
        self._hardware = hardware
        self._workloads = workloads

    def fit(self, measured: Sequence[ColocatedWorkload]) -> Self:
        """Return self: the coefficients come from profiles."""
        return self

    def slowdown(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> float:
        """Return the ratio of the two predictions."""
        placed, neighbours = self._place_workload(victim), [self._place_workload(neighbour) for neighbour in beside]
        together, alone = predict(self._hardware, placed, neighbours), predict(self._hardware, placed, ())
        return max(1.0, together.latency_ms / alone.latency_ms)

    def _place_workload(self, running: RunningWorkload) -> PlacedWorkload:
        return PlacedWorkload(self._workloads[running.model], running.batch, running.share)


#: Least number of co-locations for a fit.
ENOUGH_ROWS = 8


@dataclass(frozen=True, slots=True)
class RankedModel:
    """A model fitted to all co-locations, with its error on held-out data."""

    name: str
    model: InterferenceModel
    #: Held-out unit of the evaluation. ``"model"``: a model's co-locations, as victim and as neighbour; with fewer than
    #: three co-located models ``"victim"`` or ``"pair"``; ``"everything"``: the coefficients come from profiles of
    #: models alone.
    left_out: str
    rows: int
    #: ``mean_pct``, ``p95_pct``: Absolute relative error of the latency.
    mean_pct: float | None
    p95_pct: float | None
    #: ``low``, ``high``: Nine of ten measured latencies were between these multiples of the predicted latency.
    low: float
    high: float

    @property
    def learns(self) -> bool:
        """Whether the model is learned from co-locations, and so limited to them, unlike iGniter's model."""
        return self.name in ("traffic", "contention", "constant")


def rank_interference_models(
    measured: Sequence[ColocatedWorkload], coefficients: Coefficients | None
) -> tuple[RankedModel, ...]:
    """Return the models that can be evaluated on a device, by ascending error.

    ``measured``: co-locations of one device; ``coefficients``: of the same device; without them, iGniter's model and
    ours for GPUs are left out.
    """
    makes: dict[str, Callable[[], InterferenceModel]] = {
        "none": NoInterference,
        "constant": ConstantInterference,
        "traffic": TrafficInterference,
    }
    if coefficients is not None:
        hardware, workloads = coefficients
        makes["igniter"] = lambda: IgniterInterference(hardware, workloads)
        makes["contention"] = lambda: ContentionModel(hardware)
    units = tuple(_UNITS) if len(measured) >= ENOUGH_ROWS else ()
    left_out = next((unit for unit in units if leave_out(NoInterference, measured, unit)), None)
    if left_out is None:
        if coefficients is None:
            return ()
        error = constant("published", "igniter_error")
        return (RankedModel("igniter", makes["igniter"](), "everything", 0, None, None, 1.0 / error, error),)
    ranking = []
    for name, make in makes.items():
        try:
            ranking.append(_judge_model(name, make, measured, left_out))
        except KeyError:  # an uncalibrated model
            continue
    return tuple(sorted(ranking, key=lambda ranked: ranked.mean_pct or 0.0))


def _judge_model(
    name: str, make: Callable[[], InterferenceModel], measured: Sequence[ColocatedWorkload], left_out: str
) -> RankedModel:
    ratios = [row.ratio for row in leave_out(make, measured, left_out)]
    # 95% of rows for nine of ten units: errors are common to all rows of a unit, and there are few units.
    high = quantile((max(ratio, 1.0 / ratio) for ratio in ratios), 0.95) or 1.0
    error = 100.0 * np.abs(1.0 / np.array(ratios) - 1.0)
    mean_pct, p95_pct = float(error.mean()), float(np.percentile(error, 95))
    return RankedModel(name, make().fit(measured), left_out, len(ratios), mean_pct, p95_pct, 1.0 / high, high)


#: Unit that is left out → the units that a co-location belongs to.
_UNITS: dict[str, Callable[[ColocatedWorkload], set[str]]] = {
    "model": lambda row: {row.victim.model, *(neighbour.model for neighbour in row.beside)},
    "victim": lambda row: {row.victim.model},
    "pair": lambda row: {"+".join(sorted([row.victim.model, *(neighbour.model for neighbour in row.beside)]))},
}


@dataclass(frozen=True, slots=True)
class LeftOutRow:
    """A co-location predicted by a fit without its unit."""

    unit: str  #: The held-out model, victim or pair.
    is_victim: bool  #: Whether a held-out model was the victim or a neighbour.
    ratio: float  #: Measured over predicted latency.


def leave_out(
    make: Callable[[], InterferenceModel], measured: Sequence[ColocatedWorkload], unit: str
) -> list[LeftOutRow]:
    """Hold every unit out in turn, and predict all rows that belong to it.

    A unit is skipped if too few rows remain to fit a model. ``unit``: ``"model"`` (as victim or as neighbour),
    ``"victim"`` or ``"pair"``.
    """
    units_of, rows = _UNITS[unit], []
    least = ENOUGH_ROWS if unit == "model" else 1
    for name in sorted({name for row in measured for name in units_of(row)}):
        training = [row for row in measured if name not in units_of(row)]
        if len(training) < least:
            continue
        model = make().fit(training)
        for row in measured:
            if name in units_of(row):
                ratio = row.latency_ms / (model.slowdown(row.victim, row.beside) * row.victim.solo_ms)
                rows.append(LeftOutRow(name, row.victim.model == name, ratio))
    return rows


def is_sharing_all_sms(workload: Workload, beside: Sequence[Workload]) -> bool:
    """Return whether all workloads share the whole device or MIG instance without limits."""
    return bool(beside) and all(
        member.share.sm_pct == 100.0 and member.share.mig == workload.share.mig for member in (workload, *beside)
    )


def slow_by_contention(alone: Figure, own_pct: float | None, others_pct: Sequence[float | None]) -> Figure:
    """Return the time beside others that use the same SMs.

    ``own_pct`` and ``others_pct``: SM utilisation in percent (WSM); None where unknown, treated as all SMs.

    Examples
    --------
    >>> slow_by_contention(Figure(2.0, "measured"), 80.0, [70.0]).value
    3.0
    """
    busy = [100.0 if pct is None else pct for pct in (own_pct, *others_pct)]
    factor = max(1.0, sum(busy) / 100.0)
    most = max(factor, 1.0 + sum(busy[1:]) / 100.0)
    is_complete = own_pct is not None and None not in others_pct
    low = alone.value if alone.low is None else alone.low
    source = f"{alone.source} × SM contention{'' if is_complete else ' (of unknown SM utilisation)'}"
    return Figure(alone.value * factor, source, low, alone.upper() * most)


#: Device and workload → its behaviour alone; None where unknown.
Behaviour = Callable[[Device, Workload], RunningWorkload | None]
#: Device and workload → SM utilisation in percent (WSM); None where unknown.
SmUtilization = Callable[[Device, Workload], float | None]

_LABELLED = re.compile(r":\d+:[^:]*$")


@dataclass(frozen=True, slots=True)
class _Row:
    """A measured co-location; ``l2`` and ``dram`` are the victim's own utilisation, None where not measured."""

    label: str
    others: tuple[str, ...]
    latency_ms: float
    solo_ms: float
    l2_pct: float | None
    dram_pct: float | None


class Colocations:
    """The co-locations in the database, and the interference models fitted to them.

    A workload measured beside the same neighbours has the measured slow-down. Any other has the prediction of its
    device's best model: the model with the least error on the rows of the table ``colocations``, each model held out in
    both roles (`rank_interference_models`), or iGniter's with the coefficients kept by ``gpuprof calibrate``. Without
    either, the latency is unchanged and its interval widens. Replicas without shares contend for SMs
    (`slow_by_contention`), to which none of these models was fitted.
    """

    def __init__(
        self,
        db: KernelDb | None,
        behaviour: Behaviour,
        contents: Mapping[str, str | None] = MappingProxyType({}),
        variants: Mapping[tuple[str, str], RuntimeVariant] = MappingProxyType({}),
        sm_utilization: SmUtilization = lambda device, workload: None,
    ) -> None:
        self._db = db
        self._behaviour = behaviour
        self._sm_utilization = sm_utilization
        self._by_device: dict[str, list[_Row]] = {}
        for row in read_records(db, ColocationRow) if db is not None else ():
            name = model_at_dims(row.model, row.dims)
            current = contents.get(name)  # another file may have had the same name
            if current is not None and row.model_sha256 not in (None, current):
                continue
            if variants.get((name, row.device), variant_of(row)) != variant_of(row):
                continue  # another runtime than that of the model's figures alone
            if row.error is None and row.latency_mean_ms and row.solo_latency_mean_ms:
                label = workload_label(name, row.batch, row.sm_share_pct, row.mig_profile, row.processes)
                others, times_ms = tuple(row.beside.split(" + ")), (row.latency_mean_ms, row.solo_latency_mean_ms)
                colocation = _Row(label, others, *times_ms, row.l2_pct, row.dram_pct)
                self._by_device.setdefault(row.device, []).append(colocation)
        self._names = {
            device: {_LABELLED.sub("", label) for row in rows for label in (row.label, *row.others)}
            for device, rows in self._by_device.items()
        }
        self._slowdowns: dict[str, dict[tuple[str, tuple[str, ...]], list[float]]] = {}
        for device, rows in self._by_device.items():
            for run in rows:
                by_set = self._slowdowns.setdefault(device, {})
                by_set.setdefault((run.label, tuple(sorted(run.others))), []).append(run.latency_ms / run.solo_ms)
        self._ranked: dict[str, tuple[RankedModel, ...]] = {}
        self._most_neighbours = {
            device: max(len(row.others) for row in rows) for device, rows in self._by_device.items()
        }
        self._coefficients: dict[str, Coefficients | None] = {}

    def beside(self, alone: Figure, device: Device, workload: Workload, beside: Sequence[Workload]) -> Figure:
        """Return the latency of ``workload`` beside others from its latency alone."""
        slowdowns = self._slowdowns.get(device.name)
        same = slowdowns.get((_label(workload), tuple(sorted(map(_label, beside))))) if slowdowns else None
        if same:
            return _slow_figure(alone, sum(same) / len(same), alone.source)
        if device.kind == "gpu" and is_sharing_all_sms(workload, beside):
            busy = [self._sm_utilization(device, member) for member in (workload, *beside)]
            return slow_by_contention(alone, busy[0], busy[1:])
        ranked = self.rank_models(device)
        victim = self._running(device, workload) if ranked else None
        neighbours = [self._running(device, neighbour) for neighbour in beside] if victim is not None else []
        running = [neighbour for neighbour in neighbours if neighbour is not None]
        if victim is not None and len(running) == len(neighbours):
            for model in ranked:
                try:
                    factor = model.model.slowdown(replace(victim, solo_ms=alone.value), running)
                except KeyError:  # an uncalibrated model
                    continue
                source = f"{alone.source}{BESIDE}{model.name}"
                if not model.learns or len(beside) <= self._most_neighbours[device.name]:
                    return _slow_figure(alone, factor, source, model.low, model.high)
                source = f"{source} ({BEYOND_SEEN}: the number of neighbours)"
                # Twice as wide an interval, in logarithms.
                return _slow_figure(alone, factor, source, model.low**2, model.high**2)
        return _slow_by_unknown(alone)

    def least_beside(self, alone: Figure, device: Device) -> Figure:
        """Return a lower bound of the latency under a part of a partition beside any neighbours."""
        return alone if device.name in self._by_device or self.rank_models(device) else _slow_by_unknown(alone)

    def has_seen(self, device: Device, model: str) -> bool:
        """Return whether ``model`` took part in a co-location on ``device``."""
        return model in self._names.get(device.name, ())

    def rank_models(self, device: Device) -> tuple[RankedModel, ...]:
        """Return the interference models of ``device``, best first; empty if no co-locations or coefficients exist."""
        if device.name not in self._ranked:
            self._ranked[device.name] = rank_interference_models(self.list_measured(device), self.coefficients(device))
        return self._ranked[device.name]

    def list_measured(self, device: Device) -> list[ColocatedWorkload]:
        """Return the co-locations of ``device`` for which the behaviour of all workloads alone is known."""
        rows = self._by_device.get(device.name, [])
        alone = {row.label: row for row in rows}
        colocated = []
        for row in rows:
            try:
                victim = self._find_running(device, parse_label(row.label), row)
                neighbours = [self._find_running(device, parse_label(label), alone.get(label)) for label in row.others]
            except InputError:  # labels of other tools, in another format
                continue
            running = tuple(neighbour for neighbour in neighbours if neighbour is not None)
            if victim is not None and len(running) == len(neighbours):
                colocated.append(ColocatedWorkload(victim, running, row.latency_ms))
        return colocated

    def coefficients(self, device: Device) -> Coefficients | None:
        """Return the kept iGniter coefficients of ``device``, None where it was not calibrated.

        Raises `InputError` when the file is damaged.
        """
        if device.name not in self._coefficients:
            path = None if self._db is None else coefficients_path(self._db.path, device.name)
            coefficients = read_coefficients(path)[1:] if path is not None and path.is_file() else None
            self._coefficients[device.name] = coefficients
        return self._coefficients[device.name]

    def _find_running(self, device: Device, workload: Workload, row: _Row | None) -> RunningWorkload | None:
        """Return the behaviour of a workload alone when the co-location was measured."""
        running = self._running(device, workload)
        if row is None:
            return running
        if running is None:
            share = device.fraction(workload.share)
            running = self._add_coefficients(
                device, RunningWorkload(workload.model, workload.batch, share, row.solo_ms)
            )
        running = replace(running, solo_ms=row.solo_ms)
        if row.l2_pct is not None:
            running = replace(running, l2_pct=row.l2_pct)
        return running if row.dram_pct is None else replace(running, dram_pct=row.dram_pct)

    def _running(self, device: Device, workload: Workload) -> RunningWorkload | None:
        running = self._behaviour(device, workload)
        return None if running is None else self._add_coefficients(device, running)

    def _add_coefficients(self, device: Device, running: RunningWorkload) -> RunningWorkload:
        """Add transfers, kernels and power from the coefficients of a calibrated model."""
        coefficients = self.coefficients(device)
        if coefficients is None or running.model not in coefficients[1]:
            return running
        hardware, workload = coefficients[0], coefficients[1][running.model]
        bytes_moved = (workload.load_bytes + workload.feedback_bytes) * running.batch
        return replace(
            running,
            kernels=workload.kernels,
            transfer_ms=bytes_moved / hardware.pcie_bytes_per_ms,
            power_w=max(0.0, workload.power[0] * running.batch / running.solo_ms + workload.power[1]),
            l2_pct=running.l2_pct or workload.l2_pct(running.batch, running.share),
        )


def _slow_figure(alone: Figure, factor: float, source: str, low: float = 1.0, high: float = 1.0) -> Figure:
    if alone.low is None and low == high:
        return Figure(alone.value * factor, source)
    least = (alone.value if alone.low is None else alone.low) * factor * low
    return Figure(alone.value * factor, source, least, alone.upper() * max(1.0, factor * high))


def _slow_by_unknown(alone: Figure) -> Figure:
    """Return the latency beside neighbours, with the wider interval of an unknown slow-down."""
    low = alone.value if alone.low is None else alone.low
    return Figure(alone.value, alone.source, low, alone.upper() * constant("published", "worst_neighbours"))


def _label(workload: Workload) -> str:
    share = workload.share
    return workload_label(workload.model, workload.batch, share.sm_pct, share.mig, workload.processes)
