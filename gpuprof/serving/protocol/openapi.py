"""The OpenAPI document of a server: every address, with the served models and their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec

_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}


def document(specs: Iterable[ModelSpec]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server of these models."""
    from gpuprof import __version__

    paths: dict[str, Any] = {
        "/v2": _get("Server metadata", {200: _object("name", "version", "extensions")}),
        "/v2/health/live": _get("Whether the server lives", {200: None}),
        "/v2/health/ready": _get("Whether every model can be answered", {200: None, 503: _ERROR}),
        "/v2/models/stats": _get("Statistics of all models", {200: _object("model_stats")}),
        "/v2/repository/index": {"post": _operation("Every version of every model", {200: {"type": "array"}})},
        "/metrics": _get("Figures for Prometheus", {200: {"type": "string"}}, "text/plain"),
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
    request = _object("inputs") | {
        "properties": {
            "id": {"type": ["string", "null"]},
            "parameters": {
                "type": ["object", "null"],
                "properties": {
                    "timeout": {"type": "integer", "minimum": 0, "description": "microseconds"},
                    "priority": {"type": "integer", "minimum": 0},
                },
            },
            "inputs": {
                "type": "array",
                "items": {"anyOf": [_tensor(tensor, spec.max_batch) for tensor in spec.inputs]},
                "minItems": len(spec.inputs),
                "maxItems": len(spec.inputs),
            },
            "outputs": {
                "type": ["array", "null"],
                "items": _object("name") | {"properties": {"name": {"enum": [tensor.name for tensor in spec.outputs]}}},
            },
        }
    }
    operation = _operation(f"Ask {spec.name}", {200: _object("model_name", "outputs"), 400: _ERROR, 503: _ERROR})
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": request}}}
    return operation


def _tensor(spec: TensorSpec, max_batch: int) -> dict[str, Any]:
    """Return the schema of an input."""
    sizes: list[dict[str, Any]] = [
        {"type": "integer", "minimum": 0} if size == -1 else {"const": size} for size in spec.shape
    ]
    if max_batch:
        sizes[0] = {"type": "integer", "minimum": 1, "maximum": max_batch}
    return _object("name", "datatype", "shape") | {
        "properties": {
            "name": {"const": spec.name},
            "datatype": {"const": spec.datatype},
            "shape": {"type": "array", "prefixItems": sizes, "minItems": len(sizes), "maxItems": len(sizes)},
            "data": {"type": "array"},
        },
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
