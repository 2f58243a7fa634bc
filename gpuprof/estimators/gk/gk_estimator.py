"""USHER's GK-Estimator as an estimator to choose: everything from the kernels in the database, nothing looked up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.conformal import ENOUGH_MODELS, LEVEL, quantile
from gpuprof.estimators.cross_gpu.kernels import LaunchMode, list_kernels
from gpuprof.estimators.cross_gpu.kernels_by_batch import host_seconds
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.estimators.gk.gk import ModelRequirement, require
from gpuprof.estimators.gk.kernel_table import KernelTable, read_kernel_table
from gpuprof.estimators.measured.padding import padding_of
from gpuprof.estimators.roofline.op_work import GraphWork, work_of
from gpuprof.estimators.roofline.roofline import op_times_s, roofline_ms, unknown_ms
from gpuprof.kernel_db.store import KernelDb

SOURCE = "GK-Estimator"


class GkEstimator:
    """Implements `gpuprof.domain.estimate.Estimator` by the kernels of ops (`gpuprof.estimators.gk.gk`).

    A model's latency is the sum of its kernels' times, its compute requirement that of concurrent kernels, its memory
    the largest size of live tensors. Kernels are measured on the whole device; times under a share are scaled by the
    roofline's ratio. The interval comes from the errors of this estimator on the models measured on the device, from
    four models on; an op type without kernels counts with its roofline and widens the interval. Neighbours slow a model
    down as in `DatabaseEstimator`. ``graphs``: as for `DatabaseEstimator`.
    """

    def __init__(self, db: KernelDb | None, graphs: Mapping[str, Path] | None = None) -> None:
        self._db = db
        self._database = DatabaseEstimator(db, graphs)
        self._tables: dict[str, KernelTable] = {}
        self._spreads: dict[str, float | None] = {}
        self._known: dict[tuple[str, str, int], _ModelWork] = {}

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models in the database, sorted."""
        return self._database.models

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Predict ``processes`` copies of ``model``, each in an equal part of ``share``, with ``beside`` running.

        Raises `InputError` when the database holds no kernels of the device, or the model's ONNX file is not there.
        """
        if batch < 1 or processes < 1:
            raise InputError(f"batch and processes must be at least 1 but got {batch} and {processes}")
        requirement = self._of(model, device, batch)
        required, work = requirement.required, requirement.work
        part = Share(share.sm_pct / processes, share.mig)
        longer = roofline_ms(work, device, part) / roofline_ms(work, device, Share())
        latency = self._figure(requirement, device).scale_by(longer)
        alone = Estimate(
            workload=Workload(model, batch, share, processes),
            device=device.name,
            latency_ms=latency,
            memory_bytes=Figure(required.memory_bytes, SOURCE),
            weight_bytes=work.weight_bytes,
            creq_pct=_creq(required),
            unknown_ops=required.unknown_ops,
            padding=padding_of(self._database.known.find_model(model), device),
        )
        if not beside:
            return alone
        slowed = self._database.colocations.beside(latency, device, alone.workload, tuple(beside))
        return replace(alone, latency_ms=slowed)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes worth considering, as `DatabaseEstimator` does."""
        return self._database.batches(model, device, share)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares worth considering, as `DatabaseEstimator` does."""
        return self._database.shares(model, device)

    def _of(self, model: str, device: Device, batch: int) -> _ModelWork:
        key = (model, device.name, batch)
        if key not in self._known:
            table = self._table(device)
            graph = self._database.known.read_graph(model, batch)
            mode = LaunchMode.ONNXRUNTIME  # the runtime of `profile`'s averages
            host_ms = 1e3 * host_seconds(list_kernels(graph, "float32", mode), mode)
            required = require(graph, table, host_ms=host_ms)
            work = replace(work_of(graph), unknown_ops=required.unknown_ops)
            self._known[key] = _ModelWork(required, work)
        return self._known[key]

    def _figure(self, work: _ModelWork, device: Device) -> Figure:
        """Return the latency on the whole device, ops without kernels by their roofline."""
        unseen = np.array([op in work.work.unknown_ops for op in work.work.op_types], dtype=bool)
        value = work.required.latency_ms + 1e3 * float(op_times_s(work.work, device, Share())[unseen].sum())
        more = unknown_ms(work.work, device, Share())
        spread = self._spread(device)
        if spread is None and not more:
            return Figure(value, SOURCE)
        return Figure(value, SOURCE, value / (spread or 1.0), value * (spread or 1.0) + more)

    def _spread(self, device: Device) -> float | None:
        """Return the error of estimated latencies against measurements, as a factor; None with too few models."""
        if device.name not in self._spreads:
            self._spreads[device.name] = None  # ends the recursion
            ratios = []
            for model in self.models:
                ratio = self._ratio(model, device)
                if ratio:
                    ratios.append(max(ratio, 1.0 / ratio))
            self._spreads[device.name] = quantile(ratios, LEVEL) if len(ratios) >= ENOUGH_MODELS else None
        return self._spreads[device.name]

    def _ratio(self, model: str, device: Device) -> float | None:
        if device.name not in self._database.known.devices_of(model):
            return None
        batch = self._database.batches(model, device, Share())[0]
        try:
            measured = self._database.estimate(model, device, batch, Share()).latency_ms.value
            estimated_ms = self._of(model, device, batch).required.latency_ms
        except InputError:  # the model's file is gone
            return None
        return measured / estimated_ms if estimated_ms else None

    def _table(self, device: Device) -> KernelTable:
        if device.name not in self._tables and self._db is not None:
            self._tables[device.name] = read_kernel_table(self._db, device)
        table = self._tables.get(device.name)
        if not table:
            raise InputError(
                f"the database holds no kernels of {device.name} that are tied to ops, which the GK-Estimator adds up",
                "gpuprof profile --collector cupti (or nsys) on it ties kernels by ONNX Runtime's own profile; from "
                "reports, name both: --from-report KERNELS --from-report ONNXRUNTIME_PROFILE.json",
            )
        return table


@dataclass(frozen=True, slots=True)
class _ModelWork:
    """Requirement and work of a model at a batch size, ops without kernels as those of unknown cost."""

    required: ModelRequirement
    work: GraphWork


def _creq(required: ModelRequirement) -> tuple[tuple[str, Figure], ...]:
    values = {
        "max_occupancy": required.max_occupancy_pct,
        "wavg_occupancy": required.wavg_occupancy_pct,
        "wavg_sm_util": required.wavg_sm_util_pct,
    }
    return tuple((name, Figure(value, SOURCE)) for name, value in values.items() if value is not None)
