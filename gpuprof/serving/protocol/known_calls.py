"""Cache of gRPC messages: most clients repeat a message with another tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gpuprof.serving.protocol.grpc_messages import RAW_INPUTS, InferCall, read_infer
from gpuprof.serving.protocol.grpc_raw import split_off_field
from gpuprof.serving.protocol.open_inference import message_class
from gpuprof.serving.router.infer_request import InferRequest
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import InputTensor
from gpuprof.serving.transport.metadata import ModelSpec
from gpuprof.serving.transport.wire import Buffer

#: Number of cached message lengths, messages per length, and maximum bytes before the tensor.
_MOST_LENGTHS, _MOST_OF_A_LENGTH, _MOST_BYTES = 64, 4, 1024


@dataclass(frozen=True, slots=True)
class _KnownCall:
    """A message without the tensor at its end, and its request."""

    beginning: bytes
    message: Any
    name: str  #: Name of the model.
    version: str  #: Version of the model; empty: the newest.
    request: tuple[ModelSpec, InferRequest]  #: Specification of the model at the time of reading, and the request.


class KnownCalls:
    """Reads ModelInferRequests.

    Where a message ends with its only raw tensor, its length and the bytes before the tensor determine its meaning
    and validity, so an equal message need not be read and checked again. Tensors of strings are checked each time;
    messages with an identifier are not cached, since the next will have another.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[_KnownCall]] = {}

    def find_first_tensor(self, length: int) -> int:
        """Return the position of the tensor in messages of this length, 0 if none is cached."""
        cached = self._known.get(length)
        return len(cached[-1].beginning) if cached else 0

    def find(self, data: Buffer, offset: int | None = None) -> InferCall | None:
        """Return the parsed message if an equal message is cached; ``offset``: its position in the arena."""
        for known in self._known.get(len(data), ()):
            begin = len(known.beginning)
            if data[:begin] == known.beginning:
                tensor = data[begin:] if len(data) <= INLINE_BYTES else memoryview(data)[begin:]
                offsets = None if offset is None else [offset + begin]
                return InferCall(
                    known.message, [tensor], data, known.name, known.version, "", offsets, known.request
                )  # fmt: skip
        return None

    def read_request(self, spec: ModelSpec, call: InferCall) -> InferRequest:
        """Read and check a request from `find` or `open_call`.

        Raises
        ------
        RefusedError
            As `read_infer`.
        """
        if call.cached is not None and call.cached[0] is spec:
            cached = call.cached[1]
            inputs = [InputTensor(cached.inputs[0].shape, call.find_tensor_data(0))]
            return InferRequest(
                cached.id, cached.rows, inputs, cached.outputs, cached.binary, cached.timeout_ms, cached.priority
            )  # fmt: skip
        request = read_infer(spec, call)
        self._remember(spec, call, request)
        return request

    def _remember(self, spec: ModelSpec, call: InferCall, request: InferRequest) -> None:
        data = call.data
        if len(call.raw) != 1 or call.id or not call.raw[0] or spec.inputs[0].datatype == "BYTES":
            return
        begin = len(data) - len(call.raw[0])
        if begin > _MOST_BYTES:
            return
        try:
            rest, spans = split_off_field(data, RAW_INPUTS)
        except ValueError:  # groups, which Protobuf accepts; no message of the protocol has them
            return
        if spans != [slice(begin, len(data))]:
            return
        beginning = bytes(data[:begin])
        others = [known for known in self._known.pop(len(data), []) if known.beginning != beginning]
        if len(self._known) >= _MOST_LENGTHS:
            self._known.clear()
        inputs = [InputTensor(tensor.shape, b"") for tensor in request.inputs]
        # Parsed without the tensor, which would keep the memory of this message.
        message = message_class("ModelInferRequest").FromString(rest)
        asked = spec, replace(request, inputs=inputs)
        known = _KnownCall(beginning, message, call.name, call.version, asked)
        self._known[len(data)] = [*others[1 - _MOST_OF_A_LENGTH :], known]
