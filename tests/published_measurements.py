"""The profiles of Elvinger's thesis, imported into a kernel database, under an estimator's name."""

import tempfile
from functools import cache
from pathlib import Path

from gpuprof.domain.catalogue import device
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimator
from gpuprof.estimators.builtin import make_estimator
from gpuprof.kernel_db.store import KernelDb
from gpuprof.lab.scenarios import IGNITER_DEVICE, build_database


@cache
def _work_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is removed when the tests end."""
    return tempfile.TemporaryDirectory(prefix="gpuprof-published-")


def thesis_estimator(name: str = "usher") -> Estimator:
    """Return what ``--estimator name`` says of the thesis's profiles."""
    folder = Path(_work_folder().name)
    return make_estimator(name, KernelDb(build_database("thesis", folder, folder)))


def v100() -> Device:
    """Return the device of the thesis's profiles."""
    return device(IGNITER_DEVICE)
