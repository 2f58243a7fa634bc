"""Descriptions of the server and its models: metadata, configuration, statistics, health, index and metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gpuprof.domain.deployment import version_order
from gpuprof.serving.protocol.http_message import CONTENT_JSON, HttpClient, HttpHead, Route, allow_only, respond_json
from gpuprof.serving.router.infer_request import RequestBody
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.datatypes import TensorSpec
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.watch.statistics import ModelStatistics, ProtocolFigures

Answer = Callable[[HttpClient], None]

SERVER_NAME = "gpuprof"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")


class Descriptions:
    """Documents of both protocols. A model that the server lacks raises `RefusedError`: 404."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def describe_server(self) -> dict[str, Any]:
        """Return name, version and extensions."""
        from gpuprof import __version__

        return {"name": SERVER_NAME, "version": __version__, "extensions": list(EXTENSIONS)}

    def describe_model(self, name: str, version: str) -> dict[str, Any]:
        """Return inputs and outputs with their shapes, batch included; an empty version is the newest."""
        spec = self._router.find(name, version).spec
        return {
            "name": spec.name,
            "versions": [version] if version else sorted(self._router.models[name], key=version_order),
            "platform": spec.platform,
            "inputs": [_tensor_metadata(tensor) for tensor in spec.inputs],
            "outputs": [_tensor_metadata(tensor) for tensor in spec.outputs],
        }

    def describe_config(self, name: str, version: str) -> dict[str, Any]:
        """Return a model's configuration in Triton's format, for Triton's clients."""
        return _model_config(self._router.find(name, version))

    def describe_statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """Return counts and nanoseconds by stage of a model's version; an empty name or version means all."""
        if name:
            self._router.find(name, version)
        return {
            "model_stats": [
                _model_statistics(model, model_version)
                for model_name, versions in self._router.models.items()
                for model_version, model in versions.items()
                if name in ("", model_name) and version in ("", model_version)
            ]
        }

    def list_repository(self) -> list[dict[str, str]]:
        """Return a line for each version of each model."""
        reasons = {model.public: "" if model.is_ready else "no worker" for model in self._router.list_entries()}
        return [
            {"name": name, "version": version, "state": "UNAVAILABLE" if reason else "READY", "reason": reason}
            for (name, version), reason in sorted(
                ((public.name, public.version), reason) for public, reason in {**self._router.faults, **reasons}.items()
            )
        ]


def _tensor_metadata(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def _model_config(model: ServedModel) -> dict[str, Any]:
    spec = model.spec
    config: dict[str, Any] = {
        "name": spec.name,
        "platform": spec.platform,
        "backend": "onnxruntime",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": spec.max_batch,
        "input": [_tensor_config(tensor, spec.max_batch) for tensor in spec.inputs],
        "output": [_tensor_config(tensor, spec.max_batch) for tensor in spec.outputs],
        "instance_group": [
            {"name": replica.plan.name, "kind": "KIND_CPU", "count": len(replica.workers)} for replica in model.replicas
        ],
    }
    if spec.max_batch > 1:
        waits_us = [int(1000 * replica.plan.max_wait_ms) for replica in model.replicas]
        sizes = sorted({replica.plan.batch for replica in model.replicas})
        config["dynamic_batching"] = {
            "preferred_batch_size": sizes,
            "max_queue_delay_microseconds": max(waits_us, default=0),
        }
    return config


def _tensor_config(tensor: TensorSpec, max_batch: int) -> dict[str, Any]:
    kind = "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"
    return {"name": tensor.name, "data_type": kind, "dims": list(tensor.shape[1:] if max_batch else tensor.shape)}


def _model_statistics(model: ServedModel, version: str) -> dict[str, Any]:
    statistics = model.statistics
    return {
        "name": model.public.name,
        "version": version,
        "last_inference": statistics.last_ms,
        "inference_count": statistics.rows,
        "execution_count": sum(batch.count for batch in statistics.batches.values()),
        "inference_stats": _stages(statistics),
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": _duration(batch.count, batch.gather),
                "compute_infer": _duration(batch.count, batch.infer),
                "compute_output": _duration(batch.count, batch.scatter),
            }
            for size, batch in sorted(statistics.batches.items())
        ],
    }


def _stages(statistics: ModelStatistics) -> dict[str, Any]:
    return {
        "success": _duration(statistics.answered, statistics.total_ns),
        "fail": _duration(statistics.failed + statistics.refused, statistics.failed_ns),
        "queue": _duration(statistics.answered, statistics.stages.queue),
        "compute_input": _duration(statistics.answered, statistics.stages.gather),
        "compute_infer": _duration(statistics.answered, statistics.stages.infer),
        "compute_output": _duration(statistics.answered, statistics.stages.scatter),
        "cache_hit": _duration(0, 0),
        "cache_miss": _duration(0, 0),
    }


def _duration(count: int, nanoseconds: int) -> dict[str, int]:
    return {"count": count, "ns": nanoseconds}


class HttpDescriptions:
    """Answers requests at all addresses other than inference.

    Parameters
    ----------
    router : Router
    find_figures : callable
        Returns the counts of the protocols.
    """

    def __init__(self, router: Router, find_figures: Callable[[], ProtocolFigures]) -> None:
        self._router = router
        self._described = Descriptions(router)
        self._find_figures = find_figures

    def find(self, words: list[str], method: str) -> Route | None:
        """Return the route for these path segments; None: none.

        Raises
        ------
        RefusedError
            404 for an unknown model, 405 for a method that the address does not have.
        """
        descriptions = self._described
        match words:
            case ["v2", "repository", "index"]:
                return allow_only("POST", method, _simple(_document(descriptions.list_repository)))
            case ["metrics"]:
                answer: Answer | None = self._metrics
            case ["v2"]:
                answer = _document(descriptions.describe_server)
            case ["v2", "health", "live"]:
                answer = partial(_status, lambda: True)
            case ["v2", "health", "ready"]:
                answer = partial(_status, lambda: self._router.is_ready)
            case ["v2", "models", "stats"]:
                answer = _document(descriptions.describe_statistics)
            case ["v2", "models", name, "versions", version, *rest]:
                answer = self._find_of_model(name, version, rest)
            case ["v2", "models", name, *rest]:
                answer = self._find_of_model(name, "", rest)
            case _:
                answer = None
        return None if answer is None else allow_only("GET", method, _simple(answer))

    def _find_of_model(self, name: str, version: str, rest: list[str]) -> Answer | None:
        self._router.find(name, version)
        match rest:
            case []:
                return _document(partial(self._described.describe_model, name, version))
            case ["ready"]:
                return partial(_status, lambda: self._router.find(name, version).is_ready)
            case ["config"]:
                return _document(partial(self._described.describe_config, name, version))
            case ["stats"]:
                return _document(partial(self._described.describe_statistics, name, version))
        return None

    def _metrics(self, connection: HttpClient) -> None:
        from gpuprof.serving.protocol.metrics import CONTENT_TYPE, render_metrics

        connection.respond(200, CONTENT_TYPE, render_metrics(self._router, self._find_figures()))


def _document(describe: Callable[[], object]) -> Answer:
    """Return what answers with a JSON document."""
    return lambda connection: respond_json(connection, 200, describe())


def _simple(answer: Answer) -> Route:
    """Return a route without a body."""

    def handle(connection: HttpClient, head: HttpHead, body: RequestBody) -> None:
        try:
            answer(connection)
        except RefusedError as refusal:
            connection.refuse(refusal)

    return Route(handle)


def _status(check: Callable[[], bool], connection: HttpClient) -> None:
    if check():
        connection.respond(200, CONTENT_JSON, b"")
    else:
        respond_json(connection, 503, {"error": "not ready"})
