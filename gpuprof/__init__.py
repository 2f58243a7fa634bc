"""gpuprof: measure, predict, place and serve ONNX models on shared GPUs.

The names below are the public API. Each is loaded when it is first used, so that ``import gpuprof`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what tools see of the lazy names
    from gpuprof.pipeline.calibrate import calibrate as calibrate
    from gpuprof.pipeline.db import query_database as query_database
    from gpuprof.pipeline.doctor import doctor as doctor
    from gpuprof.pipeline.estimate import estimate as estimate
    from gpuprof.pipeline.evaluate import evaluate as evaluate
    from gpuprof.pipeline.merge import MergeSettings as MergeSettings
    from gpuprof.pipeline.merge import merge as merge
    from gpuprof.pipeline.profile import ProfileSettings as ProfileSettings
    from gpuprof.pipeline.profile import profile as profile
    from gpuprof.pipeline.report import report as report
    from gpuprof.pipeline.result import Progress as Progress
    from gpuprof.pipeline.similarity import similarity as similarity
    from gpuprof.pipeline.train import train as train
    from gpuprof.pipeline.zoo import build_model as build_model
    from gpuprof.pipeline.zoo import list_models as list_models

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
    "MergeSettings": "gpuprof.pipeline.merge",
    "ModelGraph": "gpuprof.domain.model",
    "ProfileSettings": "gpuprof.pipeline.profile",
    "Progress": "gpuprof.pipeline.result",
    "Share": "gpuprof.domain.share",
    "Slo": "gpuprof.domain.demand",
    "Workload": "gpuprof.domain.estimate",
    "build_model": "gpuprof.pipeline.zoo",
    "calibrate": "gpuprof.pipeline.calibrate",
    "doctor": "gpuprof.pipeline.doctor",
    "estimate": "gpuprof.pipeline.estimate",
    "evaluate": "gpuprof.pipeline.evaluate",
    "list_models": "gpuprof.pipeline.zoo",
    "merge": "gpuprof.pipeline.merge",
    "profile": "gpuprof.pipeline.profile",
    "query_database": "gpuprof.pipeline.db",
    "read_demands": "gpuprof.domain.demand",
    "read_map": "gpuprof.domain.deployment",
    "report": "gpuprof.pipeline.report",
    "similarity": "gpuprof.pipeline.similarity",
    "train": "gpuprof.pipeline.train",
    "write_map": "gpuprof.domain.deployment",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gpuprof' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
