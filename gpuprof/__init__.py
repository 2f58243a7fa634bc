"""gpuprof: measure, predict, place and serve ONNX models on shared GPUs.

The names below are the public API. Each is loaded when it is first used, so that ``import gpuprof`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Demand": "gpuprof.domain.demand",
    "DeploymentMap": "gpuprof.domain.deployment",
    "Device": "gpuprof.domain.device",
    "Estimate": "gpuprof.domain.estimate",
    "Estimator": "gpuprof.domain.estimate",
    "Figure": "gpuprof.domain.estimate",
    "Fleet": "gpuprof.domain.fleet",
    "GpuprofError": "gpuprof.errors",
    "ModelGraph": "gpuprof.domain.model",
    "Share": "gpuprof.domain.share",
    "Slo": "gpuprof.domain.demand",
    "Workload": "gpuprof.domain.estimate",
    "read_demands": "gpuprof.domain.demand",
    "read_map": "gpuprof.domain.deployment",
    "write_map": "gpuprof.domain.deployment",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gpuprof' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
