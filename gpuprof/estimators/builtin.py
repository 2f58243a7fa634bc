"""Finds an estimator by name: built in, installed under ``gpuprof.estimators``, or ``package.module:Class``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpuprof.domain.estimate import Estimator
from gpuprof.errors import InputError
from gpuprof.estimators.failure_aware import FailureAwareEstimator
from gpuprof.kernel_db.store import KernelDb
from gpuprof.plugins import load_plugin

#: The default: what was measured, what lies between, and beyond that the roofline or the learned model.
DEFAULT = "database"
BUILTIN = {
    DEFAULT: "gpuprof.estimators.database:DatabaseEstimator",
    "gk": "gpuprof.estimators.gk.gk_estimator:GkEstimator",
    "igniter": "gpuprof.estimators.igniter.igniter_estimator:IgniterEstimator",
    "measured": "gpuprof.estimators.measured.measured_only:MeasuredEstimator",
    "usher": "gpuprof.estimators.measured.measured_only:UsherEstimator",
}


def make_estimator(name: str, db: KernelDb | None, graphs: Mapping[str, Path] | None = None) -> Estimator:
    """Return the estimator called ``name``; it refuses what the database knows to fail.

    Parameters
    ----------
    name : str
        Built in, installed, or ``package.module:Class``. The classes that are built in are called with the kernel
        database and the files, others with the database alone.
    db : KernelDb or None
    graphs : mapping of str to Path, optional
        ONNX files of models by name.

    Raises
    ------
    InputError
        When there is none, or it cannot be made from a database.
    """
    plugin = load_plugin("estimator", name, BUILTIN)
    try:
        made: Estimator = plugin(db, graphs) if name in BUILTIN else plugin(db)
    except TypeError as error:
        raise InputError(f"the estimator {name!r} cannot be made from a kernel database: {error}") from None
    return made if db is None or name == DEFAULT else FailureAwareEstimator(made, db)
