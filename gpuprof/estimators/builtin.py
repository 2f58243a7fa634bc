"""Finds an estimator by name: built in, installed under ``gpuprof.estimators``, or ``package.module:Class``."""

from __future__ import annotations

from gpuprof.domain.estimate import Estimator
from gpuprof.errors import InputError
from gpuprof.kernel_db.store import KernelDb
from gpuprof.plugins import load_plugin

BUILTIN = {
    "database": "gpuprof.estimators.database:DatabaseEstimator",
    "gk": "gpuprof.estimators.gk.gk_estimator:GkEstimator",
}


def make_estimator(name: str, db: KernelDb | None) -> Estimator:
    """Return the estimator called ``name``; its class is called with the kernel database.

    Raises
    ------
    InputError
        When there is none, or it cannot be made from a database.
    """
    try:
        made: Estimator = load_plugin("estimator", name, BUILTIN)(db)
    except TypeError as error:
        raise InputError(f"the estimator {name!r} cannot be made from a kernel database: {error}") from None
    return made
