"""Estimators from measurements only: unchanged, or under USHER's premise on shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import ASSUMED, INTERPOLATED, MEASURED, Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.measured.known_models import KnownModels, padding_of, require_success
from gpuprof.estimators.measured.measured import CREQ_METRICS, Point
from gpuprof.kernel_db.store import KernelDb


class MeasuredEstimator:
    """Implements `gpuprof.domain.estimate.Estimator` by the rows of the database alone.

    Neighbours have no effect inside MIG instances of their own, and are refused elsewhere: interference belongs to
    other estimators. ``graphs``: ONNX files; a file whose hash is in the database has its figures.
    """

    def __init__(self, db: KernelDb | None, graphs: Mapping[str, Path] | None = None) -> None:
        if db is None:
            raise InputError("only what was measured is asked for, and there is no database", "give --db DATABASE")
        self._known = KnownModels(db, graphs)
        self._points: dict[tuple[str, str], dict[tuple[int, Share, int], Point]] = {}

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the measured estimate.

        Raises `InputError` when exactly this workload was not measured, or neighbours run beside it.
        """
        workload = Workload(model, batch, share, processes)
        point = self._require_points(model, device).get((batch, share, processes))
        if point is None:
            raise InputError(
                f"{model} was not measured on {device.name} at batch {batch} with {processes} "
                f"{'process' if processes == 1 else 'processes'} under {share}",
                "profile it so, or choose another --estimator",
            )
        if beside:
            names = ", ".join(neighbour.model for neighbour in beside)
            raise InputError(f"{model} was measured alone and not beside {names}", "choose --estimator database")
        estimate = _estimate_of_point(workload, device, point, MEASURED)
        return replace(estimate, padding=padding_of(self._known.find_model(model), device))

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes measured under the share."""
        return tuple(sorted({point.batch for point in self._points_of(model, device).values() if point.share == share}))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the measured shares."""
        shares = {point.share for point in self._points_of(model, device).values()}
        return tuple(sorted(shares, key=lambda share: (device.fraction(share), share.mig or "")))

    def _require_points(self, model: str, device: Device) -> dict[tuple[int, Share, int], Point]:
        """Return the measured points. Raises `InputError` if all measurements failed."""
        points = self._points_of(model, device)
        if not points:
            require_success(model, device, self._known.find_model(model).failures.get(device.name, ()))
        return points

    def _points_of(self, model: str, device: Device) -> dict[tuple[int, Share, int], Point]:
        key = (model, device.name)
        if key not in self._points:
            points = self._known.find_model(model).points.get(device.name, ())
            self._points[key] = {(point.batch, point.share, point.processes): point for point in points}
        return self._points[key]


class UsherEstimator(MeasuredEstimator):
    """USHER's premise (OSDI'24 §3): under a share of at least its compute requirement a model is as fast as alone.

    So measurements on the whole device hold under every share down to the smallest known requirement of the batch,
    beside any neighbours. Elvinger's thesis measures where the premise fails (§6.2). Unmeasured batch sizes take times
    interpolated between measured sizes, under the same share or on the whole device, with the requirement of the next
    larger size; batches below the smallest measured size take its time, since they could be padded. Times that hold by
    the premise alone are assumed, and never called measured or interpolated.
    """

    premise = "USHER's: models that fit by their compute requirement do not slow each other down"

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the measurement under the share, or on the whole device.

        Raises `InputError` when neither this nor a larger batch was measured under the share; nor on the whole device,
        or its requirement exceeds the share.
        """
        workload = Workload(model, batch, share, processes)
        points = self._require_points(model, device)
        point = points.get((batch, share, processes))
        if point is not None:
            return _estimate_of_point(workload, device, point, ASSUMED if beside else MEASURED)
        source = ASSUMED
        whole = points.get((batch, Share(), processes)) or self._fill_up(points, batch, Share(), processes)
        columns = CREQ_METRICS.values()
        required = [] if whole is None else [whole.figures[name] for name in columns if name in whole.figures]
        if share.mig is not None or not required or min(required) > share.sm_pct + 1e-6:
            whole, source = self._fill_up(points, batch, share, processes), ASSUMED if beside else INTERPOLATED
        if whole is None:
            raise InputError(
                f"{model} at batch {batch} is not known to require {share} of {device.name} or less",
                "profile its compute requirement, or choose another --estimator",
            )
        return _estimate_of_point(workload, device, whole, source)

    @staticmethod
    def _fill_up(
        points: Mapping[tuple[int, Share, int], Point], batch: int, share: Share, processes: int
    ) -> Point | None:
        """Return the next larger batch measured under the share, with the time interpolated to ``batch``."""
        sizes = sorted(size for size, under, count in points if under == share and count == processes)
        larger = next((size for size in sizes if size > batch), None)
        if larger is None:
            return None
        whole = points[larger, share, processes]
        smaller = max((size for size in sizes if size < batch), default=None)
        if smaller is None:
            return whole
        least_ms = points[smaller, share, processes].latency_ms
        part = (batch - smaller) / (larger - smaller)
        return replace(whole, latency_ms=least_ms + part * (whole.latency_ms - least_ms))

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes measured under the share, or on the whole device."""
        return super().batches(model, device, share) or super().batches(model, device, Share())


def _estimate_of_point(workload: Workload, device: Device, point: Point, source: str) -> Estimate:
    figures = {name: Figure(value, point.mark_source(MEASURED)) for name, value in point.figures.items()}
    return Estimate(
        workload=workload,
        device=device.name,
        latency_ms=Figure(point.latency_ms, point.mark_source(source), *point.ends_of(point.latency_ms)),
        latency_cv=point.cv,
        pause_factor=point.pause_factor,
        pause_cv=point.pause_cv,
        memory_bytes=figures.get("memory_peak_bytes"),
        creq_pct=tuple((metric, figures[column]) for metric, column in CREQ_METRICS.items() if column in figures),
        dram_pct=figures.get("dram_pct"),
        l2_pct=figures.get("l2_pct"),
        power_w=figures.get("power_w"),
    )
