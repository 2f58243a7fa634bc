"""Inference requests of all protocols on their way to the router: cached, submitted, cancelled and refused."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from http import HTTPStatus

from gpuprof.serving.protocol.http_message import MAX_DISCARDED_BYTES, HttpClient
from gpuprof.serving.router.infer_request import InferRequest, RequestBody
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.batch_io import INLINE_BYTES
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
