"""The OpenAPI document of a server: every address, with the served models and their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from gpuprof.serving.router.infer_request import MAX_DIMENSION, MAX_PARAMETER
from gpuprof.serving.router.router import LOWEST_PRIORITY
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_ERROR = {"type": "object", "properties": {"error": _TEXT}, "required": ["error"]}
#: Largest finite values (IEEE 754); larger numbers are refused.
_MAX_FLOAT16, _MAX_FLOAT32 = 65504.0, 3.4028234663852886e38
_MAX_LISTED = 64  # batch sizes for which the number of values is listed


def _integer(bits: int, *, signed: bool) -> dict[str, Any]:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return {"type": "integer", "minimum": low, "maximum": high}


def _float(largest: float) -> dict[str, Any]:
    return {"type": "number", "minimum": -largest, "maximum": largest}


#: JSON Schema of a value of each type; false: JSON cannot carry the type.
_VALUES: dict[str, dict[str, Any] | bool] = {
    "BOOL": {"type": "boolean"}, "BYTES": _TEXT, "FP16": _float(_MAX_FLOAT16), "FP32": _float(_MAX_FLOAT32),
    "FP64": {"type": "number"}, "BF16": False,
    **{f"INT{bits}": _integer(bits, signed=True) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": _integer(bits, signed=False) for bits in (8, 16, 32, 64)},
}  # fmt: skip


def document(specs: Iterable[ModelSpec]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server of these models."""
    from gpuprof import __version__

    paths: dict[str, Any] = {
        "/v2": _get("Server metadata", {200: _object("name", "version", "extensions")}),
        "/v2/health/live": _get("Whether the server lives", {200: None}),
        "/v2/health/ready": _get("Whether every model can be answered", {200: None, 503: _ERROR}),
        "/v2/models/stats": _get("Statistics of all models", {200: _object("model_stats")}),
        "/v2/repository/index": {"post": _operation("Every version of every model", {200: {"type": "array"}})},
        "/metrics": _get("Figures for Prometheus", {200: _TEXT}, "text/plain"),
        "/openapi.json": _get("This document", {200: _object("openapi", "info", "paths")}),
    }
    for spec in specs:
        paths |= _model_paths(spec)
    return {
        "openapi": "3.1.0",
        "info": {"title": "gpuprof: Open Inference Protocol v2", "version": __version__},
        "paths": paths,
    }


def _model_paths(spec: ModelSpec) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    name = spec.name.replace("~", "~0").replace("/", "%2F")
    for base in (f"/v2/models/{name}", f"/v2/models/{name}/versions/{spec.version}"):
        paths |= {
            base: _get("Inputs and outputs", {200: _object("name", "versions", "platform", "inputs", "outputs")}),
            f"{base}/ready": _get("Whether the model can be answered", {200: None, 503: _ERROR}),
            f"{base}/config": _get("Configuration", {200: _object("name", "input", "output")}),
            f"{base}/stats": _get("Statistics", {200: _object("model_stats")}),
            f"{base}/infer": {"post": _inference(spec)},
        }
    return paths


def _inference(spec: ModelSpec) -> dict[str, Any]:
    answers = {200: _object("model_name", "outputs"), 400: _ERROR, 503: _ERROR}
    request = {
        "type": "object",
        "properties": {
            "id": {"type": ["string", "null"]},
            "parameters": {
                "type": ["object", "null"],
                "properties": {
                    "timeout": {**_COUNT, "maximum": MAX_PARAMETER, "description": "microseconds"},
                    "priority": {**_COUNT, "maximum": LOWEST_PRIORITY},
                },
            },
            "inputs": {
                "type": "array",
                "prefixItems": [_tensor(tensor, spec.max_batch) for tensor in spec.inputs],
                "minItems": len(spec.inputs),
                "maxItems": len(spec.inputs),
                **_sizes(spec),
            },
            "outputs": {
                "type": ["array", "null"],
                "items": {
                    "type": "object",
                    "properties": {"name": {"enum": [tensor.name for tensor in spec.outputs]}},
                    "required": ["name"],
                },
                "maxItems": len(spec.outputs),
                "allOf": [_at_most_once(tensor.name) for tensor in spec.outputs],
            },
        },
        "required": ["inputs"],
    }
    operation = _operation(f"Ask {spec.name}", answers)
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": request}}}
    return operation


def _at_most_once(name: str) -> dict[str, Any]:
    entry = {"properties": {"name": {"const": name}}, "required": ["name"]}
    return {"contains": entry, "minContains": 0, "maxContains": 1}


def _sizes(spec: ModelSpec) -> dict[str, Any]:
    """Return the schema of a common batch of all inputs and the resulting numbers of values; a case for each batch.

    The number of values of an input with further open dimensions cannot be expressed in a schema.
    """
    if spec.max_batch > _MAX_LISTED:
        return {}
    batches = range(1, spec.max_batch + 1) if spec.max_batch else (None,)
    return {"anyOf": [{"prefixItems": [_describe_input(tensor, rows) for tensor in spec.inputs]} for rows in batches]}


def _describe_input(tensor: TensorSpec, rows: int | None) -> dict[str, Any]:
    """Return the schema of an input for a batch of ``rows``; None: for a model without a batch dimension."""
    shape = list(tensor.shape) if rows is None else [rows, *tensor.shape[1:]]
    properties: dict[str, Any] = {} if rows is None else {"shape": {"prefixItems": [{"const": rows}]}}
    if -1 not in shape:
        properties["data"] = {"minItems": prod(shape), "maxItems": prod(shape)}
    return {"properties": properties}


def _tensor(spec: TensorSpec, max_batch: int) -> dict[str, Any]:
    """Return the schema of an input."""
    open_size = {**_COUNT, "maximum": MAX_DIMENSION - 1}
    sizes: list[dict[str, Any]] = [open_size if size == -1 else {"const": size} for size in spec.shape]
    if max_batch:
        sizes[0] = {"type": "integer", "minimum": 1, "maximum": max_batch}
    return {
        "type": "object",
        "properties": {
            "name": {"const": spec.name},
            "datatype": {"const": spec.datatype},
            "shape": {"type": "array", "prefixItems": sizes, "minItems": len(sizes), "maxItems": len(sizes)},
            "data": {"type": "array", "items": _VALUES[spec.datatype]},
        },
        "required": ["name", "datatype", "shape", "data"],
    }


def _get(summary: str, answers: Mapping[int, Any], content: str = "application/json") -> dict[str, Any]:
    return {"get": _operation(summary, answers, content)}


def _operation(summary: str, answers: Mapping[int, Any], content: str = "application/json") -> dict[str, Any]:
    described: dict[str, Any] = {
        str(status): {"description": "an error" if status >= 400 else "the answer"}
        | ({} if schema is None else {"content": {content: {"schema": schema}}})
        for status, schema in answers.items()
    }
    described["4XX"] = {"description": "the request is wrong", "content": {"application/json": {"schema": _ERROR}}}
    return {"summary": summary, "responses": described}


def _object(*required: str) -> dict[str, Any]:
    return {"type": "object", "required": list(required)}
