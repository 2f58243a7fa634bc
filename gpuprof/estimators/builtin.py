"""Finds an estimator by name, and changes its answers: for services, interval ends, failed runs, plug-ins.

Several services may run one model, each with its own rate, SLO, priority and sizes. The requests of a service may have
several sizes. The router keeps different sizes in separate batches, so ``b`` requests form a batch for each size among
them. Their time is taken as the sum of these batches, one after another: an upper bound for the router, which under
load fills each batch with a single size.

Estimators are built in, installed or ``package.module:Class``.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, TypeVar

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import (
    MOST_VARIATION,
    Estimate,
    Estimator,
    Figure,
    InterferenceEstimator,
    TriedRuns,
    Workload,
    batch_times,
    board_work,
    rename_workloads,
)
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import name_parts
from gpuprof.errors import GpuprofError, InputError, PluginError
from gpuprof.estimators.measured.known_models import KnownModels
from gpuprof.estimators.measured.measured import MeasuredModel, blend_figures
from gpuprof.kernel_db.store import KernelDb
from gpuprof.plugins import describe_error, describe_failure, identify, load_plugin, plugin_names, require_methods


class ServiceEstimator:
    """Estimates services by an estimator of their models.

    ``sources``: service → name of its model, followed by sizes or their distribution
    (`gpuprof.domain.sizes.mixed_name`); other names are models themselves.
    """

    def __init__(self, models: Estimator, sources: Mapping[str, str]) -> None:
        self._models = models
        self._sources = dict(sources)
        self._least_beside = models.least_beside if isinstance(models, InterferenceEstimator) else None

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Predict a service; see `gpuprof.domain.estimate.Estimator`.

        Raises `InputError` for a model, batch or share without an estimate.
        """
        # Neighbours are of the most frequent size of their distribution.
        sizes = (name_parts(self.source_of(neighbour.model)) for neighbour in beside)
        names = (max(parts, key=lambda part: part[1])[0] for parts in sizes)
        neighbours = sorted(replace(neighbour, model=name) for neighbour, name in zip(beside, names, strict=True))
        parts = name_parts(self.source_of(model))
        if len(parts) == 1:
            estimate = self._models.estimate(parts[0][0], device, batch, share, neighbours, processes)
        else:

            def at(name: str, rows: int) -> Estimate:
                return self._models.estimate(name, device, rows, share, neighbours, processes)

            estimate = _mix_estimates(parts, at, Workload(model, batch, share, processes))
        return replace(estimate, workload=replace(estimate.workload, model=model))

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return the times of a service at each of the batches. Raises `InputError` as `estimate` does."""
        parts = name_parts(self.source_of(model))
        if len(parts) == 1:
            return batch_times(self._models, parts[0][0], device, batches, share, processes)
        return tuple(self.estimate(model, device, batch, share, (), processes).latency_ms for batch in batches)

    def board_work_ms(self, model: str, device: Device) -> Figure | None:
        """Return the mean board work of a service's request over its sizes; None where that of any size is unknown."""
        each = [(board_work(self._models, name, device), part) for name, part in name_parts(self.source_of(model))]
        if any(work is None for work, _ in each):
            return None
        return blend_figures([(work, part) for work, part in each if work is not None])

    def least_beside(self, model: str, device: Device, alone: Figure) -> Figure:
        """Return the least time of a service beside neighbours; for several sizes, the time alone."""
        if self._least_beside is not None and len(parts := name_parts(self.source_of(model))) == 1:
            return self._least_beside(parts[0][0], device, alone)
        return alone

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes worth considering for a service."""
        parts = name_parts(self.source_of(model))
        return tuple(sorted({batch for name, _ in parts for batch in self._models.batches(name, device, share)}))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares worth considering for a service."""
        (first, _), *rest = name_parts(self.source_of(model))
        shares = self._models.shares(first, device)
        parts = [set(self._models.shares(name, device)) for name, _ in rest]
        return tuple(share for share in shares if all(share in part for part in parts)) or shares

    def source_of(self, name: str) -> str:
        """Return the name of a service's model, with its sizes."""
        return self._sources.get(name, name)


@dataclass(frozen=True, slots=True)
class _SizeTerm:
    """One size's part in a batch of several sizes: the probability that it occurs, and the time of its requests."""

    present: float
    latency: Figure
    cv: float
    estimates: tuple[Estimate, ...]


def _size_term(part: float, batch: int, at: Callable[[int], Estimate]) -> _SizeTerm:
    """Return the term of a size that is a fraction ``part`` of the requests in ``batch``.

    The size occurs with probability ``1 - (1 - part)^batch``, then with ``batch part`` over that many requests on
    average; times between two whole batches are interpolated linearly.
    """
    present = 1.0 - (1.0 - part) ** batch
    rows = min(float(batch), max(1.0, batch * part / present))
    below = math.floor(rows)
    estimates = [at(below)] + ([at(below + 1)] if rows > below else [])
    weights = [1.0 - (rows - below), rows - below]
    latency = blend_figures([(end.latency_ms, weight) for end, weight in zip(estimates, weights, strict=False)])
    return _SizeTerm(present, latency, max(estimate.latency_cv for estimate in estimates), tuple(estimates))


def _mix_estimates(
    parts: Sequence[tuple[str, float]], at: Callable[[str, int], Estimate], workload: Workload
) -> Estimate:
    """Return the estimate of ``batch`` requests of several sizes, from the estimates of each size.

    Numbers of different sizes are taken as independent, which slightly overstates the spread; for single requests the
    spread is exact. Memory is that of the largest size.
    """
    terms = [_size_term(part, workload.batch, partial(at, name)) for name, part in parts]
    value = math.fsum(term.present * term.latency.value for term in terms)
    second = math.fsum(term.present * term.latency.value**2 * (1.0 + term.cv**2) for term in terms)
    squares = [(term.present * term.latency.value) ** 2 for term in terms]
    variance = second - (value**2 if workload.batch == 1 else math.fsum(squares))
    estimates = [estimate for term in terms for estimate in term.estimates]
    has_interval = any(estimate.latency_ms.low is not None for estimate in estimates)
    lows = (term.latency.value if term.latency.low is None else term.latency.low for term in terms)
    low = math.fsum(term.present * low for term, low in zip(terms, lows, strict=True))
    high = math.fsum(term.present * term.latency.upper() for term in terms)
    return replace(
        max(estimates, key=lambda estimate: estimate.latency_ms.value),
        workload=workload,
        latency_ms=Figure(
            value,
            " and ".join(dict.fromkeys(estimate.latency_ms.source for estimate in estimates)),
            low if has_interval else None,
            high if has_interval else None,
        ),
        latency_cv=math.sqrt(max(0.0, variance)) / value,
        pause_factor=max(estimate.pause_factor for estimate in estimates),
        pause_cv=None,
        memory_bytes=max(
            (estimate.memory_bytes for estimate in estimates if estimate.memory_bytes), key=Figure.upper, default=None
        ),
    )


class WholeGpuEstimator(ServiceEstimator):
    """Estimates services on GPUs without MIG, without MPS or without both, and refuses the shares that these need."""

    def __init__(self, models: Estimator, sources: Mapping[str, str], no_mig: bool, no_mps: bool) -> None:
        super().__init__(models, sources)
        self._no_mig, self._no_mps = no_mig, no_mps

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Predict a service; see `gpuprof.domain.estimate.Estimator`.

        Raises `InputError` for a share that the GPUs cannot have, or without an estimate.
        """
        if not self._is_possible(device, share, processes):
            raise InputError(f"the plan's options exclude {share} of {device.name} for {model}")
        return super().estimate(model, device, batch, share, beside, processes)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the possible shares worth considering for a service."""
        return tuple(share for share in super().shares(model, device) if self._is_possible(device, share))

    def _is_possible(self, device: Device, share: Share, processes: int = 1) -> bool:
        needs_mps = share.sm_pct < 100.0 or processes > 1
        return device.kind != "gpu" or not ((self._no_mig and share.mig) or (self._no_mps and needs_mps))


def name_services(
    estimator: Estimator, sources: Mapping[str, str], no_mig: bool = False, no_mps: bool = False
) -> Estimator:
    """Return the estimator for services; unchanged where every service has its model's name.

    ``no_mig``, ``no_mps``: whether GPUs lack MIG or MPS.
    """
    renamed = {service: model for service, model in sources.items() if service != model}
    if no_mig or no_mps:
        return WholeGpuEstimator(estimator, renamed, no_mig, no_mps)
    return ServiceEstimator(estimator, renamed) if renamed else estimator


def name_tried_services(tried: TriedRuns, sources: Mapping[str, str]) -> TriedRuns:
    """Return the measured and failed runs of the models as runs of their services."""
    services: dict[str, list[str]] = {}
    mixed: dict[str, list[str]] = {}
    for service, model in sources.items():
        parts = name_parts(model)
        for name, _ in parts:
            (services if len(parts) == 1 else mixed).setdefault(name, []).append(service)

    def list_services(model: str) -> list[str]:
        return services.get(model) or [model]

    def list_all(model: str) -> list[str]:
        return [*services.get(model, ()), *mixed.get(model, ())] or [model]

    # Groups that ran matter only against groups that failed: a thousand services have a million pairs.
    together = tried.together if any(group.beside for group in tried.failed) else frozenset()
    # A service of several sizes fails where any size fails; a successful size proves nothing for the others.
    return TriedRuns(
        tuple(run for group in tried.failed for run in group.rename(list_all)),
        frozenset(
            (device, workload)
            for device, key in tried.measured
            for (workload,) in rename_workloads((key,), list_services)
        ),
        frozenset(
            (device, tuple(sorted(named))) for device, ran in together for named in rename_workloads(ran, list_services)
        ),
    )


class _WrappedEstimator:
    """Answers as another estimator does; subclasses change some of the answers."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batches of the wrapped estimator."""
        return self._estimator.batches(model, device, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares of the wrapped estimator."""
        return self._estimator.shares(model, device)

    def board_work_ms(self, model: str, device: Device) -> Figure | None:
        """Return the wrapped estimator's board work; see `gpuprof.domain.estimate`."""
        return board_work(self._estimator, model, device)


class IntervalEndEstimator(_WrappedEstimator):
    """Times and memory at an end of their intervals, without intervals; a `gpuprof.domain.estimate.Estimator`."""

    def __init__(self, estimator: Estimator, end: Literal["lower", "upper"]) -> None:
        super().__init__(estimator)
        self._end = end

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the wrapped estimator's estimate at this end. Raises `InputError` as it does."""
        estimate = self._estimator.estimate(model, device, batch, share, beside, processes)
        memory = None if estimate.memory_bytes is None else self._at_end(estimate.memory_bytes)
        latency = self._at_end(estimate.latency_ms)
        # In proportion: at a lower end the hidden part must stay below the time, or the throughput would be
        # meaningless.
        hidden = estimate.overlapped_ms * latency.value / estimate.latency_ms.value
        return replace(estimate, latency_ms=latency, memory_bytes=memory, overlapped_ms=hidden)

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return the wrapped estimator's times at this end. Raises `InputError` as it does."""
        return tuple(map(self._at_end, batch_times(self._estimator, model, device, batches, share, processes)))

    def board_work_ms(self, model: str, device: Device) -> Figure | None:
        """Return the wrapped estimator's board work at this end."""
        work = super().board_work_ms(model, device)
        return None if work is None else self._at_end(work)

    def _at_end(self, figure: Figure) -> Figure:
        end = figure.high if self._end == "upper" else figure.low
        return Figure(figure.value if end is None else end, figure.source)


class CorrectedEstimator(_WrappedEstimator):
    """Times of some models multiplied by a factor; a `gpuprof.domain.estimate.Estimator`.

    ``factors``: measured over estimated time of a batch, by model; ``beside``: by model and neighbour, a factor for
    each such neighbour.
    """

    def __init__(
        self, estimator: Estimator, factors: Mapping[str, float], beside: Mapping[tuple[str, str], float] | None = None
    ) -> None:
        super().__init__(estimator)
        self._factors, self._beside = factors, beside or {}

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the wrapped estimator's estimate with a corrected latency. Raises `InputError` as it does.

        The interval is widened to hold the served latency: the error of the estimate is now measured.
        """
        estimate = self._estimator.estimate(model, device, batch, share, beside, processes)
        neighbours = [self._beside[model, w.model] for w in beside if (model, w.model) in self._beside]
        if model not in self._factors and not neighbours:
            return estimate
        factor = self._factors.get(model, 1.0) * math.prod(neighbours)
        served, figure = factor * estimate.latency_ms.value, estimate.latency_ms
        latency = Figure(
            served,
            f"{figure.source}, corrected by serving",
            None if figure.low is None else min(figure.low, served),
            None if figure.high is None else max(figure.high, served),
        )
        return replace(estimate, latency_ms=latency, overlapped_ms=factor * estimate.overlapped_ms)


_Answer = TypeVar("_Answer")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not math.isnan(value)


class ForeignEstimator:
    """Implements `gpuprof.domain.estimate.Estimator` by a third-party estimator called ``name``.

    Exceptions of the estimator become `PluginError`, except `GpuprofError`, which reports that it cannot estimate a
    workload.
    """

    def __init__(self, name: str, estimator: Estimator) -> None:
        self._name = name
        self._estimator = estimator

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the wrapped estimator's estimate.

        Raises `InputError` as the estimator does; `PluginError` for any other exception or an invalid estimate.
        """
        estimate = self._ask(lambda: self._estimator.estimate(model, device, batch, share, beside, processes))
        if not isinstance(estimate, Estimate):
            raise PluginError(f"the estimator {self._name!r} returned a {type(estimate).__name__} and no Estimate")
        workload = Workload(model, batch, share, processes)
        if estimate.workload != workload:
            raise self._wrong("workload", f"the one that was asked for, {workload},", estimate.workload)
        if estimate.device != device.name:
            raise self._wrong("device", repr(device.name), estimate.device)
        self._require_figure("latency_ms", estimate.latency_ms, above_zero=True)
        if estimate.memory_bytes is not None:
            self._require_figure("memory_bytes", estimate.memory_bytes, above_zero=False)
        for name, value in (("latency_cv", estimate.latency_cv), ("pause_cv", estimate.pause_cv)):
            is_left_out = name == "pause_cv" and value is None
            if not is_left_out and not (_is_number(value) and 0.0 <= float(value or 0.0) <= MOST_VARIATION):
                raise self._wrong(name, f"a number from 0 to {MOST_VARIATION:g}", value)
        if not _is_number(estimate.pause_factor) or not 0.0 < estimate.pause_factor < math.inf:
            raise self._wrong("pause_factor", "a number above 0", estimate.pause_factor)
        return estimate

    def batch_times(
        self, model: str, device: Device, batches: Sequence[int], share: Share, processes: int = 1
    ) -> tuple[Figure, ...]:
        """Return the times at each of the batches. Raises as `estimate` does."""
        times = self._ask(lambda: batch_times(self._estimator, model, device, batches, share, processes))
        for time in times:
            self._require_figure("latency_ms", time, above_zero=True)
        return times

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batches of the wrapped estimator."""
        sizes = self._ask(lambda: tuple(self._estimator.batches(model, device, share)))
        if wrong := [size for size in sizes if not isinstance(size, Integral) or size < 1]:
            raise self._wrong("a batch size", "a whole number from 1", wrong[0])
        return tuple(map(int, sizes))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares of the wrapped estimator."""
        shares = self._ask(lambda: tuple(self._estimator.shares(model, device)))
        if wrong := [share for share in shares if not isinstance(share, Share)]:
            raise self._wrong("a share", "a Share", wrong[0])
        return shares

    def _require_figure(self, name: str, figure: Figure, *, above_zero: bool) -> None:
        if not isinstance(figure, Figure) or not isinstance(figure.source, str):
            raise self._wrong(name, "a Figure with a source", figure)
        low, high = (figure.value if end is None else end for end in (figure.low, figure.high))
        if not all(map(_is_number, (low, figure.value, high))) or not 0.0 <= figure.value < math.inf:
            raise self._wrong(name, "a number above 0" if above_zero else "a number from 0", figure.value)
        if above_zero and figure.value == 0.0:
            raise self._wrong(name, "a number above 0", figure.value)
        if not low <= figure.value <= high:
            raise self._wrong(name, f"within its interval, {low} to {high},", figure.value)

    def _wrong(self, name: str, expected: str, value: object) -> PluginError:
        text = " ".join(reprlib.repr(value).split())
        return PluginError(f"the estimator {self._name!r} is wrong: {name} must be {expected} but is {text}")

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        try:
            return question()
        except GpuprofError:
            raise
        except Exception as error:  # plug-ins may raise anything
            raise describe_failure("estimator", self._name, self._estimator, error) from error


class FailureAwareEstimator(_WrappedEstimator):
    """Implements `gpuprof.domain.estimate.Estimator` by another estimator, and refuses failed workloads."""

    def __init__(self, estimator: Estimator, models: KnownModels) -> None:
        super().__init__(estimator)
        self._known = models
        self._models: dict[str, MeasuredModel | None] = {}

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the estimate of the wrapped estimator.

        Raises `InputError` as the estimator does, and where a failure rules the workload out.
        """
        workload = Workload(model, batch, share, processes)
        if (record := self._find_model(model)) is not None:
            self._known.require_no_failure(record, device, workload, beside)
        return self._estimator.estimate(model, device, batch, share, beside, processes)

    def _find_model(self, model: str) -> MeasuredModel | None:
        """Return the measurements of a model, None where the database lacks the model and there is no file."""
        if model not in self._models:
            self._models[model] = None
            with suppress(InputError):
                self._models[model] = self._known.find_model(model)
        return self._models[model]


#: The default: measurements, interpolation between them, and the roofline or the learned model beyond them.
DEFAULT = "database"
BUILTIN = {
    DEFAULT: "gpuprof.estimators.database:DatabaseEstimator",
    "gk": "gpuprof.estimators.gk:GkEstimator",
    "igniter": "gpuprof.estimators.igniter.igniter:IgniterEstimator",
    "measured": "gpuprof.estimators.measured.measured_only:MeasuredEstimator",
    "usher": "gpuprof.estimators.measured.measured_only:UsherEstimator",
}


def estimator_names() -> tuple[str, ...]:
    """Return the names of all estimators, built in and installed, sorted."""
    return plugin_names("estimator", BUILTIN)


def make_estimator(source: str | Estimator, db: KernelDb | None, graphs: Mapping[str, Path] | None = None) -> Estimator:
    """Return an estimator that refuses workloads that failed according to the database.

    Raises `InputError` when there is no such estimator, `PluginError` when it cannot be made. ``source``: the name of a
    built-in or installed one, ``package.module:Class``, or an estimator. Built-in classes are called with the kernel
    database and the files, others with the database alone. ``graphs``: ONNX files of models by name.
    """
    name = identify(source)
    estimator = source if not isinstance(source, str) else _construct(source, db, graphs)
    require_methods("estimator", name, estimator, "estimate", "batches", "shares")
    if is_plugin(source):
        estimator = ForeignEstimator(name, estimator)
    # The default estimator refuses failed workloads by itself, also at other sizes of a model's dimensions.
    return estimator if db is None or name == DEFAULT else FailureAwareEstimator(estimator, KnownModels(db, graphs))


def _construct(name: str, db: KernelDb | None, graphs: Mapping[str, Path] | None) -> Estimator:
    plugin = load_plugin("estimator", name, BUILTIN)
    try:
        estimator: Estimator = plugin(db, graphs) if name in BUILTIN else plugin(db)
    except GpuprofError:
        raise
    except Exception as error:  # a plug-in may raise anything
        reason = describe_error(error)
        raise PluginError(f"the estimator {name!r} cannot be made from a kernel database: {reason}") from error
    return estimator


def is_plugin(source: str | Estimator) -> bool:
    """Return whether an estimator, given by name or as an object, is not one of gpuprof's own."""
    return source not in BUILTIN if isinstance(source, str) else not identify(source).startswith("gpuprof.")


def read_premise(source: str | Estimator) -> str | None:
    """Return the premise of an estimator, which its assumed times rest on; None without one.

    Raises `InputError` when there is no estimator of the name.
    """
    plugin = load_plugin("estimator", source, BUILTIN) if isinstance(source, str) else source
    premise = getattr(plugin, "premise", None)
    return None if premise is None else str(premise)
