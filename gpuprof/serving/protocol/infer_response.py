"""Writes the body of an inference's answer: JSON, or JSON followed by binary tensors."""

from __future__ import annotations

from math import prod
from typing import Any

import orjson

from gpuprof.serving.router.infer_request import InferRequest
from gpuprof.serving.transport.datatypes import to_json
from gpuprof.serving.transport.inference import OutputTensor, bad_request
from gpuprof.serving.transport.metadata import ModelSpec
from gpuprof.serving.transport.wire import Buffer


def write_response(spec: ModelSpec, request: InferRequest, outputs: list[OutputTensor]) -> tuple[bytes, list[Buffer]]:
    """Return the JSON of the answer and the binary tensors that follow it.

    Raises
    ------
    RefusedError
        400, when the request wants JSON for an output that JSON cannot carry.
    """
    if request.outputs is not None:
        by_position = {output.position: output for output in outputs}
        outputs = [by_position[position] for position in request.outputs]
    entries = []
    binary: list[Buffer] = []
    for output in outputs:
        tensor = spec.outputs[output.position]
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": output.shape}
        if request.binary is None or output.position in request.binary:
            entry["parameters"] = {"binary_data_size": len(output.data)}
            binary.append(output.data)
        else:
            try:
                entry["data"] = to_json(output.data, tensor.datatype, prod(output.shape))
            except ValueError as error:
                raise bad_request(f"output {tensor.name!r} {error}") from None
        entries.append(entry)
    head: dict[str, Any] = {"model_name": spec.name, "model_version": spec.version}
    if request.id is not None:
        head["id"] = request.id
    head["outputs"] = entries
    return orjson.dumps(head), binary
