"""gpuprof: measure, predict, place and serve ONNX models on shared GPUs.

The names below are the public API. Each name is loaded on its first use, so that ``import gpuprof`` costs nothing.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # static tools see the lazy names here
    from gpuprof.domain.demand import Demand as Demand
    from gpuprof.domain.demand import Slo as Slo
    from gpuprof.domain.demand import read_demands as read_demands
    from gpuprof.domain.deployment import DeploymentMap as DeploymentMap
    from gpuprof.domain.deployment import read_map as read_map
    from gpuprof.domain.deployment import write_map as write_map
    from gpuprof.domain.device import Device as Device
    from gpuprof.domain.estimate import Estimate as Estimate
    from gpuprof.domain.estimate import Estimator as Estimator
    from gpuprof.domain.estimate import Figure as Figure
    from gpuprof.domain.estimate import Workload as Workload
    from gpuprof.domain.fleet import Fleet as Fleet
    from gpuprof.domain.model import ModelGraph as ModelGraph
    from gpuprof.domain.share import Share as Share
    from gpuprof.errors import GpuprofError as GpuprofError
    from gpuprof.pipeline.calibrate import CalibrateOptions as CalibrateOptions
    from gpuprof.pipeline.calibrate import CalibrateResult as CalibrateResult
    from gpuprof.pipeline.calibrate import calibrate as calibrate
    from gpuprof.pipeline.check import CheckOptions as CheckOptions
    from gpuprof.pipeline.check import CheckResult as CheckResult
    from gpuprof.pipeline.check import check as check
    from gpuprof.pipeline.compare import CompareDatabasesResult as CompareDatabasesResult
    from gpuprof.pipeline.compare import CompareResult as CompareResult
    from gpuprof.pipeline.compare import compare as compare
    from gpuprof.pipeline.compare import compare_databases as compare_databases
    from gpuprof.pipeline.compare import compare_gpus as compare_gpus
    from gpuprof.pipeline.db import import_measurements as import_measurements
    from gpuprof.pipeline.db import query_database as query_database
    from gpuprof.pipeline.doctor import doctor as doctor
    from gpuprof.pipeline.estimate import EstimateOptions as EstimateOptions
    from gpuprof.pipeline.estimate import EstimateResult as EstimateResult
    from gpuprof.pipeline.estimate import estimate as estimate
    from gpuprof.pipeline.explain import ExplainOptions as ExplainOptions
    from gpuprof.pipeline.explain import ExplainResult as ExplainResult
    from gpuprof.pipeline.explain import explain as explain
    from gpuprof.pipeline.export import MapExportResult as MapExportResult
    from gpuprof.pipeline.export import export as export
    from gpuprof.pipeline.load import LoadResult as LoadResult
    from gpuprof.pipeline.load import LoadTraffic as LoadTraffic
    from gpuprof.pipeline.load import ServerAccess as ServerAccess
    from gpuprof.pipeline.load import load as load
    from gpuprof.pipeline.merge import MergeResult as MergeResult
    from gpuprof.pipeline.merge import MergeSettings as MergeSettings
    from gpuprof.pipeline.merge import SimilarityResult as SimilarityResult
    from gpuprof.pipeline.merge import merge as merge
    from gpuprof.pipeline.merge import similarity as similarity
    from gpuprof.pipeline.place import MapOutput as MapOutput
    from gpuprof.pipeline.place import PlaceResult as PlaceResult
    from gpuprof.pipeline.place import place as place
    from gpuprof.pipeline.problem import PlanningOptions as PlanningOptions
    from gpuprof.pipeline.profile import ProfileResult as ProfileResult
    from gpuprof.pipeline.profile import ProfileSettings as ProfileSettings
    from gpuprof.pipeline.profile import ProfileWorkloads as ProfileWorkloads
    from gpuprof.pipeline.profile import profile as profile
    from gpuprof.pipeline.report import ReportResult as ReportResult
    from gpuprof.pipeline.report import report as report
    from gpuprof.pipeline.result import Progress as Progress
    from gpuprof.pipeline.result import Result as Result
    from gpuprof.pipeline.serve import ApplyResult as ApplyResult
    from gpuprof.pipeline.serve import MapServer as MapServer
    from gpuprof.pipeline.serve import ServeSettings as ServeSettings
    from gpuprof.pipeline.serve import apply as apply
    from gpuprof.pipeline.serve import serve as serve
    from gpuprof.pipeline.simulate import Rescheduling as Rescheduling
    from gpuprof.pipeline.simulate import ServiceSettings as ServiceSettings
    from gpuprof.pipeline.simulate import SimulatedTraffic as SimulatedTraffic
    from gpuprof.pipeline.simulate import SimulateResult as SimulateResult
    from gpuprof.pipeline.simulate import simulate as simulate
    from gpuprof.pipeline.trace import TraceResult as TraceResult
    from gpuprof.pipeline.trace import read_azure_trace as read_azure_trace
    from gpuprof.pipeline.trace import record_trace as record_trace
    from gpuprof.pipeline.trace import show_trace as show_trace
    from gpuprof.pipeline.train import EvaluateOptions as EvaluateOptions
    from gpuprof.pipeline.train import EvaluateResult as EvaluateResult
    from gpuprof.pipeline.train import TrainOptions as TrainOptions
    from gpuprof.pipeline.train import TrainResult as TrainResult
    from gpuprof.pipeline.train import evaluate as evaluate
    from gpuprof.pipeline.train import train as train
    from gpuprof.pipeline.zoo import build_model as build_model
    from gpuprof.pipeline.zoo import list_models as list_models

__version__ = "0.1.0"

#: Names by their module below ``gpuprof``.
_NAMES = {
    "domain.demand": "Demand Slo read_demands",
    "domain.deployment": "DeploymentMap read_map write_map",
    "domain.device": "Device",
    "domain.estimate": "Estimate Estimator Figure Workload",
    "domain.fleet": "Fleet",
    "domain.model": "ModelGraph",
    "domain.share": "Share",
    "errors": "GpuprofError",
    "pipeline.calibrate": "CalibrateOptions CalibrateResult calibrate",
    "pipeline.check": "CheckOptions CheckResult check",
    "pipeline.compare": "CompareDatabasesResult CompareResult compare compare_databases compare_gpus",
    "pipeline.db": "import_measurements query_database",
    "pipeline.doctor": "doctor",
    "pipeline.estimate": "EstimateOptions EstimateResult estimate",
    "pipeline.train": "EvaluateOptions EvaluateResult TrainOptions TrainResult evaluate train",
    "pipeline.explain": "ExplainOptions ExplainResult explain",
    "pipeline.export": "MapExportResult export",
    "pipeline.load": "LoadResult LoadTraffic ServerAccess load",
    "pipeline.merge": "MergeResult MergeSettings SimilarityResult merge similarity",
    "pipeline.place": "MapOutput PlaceResult place",
    "pipeline.problem": "PlanningOptions",
    "pipeline.profile": "ProfileResult ProfileSettings ProfileWorkloads profile",
    "pipeline.report": "ReportResult report",
    "pipeline.result": "Progress Result",
    "pipeline.serve": "ApplyResult MapServer ServeSettings apply serve",
    "pipeline.simulate": "Rescheduling ServiceSettings SimulateResult SimulatedTraffic simulate",
    "pipeline.trace": "TraceResult read_azure_trace record_trace show_trace",
    "pipeline.zoo": "build_model list_models",
}
_PUBLIC = {name: f"gpuprof.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_PUBLIC)]


class _Package(ModuleType):
    """A package whose subpackages never hide the public function of the same name: ``load`` stays a function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


@functools.cache
def _load(name: str) -> Any:
    """Return the object of a public name; functions get a wrapper that checks their arguments."""
    from gpuprof.domain.validation import check_arguments

    member = getattr(importlib.import_module(_PUBLIC[name]), name)
    if not isinstance(member, FunctionType):
        return member
    checked = check_arguments(member)
    checked.__module__ = __name__  # for pickle
    return checked


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gpuprof' has no attribute {name!r}")
    return _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
