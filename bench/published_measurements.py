"""Published measurements as the command line has them: in a kernel database, asked by an estimator's name."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from bench.v100_profiles import v100_profiles
from gpuprof.domain.catalogue import datasets, device
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimator
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.services import name_services
from gpuprof.kernel_db.importing import import_files
from gpuprof.kernel_db.store import KernelDb


@cache
def import_published(path: Path) -> KernelDb:
    """Return a database with what ``gpuprof db import`` makes of a file or folder, for as long as the program runs."""
    database = KernelDb.create(keep_until_exit() / "db")
    import_files(database, [path])
    return database


def keep_until_exit() -> Path:
    """Return a new folder that is removed when the program ends."""
    folder = tempfile.mkdtemp(prefix="gpuprof-published-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def published_estimator(name: str, path: Path, services: Mapping[str, str] | None = None) -> Estimator:
    """Return what ``--estimator name`` says of a publication.

    Parameters
    ----------
    name : str
    path : Path
        File or folder, as published.
    services : mapping of str to str, optional
        Service → model, as the column ``service`` of slo.csv gives them.
    """
    return name_services(make_estimator(name, import_published(path)), services or {})


def thesis_estimator() -> Estimator:
    """Return USHER's premise on the profiles of Elvinger's thesis, which the package ships."""
    return published_estimator("usher", Path(str(datasets() / "v100_profiles.csv")))


def v100() -> Device:
    """Return the device of the thesis's profiles."""
    return device(v100_profiles().device)
