"""Descriptions of the server and its models: metadata, configuration, statistics, index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec
from gpuprof.serving.watch.statistics import ModelStatistics

SERVER_NAME = "gpuprof"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")


def server_metadata() -> dict[str, Any]:
    """Return the answer of ``GET /v2``."""
    from gpuprof import __version__

    return {"name": SERVER_NAME, "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(spec: ModelSpec, versions: list[str]) -> dict[str, Any]:
    """Return inputs and outputs with their shapes, batch included."""
    return {
        "name": spec.name,
        "versions": versions,
        "platform": spec.platform,
        "inputs": [_tensor_metadata(tensor) for tensor in spec.inputs],
        "outputs": [_tensor_metadata(tensor) for tensor in spec.outputs],
    }


def _tensor_metadata(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def model_config(model: ServedModel) -> dict[str, Any]:
    """Return the model's configuration in Triton's format, for Triton's clients."""
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


def model_statistics(model: ServedModel, version: str) -> dict[str, Any]:
    """Return counts and nanoseconds by stage, as ``/stats`` answers them."""
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


def chosen_statistics(
    models: Mapping[str, Mapping[str, ServedModel]], name: str = "", version: str = ""
) -> list[dict[str, Any]]:
    """Return the statistics of a model's version; an empty name or version means all."""
    return [
        model_statistics(model, found)
        for known, versions in models.items()
        for found, model in versions.items()
        if name in ("", known) and version in ("", found)
    ]


def repository_index(models: Mapping[str, Mapping[str, ServedModel]]) -> list[dict[str, str]]:
    """Return a line for each version of each model."""
    return [_index_entry(model, version) for versions in models.values() for version, model in sorted(versions.items())]


def _index_entry(model: ServedModel, version: str) -> dict[str, str]:
    ready = model.is_ready
    return {
        "name": model.public.name,
        "version": version,
        "state": "READY" if ready else "UNAVAILABLE",
        "reason": "" if ready else "no worker",
    }
