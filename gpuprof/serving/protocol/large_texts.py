"""Requests and answers with large texts, which a process beside the router reads and writes.

Threads would not help: making a million Python objects holds the interpreter's lock.
"""

from __future__ import annotations

from http import HTTPStatus

from gpuprof.serving.protocol.infer_response import write_response
from gpuprof.serving.router.infer_request import InferRequest, RequestBody, read_request
from gpuprof.serving.transport.inference import OutputTensor, RefusedError
from gpuprof.serving.transport.metadata import ModelSpec
from gpuprof.serving.transport.wire import Buffer

#: Maximum text parsed on the event loop: a few milliseconds' work.
ON_LOOP_BYTES = 1 << 18
#: Longer texts are refused: tensors can be sent as binary data.
MAX_TEXT_BYTES = 1 << 24


def refuse_long_text(size: int) -> None:
    """Refuse a text too long to parse. Raises `RefusedError`: 413."""
    if size > MAX_TEXT_BYTES:
        message = f"the request has {size} bytes of text, more than {MAX_TEXT_BYTES}: send tensors as binary data"
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


def read_large_request(spec: ModelSpec, data: bytes, json_bytes: int) -> InferRequest:
    """Read an HTTP request. Raises `RefusedError`: 400."""
    return read_request(spec, RequestBody(data, json_bytes))


def write_large_response(
    spec: ModelSpec, request: InferRequest, outputs: list[OutputTensor]
) -> tuple[bytes, list[Buffer]]:
    """Return the JSON of an answer and the binary tensors that follow it. Raises `RefusedError`: 400."""
    text, binary = write_response(spec, request, outputs)
    return text, [bytes(tensor) for tensor in binary]


def warm_up() -> None:
    """Import NumPy, so that the first large text does not wait for it."""
    import numpy as np

    np.zeros(0)
