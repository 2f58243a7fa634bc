"""iGniter's published V100 profiles (icloud-ecnu/igniter) and its workloads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpuprof.domain.demand import Demand, Slo
from gpuprof.estimators.igniter.fit import fit_hardware, fit_published_workload, fit_workload
from gpuprof.estimators.igniter.igniter_estimator import IgniterEstimator
from gpuprof.estimators.igniter.profile import read_igniter_profile

DEVICE = "v100"
#: SLO (ms) and rate (requests/s) of W1 … W12: three applications of each model (iGniter, Table 3).
_TABLE_3 = {
    "alexnet": ((10, 1200), (15, 400), (20, 800)),
    "resnet50": ((20, 400), (30, 600), (40, 200)),
    "vgg19": ((20, 300), (30, 400), (40, 200)),
    "ssd": ((25, 150), (40, 50), (55, 300)),
}
#: The example of §2.3, whose plan Table 1 prints.
_TABLE_1 = {"alexnet": (15, 500), "resnet50": (40, 400), "vgg19": (60, 200)}


def read_estimator(profile: Path, models: Mapping[str, str], *, bounded: bool = False) -> IgniterEstimator:
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
    own = {name: fitted[model] for name, model in models.items()}
    return IgniterEstimator(None, coefficients={DEVICE: (hardware, own)})


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
