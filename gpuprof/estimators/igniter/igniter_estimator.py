"""iGniter's analytical model (TPDS'22, section 3) as an estimator to choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, unknown_name
from gpuprof.estimators.igniter.igniter import (
    HardwareCoefficients,
    PlacedWorkload,
    WorkloadCoefficients,
    fit_hardware,
    fit_published_workload,
    fit_workload,
    predict,
)
from gpuprof.estimators.igniter.profile import coefficients_path, imported_profile, profile_of, read_coefficients
from gpuprof.kernel_db.store import KernelDb

SOURCE = "iGniter"
#: Largest batch in iGniter's profiles; its lines are unreliable beyond.
_MOST_BATCH = 32

Coefficients = tuple[HardwareCoefficients, Mapping[str, WorkloadCoefficients]]


class IgniterEstimator:
    """Implements `gpuprof.domain.estimate.Estimator` by equations 1 to 10 of the paper.

    The coefficients of a device are those of an imported profile of iGniter's own, fitted as by its authors; else those
    kept beside the database by ``gpuprof calibrate``; else fitted to the measurements in the database. ``graphs``:
    unused, since the model reads no graph; ``coefficients``: by device, instead of a database.
    """

    def __init__(
        self,
        db: KernelDb | None,
        graphs: Mapping[str, Path] | None = None,
        coefficients: Mapping[str, Coefficients] | None = None,
    ) -> None:
        self._db = db
        self._known: dict[str, Coefficients] = dict(coefficients or {})

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time beside all neighbours; loading the next batch is hidden (equation 2).

        Raises `InputError` for several processes, a MIG instance, or a model or device without coefficients.
        """
        if processes > 1 or share.mig is not None or batch < 1:
            raise InputError(
                f"iGniter's model has one process on a share of the whole device: nothing is known of {model} "
                f"at batch {batch} with {processes} processes under {share}"
            )
        workload = Workload(model, batch, share)
        hardware, _ = self.coefficients(device)
        victim, neighbours = (
            self._place_workload(device, workload),
            [self._place_workload(device, neighbour) for neighbour in beside],
        )
        predicted = predict(hardware, victim, neighbours)
        return Estimate(workload, device.name, Figure(predicted.latency_ms, SOURCE), overlapped_ms=predicted.load_ms)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes up to 32, the largest in iGniter's profiles."""
        self._workload(device, model)
        return tuple(range(1, _MOST_BATCH + 1))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the multiples of the smallest unit of a share."""
        self._workload(device, model)
        unit = self.coefficients(device)[0].share_unit
        return tuple(Share(min(100.0, 100.0 * unit * n)) for n in range(1, round(1.0 / unit) + 1))

    def coefficients(self, device: Device) -> Coefficients:
        """Return the coefficients of a device and of the models on it.

        Raises `InputError` when the device has none.
        """
        if device.name not in self._known:
            self._known[device.name] = self._read_coefficients(device)
        return self._known[device.name]

    def _read_coefficients(self, device: Device) -> Coefficients:
        if self._db is None:
            raise InputError(f"iGniter's coefficients of {device.name} are not known", "give --db DATABASE")
        imported = imported_profile(self._db, device)
        if imported is not None:
            hardware = fit_hardware(imported[0])
            return hardware, {name: fit_published_workload(row, hardware) for name, row in imported[1].items()}
        path = coefficients_path(self._db.path, device.name)
        if path.is_file():
            _, hardware, workloads = read_coefficients(path)
            return hardware, workloads
        profile, models = profile_of(self._db, device)
        hardware = fit_hardware(profile)
        return hardware, {name: fit_workload(model, hardware) for name, model in models.items()}

    def _workload(self, device: Device, model: str) -> WorkloadCoefficients:
        workloads = self.coefficients(device)[1]
        if model not in workloads:
            raise unknown_name(f"model with iGniter's coefficients of {device.name}", model, sorted(workloads))
        return workloads[model]

    def _place_workload(self, device: Device, workload: Workload) -> PlacedWorkload:
        return PlacedWorkload(self._workload(device, workload.model), workload.batch, workload.share.sm_pct / 100.0)
