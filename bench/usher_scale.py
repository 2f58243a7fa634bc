"""A fleet of USHER's scale: 6,000 GPUs of four kinds and 15 million requests/s over the models of its Table 1."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from bench.reproduce.stand_in_db import write_stand_ins
from bench.v100_profiles import v100_profiles
from gpuprof.domain.catalogue import device
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.estimate import Estimator
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.estimators.builtin import make_estimator
from gpuprof.kernel_db.store import KernelDb

#: Models of USHER's Table 1 with their SLOs (ms), as far as the catalogue has profiles of them.
_SLO_MS = {
    "resnet50": 108.0,
    "resnext50_32x4d": 116.0,
    "mobilenet_v2": 64.0,
    "densenet121": 202.0,
    "inception_v3": 116.0,
    "efficientnet_b7": 217.0,
    "bert": 35.0,
    "gpt2": 140.0,
}
_FLEET = {"h100": 3000, "a100-80": 1500, "v100": 1000, "l4": 500}
_RATE_RPS = 15e6


@cache
def estimator() -> Estimator:
    """Return USHER's premise on the V100's profiles, scaled to the other GPUs by the ratio of float32 peaks."""
    folder = tempfile.mkdtemp(prefix="gpuprof-usher-scale-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_estimator("usher", KernelDb(write_stand_ins(Path(folder) / "db", tuple(_FLEET))))


def fleet() -> Fleet:
    """Return the 6,000 GPUs."""
    return Fleet(tuple(FleetEntry(device(name), count) for name, count in _FLEET.items()))


def demands() -> tuple[Demand, ...]:
    """Return 15 million requests/s, shared out so that every model takes about as much of the fleet."""
    best: dict[str, float] = {}
    for row in v100_profiles().rows:
        if row.model in _SLO_MS and row.throughput_rps is not None:
            best[row.model] = max(best.get(row.model, 0.0), row.throughput_rps)
    whole = sum(best.values())
    return tuple(Demand(model, _RATE_RPS * best[model] / whole, Slo(slo)) for model, slo in _SLO_MS.items())
