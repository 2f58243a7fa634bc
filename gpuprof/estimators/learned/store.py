"""Stores fitted regressors beside the kernel database, without pickles, and rejects regressors of other data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpuprof.domain.device import Device
from gpuprof.domain.file_access import write_atomically
from gpuprof.errors import InputError, UnavailableError, install_hint, refuse_unwritable
from gpuprof.estimators.learned.expected_time import EXPECTED_FEATURES
from gpuprof.estimators.learned.features import FEATURES
from gpuprof.estimators.learned.learned import STACK, LearnedModel, Residuals
from gpuprof.estimators.memory.allocation import AllocationModel

SCHEMA = "gpuprof.learned/4"
_FOLDER = ".trained"  # hidden, so that the database does not read it as a run
_MANIFEST, _REGRESSORS = "manifest.json", "regressors.skops"
_MAX_BYTES = 512 * 2**20
#: Types that a file may construct besides scikit-learn's own classes and arrays.
_TRUSTED = frozenset(
    {
        "gpuprof.estimators.learned.regressors.SampledKernelRidge",
        "xgboost.core.Booster",
        "xgboost.sklearn.XGBRegressor",
        "lightgbm.basic.Booster",
        "lightgbm.sklearn.LGBMRegressor",
        "sklearn.tree._tree.Tree",
        "sklearn.utils._bunch.Bunch",
        "collections.OrderedDict",
        "collections.defaultdict",
    }
)


def folder_of(database: Path, device: str) -> Path:
    """Return the folder of a device's regressors."""
    return database / _FOLDER / device


def save_model(model: LearnedModel, database: Path, data_hash: str, architectures: tuple[str, ...]) -> Path:
    """Write the regressors used by estimates, then the manifest that validates them; return their folder.

    Raises `UnavailableError` when skops is not installed; `InputError` when the database cannot be written to.
    """
    stacks = {name: regressors[STACK] for name, regressors in model.requirements.items()}
    content = _skops().dumps({"times": model.times.get(STACK), "requirements": stacks})
    residuals = model.residuals or Residuals({}, {})
    manifest = {
        "schema": SCHEMA,
        "device": model.device.name,
        "features": [*FEATURES, *EXPECTED_FEATURES],
        "data_hash": data_hash,
        "architectures": list(architectures),
        "regressors_sha256": hashlib.sha256(content).hexdigest(),
        "rates": _rates(model.device),
        "element_ns": dict(model.element_ns),
        "allocation": None if model.memory is None else list(model.memory.coefficients),
        "residuals": asdict(residuals),
    }
    folder = folder_of(database, model.device.name)
    with refuse_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / _REGRESSORS, content)
        write_atomically(folder / _MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return folder


def load_model(database: Path, device: Device, data_hash: str | None = None) -> LearnedModel:
    """Return the stored regressors of ``device``.

    Raises `InputError` when there are none, or their schema, features, device's rates, data or file differ from the
    expected. ``data_hash``: expected hash of the training data.
    """
    folder = folder_of(database, device.name)
    manifest = _manifest(folder / _MANIFEST)
    expected = {
        "schema": SCHEMA,
        "device": device.name,
        "features": [*FEATURES, *EXPECTED_FEATURES],
        "rates": _rates(device),
        **({} if data_hash is None else {"data_hash": data_hash}),
    }
    if differing := [name for name, value in expected.items() if manifest.get(name) != value]:
        raise InputError(
            f"what was trained for {device.name} no longer fits: {', '.join(differing)} changed", "gpuprof train again"
        )
    content = _read_bytes(folder / _REGRESSORS)
    if hashlib.sha256(content).hexdigest() != manifest.get("regressors_sha256"):
        raise InputError(f"{folder / _REGRESSORS} is not what was trained", "gpuprof train again")
    fitted = _regressors(content, folder)
    stored = manifest["residuals"]
    residuals = Residuals(
        _read_residuals(stored["latency"]),
        _read_residuals(stored["memory"]),
        {metric: _read_residuals(values) for metric, values in stored["creq"].items()},
    )
    coefficients = manifest["allocation"]
    memory = None if coefficients is None else AllocationModel(tuple(map(float, coefficients)))
    element_ns = {op_type: float(value) for op_type, value in manifest["element_ns"].items()}
    times = {} if fitted["times"] is None else {STACK: fitted["times"]}
    requirements = {name: {STACK: stack} for name, stack in fitted["requirements"].items()}
    return LearnedModel(device, times, memory, element_ns, residuals, requirements)


def _read_residuals(values: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    return {architecture: tuple(errors) for architecture, errors in values.items()}


def _regressors(content: bytes, folder: Path) -> dict[str, Any]:
    skops = _skops()
    try:
        unknown = sorted(set(skops.get_untrusted_types(data=content)) - _TRUSTED)
        if unknown:
            raise InputError(f"{folder / _REGRESSORS} would make {unknown[0]}, which no regressor of gpuprof has")
        loaded: dict[str, Any] = skops.loads(content, trusted=sorted(_TRUSTED))
    except InputError:
        raise
    except Exception as error:  # reading a damaged file raises errors of any of its libraries
        raise InputError(f"{folder / _REGRESSORS} cannot be read: {error}", "gpuprof train again") from error
    return loaded


def _manifest(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_bytes(path))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}", "gpuprof train again") from None
    if not isinstance(content, dict) or not {"allocation", "element_ns", "residuals"} <= set(content):
        raise InputError(f"{path} is no manifest of regressors", "gpuprof train again")
    return content


def _read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InputError(f"{path}: larger than {_MAX_BYTES >> 20} MiB, which no regressors are")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", "gpuprof train") from None


def _rates(device: Device) -> dict[str, Any]:
    return {
        "flops_per_s": device.flops_per_s["float32"],
        "dram_bytes_per_s": device.dram_bytes_per_s,
        "l2_bytes": float(device.l2_bytes),
        "reread_bytes_per_s": [list(pair) for pair in device.reread_bytes_per_s],
    }


def _skops() -> Any:
    try:
        import skops.io
    except ImportError:
        raise UnavailableError("skops is not installed", install_hint("learn")) from None
    return skops.io
