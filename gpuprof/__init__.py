"""gpuprof: measure, predict, place and serve ONNX models on shared GPUs.

The names below are the public API. Each is loaded when it is first used, so that ``import gpuprof`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Demand": "gpuprof.demand",
    "DeploymentMap": "gpuprof.deployment",
    "Device": "gpuprof.device",
    "Estimate": "gpuprof.estimate",
    "Estimator": "gpuprof.estimate",
    "Figure": "gpuprof.estimate",
    "Fleet": "gpuprof.fleet",
    "GpuprofError": "gpuprof.errors",
    "ModelGraph": "gpuprof.model",
    "Share": "gpuprof.share",
    "Slo": "gpuprof.demand",
    "Workload": "gpuprof.estimate",
    "read_demands": "gpuprof.demand",
    "read_map": "gpuprof.deployment",
    "write_map": "gpuprof.deployment",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gpuprof' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
