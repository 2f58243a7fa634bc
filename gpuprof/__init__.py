"""gpuprof: measure, predict, place and serve ONNX models on shared GPUs.

The names below are the public API. Each is loaded when it is first used, so that ``import gpuprof`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what tools see of the lazy names
    from gpuprof.domain.demand import Demand as Demand
    from gpuprof.domain.demand import Slo as Slo
    from gpuprof.domain.demand import read_demands as read_demands
    from gpuprof.domain.deployment import DeploymentMap as DeploymentMap
    from gpuprof.domain.device import Device as Device
    from gpuprof.domain.estimate import Estimate as Estimate
    from gpuprof.domain.estimate import Estimator as Estimator
    from gpuprof.domain.estimate import Figure as Figure
    from gpuprof.domain.estimate import Workload as Workload
    from gpuprof.domain.fleet import Fleet as Fleet
    from gpuprof.domain.map_file import read_map as read_map
    from gpuprof.domain.map_file import write_map as write_map
    from gpuprof.domain.model import ModelGraph as ModelGraph
    from gpuprof.domain.share import Share as Share
    from gpuprof.errors import GpuprofError as GpuprofError
    from gpuprof.pipeline.apply import ApplyResult as ApplyResult
    from gpuprof.pipeline.apply import apply as apply
    from gpuprof.pipeline.calibrate import CalibrateResult as CalibrateResult
    from gpuprof.pipeline.calibrate import calibrate as calibrate
    from gpuprof.pipeline.check import CheckResult as CheckResult
    from gpuprof.pipeline.check import check as check
    from gpuprof.pipeline.compare import CompareResult as CompareResult
    from gpuprof.pipeline.compare import compare as compare
    from gpuprof.pipeline.compare_gpus import CompareGpusResult as CompareGpusResult
    from gpuprof.pipeline.compare_gpus import compare_gpus as compare_gpus
    from gpuprof.pipeline.db import import_measurements as import_measurements
    from gpuprof.pipeline.db import query_database as query_database
    from gpuprof.pipeline.doctor import doctor as doctor
    from gpuprof.pipeline.estimate import EstimateResult as EstimateResult
    from gpuprof.pipeline.estimate import estimate as estimate
    from gpuprof.pipeline.evaluate import EvaluateResult as EvaluateResult
    from gpuprof.pipeline.evaluate import evaluate as evaluate
    from gpuprof.pipeline.explain import ExplainResult as ExplainResult
    from gpuprof.pipeline.explain import explain as explain
    from gpuprof.pipeline.export import MapExportResult as MapExportResult
    from gpuprof.pipeline.export import export as export
    from gpuprof.pipeline.load import LoadResult as LoadResult
    from gpuprof.pipeline.load import load as load
    from gpuprof.pipeline.load_traffic import LoadTraffic as LoadTraffic
    from gpuprof.pipeline.load_traffic import ServerAccess as ServerAccess
    from gpuprof.pipeline.merge import MergeResult as MergeResult
    from gpuprof.pipeline.merge import MergeSettings as MergeSettings
    from gpuprof.pipeline.merge import merge as merge
    from gpuprof.pipeline.place import PlaceResult as PlaceResult
    from gpuprof.pipeline.place import place as place
    from gpuprof.pipeline.planning_options import MapOutput as MapOutput
    from gpuprof.pipeline.planning_options import PlanningOptions as PlanningOptions
    from gpuprof.pipeline.profile import profile as profile
    from gpuprof.pipeline.profile import profile_ops as profile_ops
    from gpuprof.pipeline.profile_result import OpProfileResult as OpProfileResult
    from gpuprof.pipeline.profile_result import ProfileProgress as ProfileProgress
    from gpuprof.pipeline.profile_result import ProfileResult as ProfileResult
    from gpuprof.pipeline.profile_result import ProfileSettings as ProfileSettings
    from gpuprof.pipeline.report import ReportResult as ReportResult
    from gpuprof.pipeline.report import report as report
    from gpuprof.pipeline.result import Progress as Progress
    from gpuprof.pipeline.result import Result as Result
    from gpuprof.pipeline.serve import MapServer as MapServer
    from gpuprof.pipeline.serve import serve as serve
    from gpuprof.pipeline.serve_settings import ServeSettings as ServeSettings
    from gpuprof.pipeline.similarity import SimilarityResult as SimilarityResult
    from gpuprof.pipeline.similarity import similarity as similarity
    from gpuprof.pipeline.simulate import SimulateResult as SimulateResult
    from gpuprof.pipeline.simulate import simulate as simulate
    from gpuprof.pipeline.simulation_settings import Fidelity as Fidelity
    from gpuprof.pipeline.simulation_settings import Rescheduling as Rescheduling
    from gpuprof.pipeline.simulation_settings import ServiceSettings as ServiceSettings
    from gpuprof.pipeline.simulation_settings import SimulatedTraffic as SimulatedTraffic
    from gpuprof.pipeline.trace import TraceResult as TraceResult
    from gpuprof.pipeline.trace import read_azure_trace as read_azure_trace
    from gpuprof.pipeline.trace import record_trace as record_trace
    from gpuprof.pipeline.trace import show_trace as show_trace
    from gpuprof.pipeline.train import TrainResult as TrainResult
    from gpuprof.pipeline.train import train as train
    from gpuprof.pipeline.zoo import build_model as build_model
    from gpuprof.pipeline.zoo import list_models as list_models

__version__ = "0.1.0"

_PUBLIC = {
    "ApplyResult": "gpuprof.pipeline.apply",
    "CalibrateResult": "gpuprof.pipeline.calibrate",
    "CheckResult": "gpuprof.pipeline.check",
    "CompareGpusResult": "gpuprof.pipeline.compare_gpus",
    "CompareResult": "gpuprof.pipeline.compare",
    "Demand": "gpuprof.domain.demand",
    "DeploymentMap": "gpuprof.domain.deployment",
    "Device": "gpuprof.domain.device",
    "Estimate": "gpuprof.domain.estimate",
    "EstimateResult": "gpuprof.pipeline.estimate",
    "Estimator": "gpuprof.domain.estimate",
    "EvaluateResult": "gpuprof.pipeline.evaluate",
    "ExplainResult": "gpuprof.pipeline.explain",
    "Fidelity": "gpuprof.pipeline.simulation_settings",
    "Figure": "gpuprof.domain.estimate",
    "Fleet": "gpuprof.domain.fleet",
    "GpuprofError": "gpuprof.errors",
    "LoadResult": "gpuprof.pipeline.load",
    "LoadTraffic": "gpuprof.pipeline.load_traffic",
    "MapExportResult": "gpuprof.pipeline.export",
    "MapOutput": "gpuprof.pipeline.planning_options",
    "MapServer": "gpuprof.pipeline.serve",
    "MergeResult": "gpuprof.pipeline.merge",
    "MergeSettings": "gpuprof.pipeline.merge",
    "ModelGraph": "gpuprof.domain.model",
    "OpProfileResult": "gpuprof.pipeline.profile_result",
    "PlaceResult": "gpuprof.pipeline.place",
    "PlanningOptions": "gpuprof.pipeline.planning_options",
    "ProfileProgress": "gpuprof.pipeline.profile_result",
    "ProfileResult": "gpuprof.pipeline.profile_result",
    "ProfileSettings": "gpuprof.pipeline.profile_result",
    "Progress": "gpuprof.pipeline.result",
    "ReportResult": "gpuprof.pipeline.report",
    "Rescheduling": "gpuprof.pipeline.simulation_settings",
    "Result": "gpuprof.pipeline.result",
    "ServeSettings": "gpuprof.pipeline.serve_settings",
    "ServerAccess": "gpuprof.pipeline.load_traffic",
    "ServiceSettings": "gpuprof.pipeline.simulation_settings",
    "Share": "gpuprof.domain.share",
    "SimilarityResult": "gpuprof.pipeline.similarity",
    "SimulateResult": "gpuprof.pipeline.simulate",
    "SimulatedTraffic": "gpuprof.pipeline.simulation_settings",
    "Slo": "gpuprof.domain.demand",
    "TraceResult": "gpuprof.pipeline.trace",
    "TrainResult": "gpuprof.pipeline.train",
    "Workload": "gpuprof.domain.estimate",
    "apply": "gpuprof.pipeline.apply",
    "build_model": "gpuprof.pipeline.zoo",
    "calibrate": "gpuprof.pipeline.calibrate",
    "check": "gpuprof.pipeline.check",
    "compare": "gpuprof.pipeline.compare",
    "compare_gpus": "gpuprof.pipeline.compare_gpus",
    "doctor": "gpuprof.pipeline.doctor",
    "estimate": "gpuprof.pipeline.estimate",
    "evaluate": "gpuprof.pipeline.evaluate",
    "explain": "gpuprof.pipeline.explain",
    "export": "gpuprof.pipeline.export",
    "import_measurements": "gpuprof.pipeline.db",
    "list_models": "gpuprof.pipeline.zoo",
    "load": "gpuprof.pipeline.load",
    "merge": "gpuprof.pipeline.merge",
    "place": "gpuprof.pipeline.place",
    "profile": "gpuprof.pipeline.profile",
    "profile_ops": "gpuprof.pipeline.profile",
    "query_database": "gpuprof.pipeline.db",
    "read_azure_trace": "gpuprof.pipeline.trace",
    "read_demands": "gpuprof.domain.demand",
    "read_map": "gpuprof.domain.map_file",
    "record_trace": "gpuprof.pipeline.trace",
    "report": "gpuprof.pipeline.report",
    "serve": "gpuprof.pipeline.serve",
    "show_trace": "gpuprof.pipeline.trace",
    "similarity": "gpuprof.pipeline.similarity",
    "simulate": "gpuprof.pipeline.simulate",
    "train": "gpuprof.pipeline.train",
    "write_map": "gpuprof.domain.map_file",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gpuprof' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
