"""A cache of parsed requests: most clients send the same JSON again and again, followed by other tensors."""

from __future__ import annotations

from gpuprof.serving.router.infer_request import InferRequest, RequestBody, read_request
from gpuprof.serving.transport.inference import InputTensor
from gpuprof.serving.transport.metadata import ModelSpec

#: Number of cached texts.
_MOST = 64


class RequestReader:
    """Reads the requests of a model.

    The text and the length of the body determine everything but the values of the tensors, so a cached text is
    neither parsed nor checked again; only tensors of strings are checked each time.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._has_strings = any(tensor.datatype == "BYTES" for tensor in spec.inputs)
        self._known: dict[tuple[bytes, int], InferRequest] = {}

    def read_request(self, body: RequestBody) -> InferRequest:
        """Read and check a request. Raises `RefusedError` as `read_request` does."""
        if self._has_strings or body.json_bytes == len(body.data):
            return read_request(self._spec, body)
        key = bytes(memoryview(body.data)[: body.json_bytes]), len(body.data)
        request = self._known.get(key)
        if request is None:
            request = read_request(self._spec, RequestBody(body.data, body.json_bytes, 0))  # offsets within the body
            if len(self._known) == _MOST:
                self._known.clear()
            self._known[key] = request
        return _attach_tensors(request, body)


def _attach_tensors(base: InferRequest, body: RequestBody) -> InferRequest:
    """Return a copy of the cached request with the tensors of this body."""
    data = memoryview(body.data)
    inputs = []
    for tensor in base.inputs:
        if not isinstance(tensor.data, tuple):  # its values are part of the text
            inputs.append(tensor)
            continue
        start, size = tensor.data
        if body.offset is None:
            inputs.append(InputTensor(tensor.shape, data[start : start + size]))
        else:
            inputs.append(InputTensor(tensor.shape, (body.offset + start, size)))
    return InferRequest(base.id, base.rows, inputs, base.outputs, base.binary, base.timeout_ms, base.priority)
