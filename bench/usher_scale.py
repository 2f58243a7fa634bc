"""A fleet of USHER's scale: 6,000 GPUs of four kinds and 15 million requests/s over the models of its Table 1."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from gpuprof.domain.catalogue import device
from gpuprof.domain.demand import Demand
from gpuprof.domain.estimate import Estimator
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.estimators.builtin import make_estimator
from gpuprof.kernel_db.store import KernelDb
from gpuprof.lab.publications import scale_v100, usher_demands

_FLEET = {"h100": 3000, "a100-80": 1500, "v100": 1000, "l4": 500}
_RATE_RPS = 15e6


@cache
def estimator() -> Estimator:
    """Return USHER's premise on the V100's profiles, scaled to the other GPUs by the ratio of float32 peaks."""
    folder = tempfile.mkdtemp(prefix="gpuprof-usher-scale-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    database = KernelDb.create(Path(folder) / "db")
    scale_v100(database, tuple(_FLEET))
    return make_estimator("usher", database)


def fleet() -> Fleet:
    """Return the 6,000 GPUs."""
    return Fleet(tuple(FleetEntry(device(name), count) for name, count in _FLEET.items()))


def demands() -> tuple[Demand, ...]:
    """Return 15 million requests/s, shared out so that every model takes about as much of the fleet."""
    return usher_demands(_RATE_RPS)
