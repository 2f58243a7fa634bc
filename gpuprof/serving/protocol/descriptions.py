"""Descriptions of the server and its models: metadata, configuration, statistics, index."""

from __future__ import annotations

from typing import Any

from gpuprof.domain.deployment import version_order
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.datatypes import TensorSpec


class Descriptions:
    """Documents of both protocols. A model that the server lacks raises `RefusedError`: 404."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def describe_server(self) -> dict[str, Any]:
        """Return name, version and extensions."""
        from gpuprof import __version__

        extensions = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]
        return {"name": "gpuprof", "version": __version__, "extensions": extensions}

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
        model = self._router.find(name, version)
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
                {"name": replica.plan.name, "kind": "KIND_CPU", "count": len(replica.workers)}
                for replica in model.replicas
            ],
        }
        if spec.max_batch > 1:
            waits_us = [int(1000 * replica.plan.max_wait_ms) for replica in model.replicas]
            config["dynamic_batching"] = {
                "preferred_batch_size": sorted({replica.plan.batch for replica in model.replicas}),
                "max_queue_delay_microseconds": max(waits_us, default=0),
            }
        return config

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
        "inference_stats": {
            "success": _duration(statistics.answered, statistics.total_ns),
            "fail": _duration(statistics.failed + statistics.refused, statistics.failed_ns),
            "queue": _duration(statistics.answered, statistics.stages.queue),
            "compute_input": _duration(statistics.answered, statistics.stages.gather),
            "compute_infer": _duration(statistics.answered, statistics.stages.infer),
            "compute_output": _duration(statistics.answered, statistics.stages.scatter),
            "cache_hit": _duration(0, 0),
            "cache_miss": _duration(0, 0),
        },
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


def _duration(count: int, nanoseconds: int) -> dict[str, int]:
    return {"count": count, "ns": nanoseconds}
