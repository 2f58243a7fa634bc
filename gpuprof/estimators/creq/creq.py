"""Creq of models without measurements on a GPU, with intervals from the errors on profiled models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from gpuprof.domain.catalogue import datasets
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure
from gpuprof.estimators.creq.launch_model import LaunchModel
from gpuprof.estimators.creq.requirement import fill_of
from gpuprof.estimators.cross_gpu.cross_gpu import UnmeasuredModel, read_trained_files, shipped_model
from gpuprof.estimators.cross_gpu.latency_grid import CrossGpuLatencies

SOURCE = "creq from launches"
METRICS = ("max_occupancy", "wavg_occupancy", "wavg_sm_util")
_WHOLE = 100.0


@dataclass(frozen=True, slots=True)
class CreqModel:
    """A model of launches with the errors of its predicted requirements."""

    launches: LaunchModel
    #: Metric → points added to a prediction for the ends of its interval. The interval held nine of ten of the thesis's
    #: figures, each model predicted without its own figures.
    interval: Mapping[str, tuple[float, float]]

    def figure(self, metric: str, value: float, basis: str) -> Figure:
        """Return a predicted requirement with its interval, within 0 to 100 percent."""
        low, high = self.interval[metric]
        return Figure(value, f"{SOURCE}: {basis}", max(0.0, value + low), min(_WHOLE, max(value, value + high)))


@cache
def shipped_creq() -> CreqModel:
    """Return the shipped model; every file is checked against its hash in the provenance.

    Raises `InputError` when a file is missing or differs from the trained file.
    """
    metadata, files = read_trained_files(datasets() / "creq")
    interval = {metric: (float(low), float(high)) for metric, (low, high) in metadata["interval"].items()}
    return CreqModel(LaunchModel.of_files(files), interval)


class UnprofiledRequirements:
    """Predicts Creq of models on GPUs from their kernels, cached by batch. ``latencies``: the source of the kernels."""

    def __init__(self, latencies: CrossGpuLatencies) -> None:
        self._latencies = latencies
        self._known: dict[tuple[str, str, int], tuple[tuple[str, Figure], ...]] = {}

    def predict(self, target: UnmeasuredModel, device: Device, batch: int) -> tuple[tuple[str, Figure], ...]:
        """Return the requirement of ``batch`` by each metric, in percent of the whole of ``device``.

        Raises `InputError` when the device lacks the precision, or the model does not take the batch.
        """
        key = (target.name, device.name, batch)
        if key not in self._known:
            by_batch, model = self._latencies.kernels_of(target, device), shipped_creq()
            kernels, precision, runtime = by_batch.at(batch), by_batch.precision, by_batch.runtime
            figures: tuple[tuple[str, Figure], ...] = ()
            if len(kernels.ops) and device.sm is not None:
                fill = fill_of(kernels, shipped_model(), model.launches, device, precision, runtime)
                values = (fill.max_occupancy_pct(), fill.wavg_occupancy_pct(), fill.wavg_sm_util_pct())
                execution = f"{precision}, {runtime}"
                pairs = zip(METRICS, values, strict=True)
                figures = tuple((metric, model.figure(metric, value, execution)) for metric, value in pairs)
            self._known[key] = figures
        return self._known[key]
