"""Finds an estimator by name, built in, installed or ``package.module:Class``; known failures are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpuprof.domain.estimate import Estimator
from gpuprof.errors import GpuprofError, PluginError
from gpuprof.estimators.measured.known_models import KnownModels
from gpuprof.estimators.wrappers import FailureAwareEstimator, ForeignEstimator
from gpuprof.kernel_db.store import KernelDb
from gpuprof.plugins import describe_error, identify, load_plugin, plugin_names, require_methods

#: The default: measurements, interpolation between them, and the roofline or the learned model beyond them.
DEFAULT = "database"
BUILTIN = {
    DEFAULT: "gpuprof.estimators.database:DatabaseEstimator",
    "gk": "gpuprof.estimators.gk:GkEstimator",
    "igniter": "gpuprof.estimators.igniter.igniter:IgniterEstimator",
    "measured": "gpuprof.estimators.measured.measured_only:MeasuredEstimator",
    "usher": "gpuprof.estimators.measured.measured_only:UsherEstimator",
}


def estimator_names() -> tuple[str, ...]:
    """Return the names of all estimators, built in and installed, sorted."""
    return plugin_names("estimator", BUILTIN)


def make_estimator(source: str | Estimator, db: KernelDb | None, graphs: Mapping[str, Path] | None = None) -> Estimator:
    """Return an estimator that refuses workloads that failed according to the database.

    Raises `InputError` when there is no such estimator, `PluginError` when it cannot be made. ``source``: the name of a
    built-in or installed one, ``package.module:Class``, or an estimator. Built-in classes are called with the kernel
    database and the files, others with the database alone. ``graphs``: ONNX files of models by name.
    """
    name = identify(source)
    estimator = source if not isinstance(source, str) else _construct(source, db, graphs)
    require_methods("estimator", name, estimator, "estimate", "batches", "shares")
    if is_plugin(source):
        estimator = ForeignEstimator(name, estimator)
    # The default estimator refuses failed workloads by itself, also at other sizes of a model's dimensions.
    return estimator if db is None or name == DEFAULT else FailureAwareEstimator(estimator, KnownModels(db, graphs))


def _construct(name: str, db: KernelDb | None, graphs: Mapping[str, Path] | None) -> Estimator:
    plugin = load_plugin("estimator", name, BUILTIN)
    try:
        estimator: Estimator = plugin(db, graphs) if name in BUILTIN else plugin(db)
    except GpuprofError:
        raise
    except Exception as error:  # a plug-in may raise anything
        reason = describe_error(error)
        raise PluginError(f"the estimator {name!r} cannot be made from a kernel database: {reason}") from error
    return estimator


def is_plugin(source: str | Estimator) -> bool:
    """Return whether an estimator, or the estimator of a name, is none of gpuprof's own."""
    return source not in BUILTIN if isinstance(source, str) else not identify(source).startswith("gpuprof.")


def read_premise(source: str | Estimator) -> str | None:
    """Return the premise of an estimator, which its assumed times rest on; None without one.

    Raises `InputError` when there is no estimator of the name.
    """
    plugin = load_plugin("estimator", source, BUILTIN) if isinstance(source, str) else source
    premise = getattr(plugin, "premise", None)
    return None if premise is None else str(premise)
