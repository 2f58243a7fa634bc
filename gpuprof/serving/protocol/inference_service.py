"""Inference requests and descriptions of all protocols: submitted to the router, cached, cancelled and refused."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from gpuprof.domain.deployment import version_order
from gpuprof.serving.protocol.http_message import MAX_DISCARDED_BYTES, HttpClient
from gpuprof.serving.router.infer_request import InferRequest, RequestBody
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.datatypes import TensorSpec
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError, bad_request, out_of_memory
from gpuprof.serving.transport.wire import Buffer

#: Called with the model, the client, the request, its inference, the outputs, and their slot.
Answer = Callable[[ServedModel, HttpClient, InferRequest, Inference, list[OutputTensor], Slot | None], None]
#: Longer texts are refused, since a megabyte takes about 4 ms of the event loop: tensors can be sent as binary data.
MAX_TEXT_BYTES = MAX_DISCARDED_BYTES
#: Number of cached requests, and of heads.
MOST_CACHED = 256


def refuse_long_text(size: int) -> None:
    """Refuse a text too long to parse. Raises `RefusedError`: 413."""
    if size > MAX_TEXT_BYTES:
        message = f"the request has {size} bytes of text, more than {MAX_TEXT_BYTES}: send tensors as binary data"
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


class InferenceService:
    """Submits requests to the models. ``max_body_bytes``: of a request, decompressed.

    Attributes
    ----------
    cached : dict
        Requests by all their bytes but those of tensors: most clients send the same text again and again.
    """

    def __init__(self, router: Router, max_body_bytes: int) -> None:
        self.router = router
        self.arena = router.arena
        self.max_body_bytes = max_body_bytes
        self.cached: dict[object, tuple[ServedModel, InferRequest]] = {}
        router.on_change(self.cached.clear)

    def cache(self, key: object, text_bytes: int, model: ServedModel, request: InferRequest) -> None:
        """Cache a request with a short text and binary tensors, unless these are strings, which are always checked."""
        tensors = zip(model.spec.inputs, request.inputs, strict=True)
        binary = [spec.datatype for spec, tensor in tensors if isinstance(tensor.data, tuple)]
        if binary and "BYTES" not in binary and text_bytes <= INLINE_BYTES:
            if len(self.cached) == MOST_CACHED:
                self.cached.clear()
            self.cached[key] = model, request

    def submit(
        self,
        client: HttpClient,
        answer: Answer,
        traceparent: str,
        limit_ms: float | None,
        model: ServedModel,
        request: InferRequest,
        body: RequestBody,
    ) -> None:
        """Submit a request. Raises `RefusedError`. ``limit_ms``: deadline of the call itself."""
        deadline_ms = model.limit_deadline_ms(request.urgency.timeout_ms)
        inference = Inference(
            request.rows,
            request.find_tensors(body),
            request.outputs,
            body.arrived,
            deadline_ms if limit_ms is None else min(deadline_ms, limit_ms),
            partial(answer, model, client, request),
            client.refuse,
            request.urgency.priority,
            body.slot,
            request.batch_key,
            traceparent,
            client.peer,
        )
        model.submit(inference)
        client.on_disconnect = inference.cancel

    def release(self, slot: Slot | None) -> None:
        """Give memory back."""
        if slot is not None:
            self.arena.give_back(slot)

    def hold(self, data: bytes, json_bytes: int, arrived: float) -> RequestBody:
        """Return a body of these bytes, in the arena if they are many. Raises `RefusedError`: 503 if it is full."""
        if len(data) <= INLINE_BYTES:
            return RequestBody(data, json_bytes, arrived=arrived)
        slot = self.arena.take(len(data))
        if slot is None:
            raise out_of_memory()
        view = self.arena.view(slot.offset, len(data))
        view[:] = data
        return RequestBody(view, json_bytes, slot.offset, slot, arrived)

    def inflate(self, body: RequestBody) -> None:
        """Decompress a body, and give the memory of the compressed one back. Raises `RefusedError`."""
        if not is_compressed(body.data):
            raise bad_request("the body is not compressed as its headers say")
        data = inflate(body.data, self.max_body_bytes)
        inflated = self.hold(data, len(data), body.arrived)
        self.release(body.slot)
        body.data, body.offset, body.slot = inflated.data, inflated.offset, inflated.slot


def is_compressed(message: Buffer) -> bool:
    """Return whether a message begins as gzip or zlib do; neither JSON nor a ModelInferRequest does."""
    beginning = bytes(message[:2])
    if beginning == b"\x1f\x8b":
        return True
    # RFC 1950, 2.2: Deflate with a 32 KiB window, and both bytes as a number are a multiple of 31.
    return beginning[:1] == b"\x78" and len(beginning) > 1 and int.from_bytes(beginning, "big") % 31 == 0


def inflate(message: Buffer, limit: int) -> bytes:
    """Return the decompressed message of at most ``limit`` bytes. Raises `RefusedError`: 400, 413."""
    inflater = zlib.decompressobj(zlib.MAX_WBITS + 32)  # recognises the header of gzip or zlib (zlib.h, inflateInit2)
    try:
        inflated = inflater.decompress(message, limit + 1)
    except zlib.error as error:
        raise bad_request(f"the message cannot be inflated: {error}") from None
    if len(inflated) > limit:
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the message is larger than {limit} bytes")
    if not inflater.eof or inflater.unused_data:
        raise bad_request("the message is not compressed as one piece")
    return inflated


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
