"""iGniter's published V100 profiles (icloud-ecnu/igniter) as an estimator, and its workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.igniter.fit import fit_hardware, fit_published_workload, fit_workload
from gpuprof.estimators.igniter.igniter import HardwareCoefficients, Placed, WorkloadCoefficients, predict
from gpuprof.estimators.igniter.profile import read_igniter_profile

#: SLO (ms) and rate (requests/s) of W1 … W12: three applications of each model (iGniter, Table 3).
_TABLE_3 = {
    "alexnet": ((10, 1200), (15, 400), (20, 800)),
    "resnet50": ((20, 400), (30, 600), (40, 200)),
    "vgg19": ((20, 300), (30, 400), (40, 200)),
    "ssd": ((25, 150), (40, 50), (55, 300)),
}
#: The example of §2.3, whose plan Table 1 prints.
_TABLE_1 = {"alexnet": (15, 500), "resnet50": (40, 400), "vgg19": (60, 200)}


@dataclass(frozen=True)
class TabledIgniterEstimator:
    """iGniter's analytical model of inference on a GPU shared by MPS.

    Attributes
    ----------
    hardware : HardwareCoefficients
    workloads : mapping of str to WorkloadCoefficients
        By the name of the demand.
    """

    hardware: HardwareCoefficients
    workloads: Mapping[str, WorkloadCoefficients]

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the prediction of equations 1 to 10."""
        if model not in self.workloads or processes > 1 or share.mig is not None:
            raise InputError(f"nothing is known of {model} with {processes} processes on {share}")
        workload = Workload(model, batch, share)
        predicted = predict(
            self.hardware, self._place_workload(workload), [self._place_workload(other) for other in beside]
        )
        return Estimate(workload, device.name, Figure(predicted.latency_ms, "iGniter"), overlapped_ms=predicted.load_ms)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes up to 32, the largest profiled."""
        return tuple(range(1, 33))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the multiples of 2.5%."""
        return tuple(Share(2.5 * n) for n in range(1, 41))

    def _place_workload(self, workload: Workload) -> Placed:
        return Placed(self.workloads[workload.model], workload.batch, workload.share.sm_pct / 100.0)


def read_estimator(profile: Path, models: Mapping[str, str], *, bounded: bool = False) -> TabledIgniterEstimator:
    """Read and fit the published profiles.

    Parameters
    ----------
    profile : Path
        ``config.jsonl`` as iGniter publishes it.
    models : mapping of str to str
        Name of a demand → model of the profile.
    bounded : bool
        Fit as `gpuprof.estimators.igniter.fit` does, whose coefficients stay positive, and not as the authors do.
    """
    measured, workloads = read_igniter_profile(profile)
    hardware = fit_hardware(measured)
    fit = fit_workload if bounded else fit_published_workload
    fitted = {name: fit(one, hardware) for name, one in workloads.items()}
    return TabledIgniterEstimator(hardware, {name: fitted[model] for name, model in models.items()})


def table_1() -> tuple[dict[str, str], tuple[Demand, ...]]:
    """Return the models and demands of §2.3."""
    demands = tuple(Demand(model, rate, Slo(slo)) for model, (slo, rate) in _TABLE_1.items())
    return {demand.model: demand.model for demand in demands}, demands


def table_3(copies: int = 1) -> tuple[dict[str, str], tuple[Demand, ...]]:
    """Return W1 … W12, each ``copies`` times."""
    models, demands = {}, []
    for copy in range(copies):
        number = 0
        for model, apps in _TABLE_3.items():
            for slo, rate in apps:
                number += 1
                name = f"W{number}" if copy == 0 else f"W{number}#{copy}"
                models[name] = model
                demands.append(Demand(name, rate, Slo(slo)))
    return models, tuple(demands)
