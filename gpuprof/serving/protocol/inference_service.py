"""Inference requests of all protocols on their way to the router: cached, submitted, cancelled and refused."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from http import HTTPStatus
from typing import Any

from gpuprof.errors import GpuprofError
from gpuprof.serving.protocol.http_message import HttpClient
from gpuprof.serving.router.infer_request import InferRequest, RequestBody
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError, bad_request, out_of_memory
from gpuprof.serving.transport.wire import Buffer
from gpuprof.serving.watch.side_process import P, R, SideProcess

#: Called with the model, the client, the request, its inference, the outputs, and their slot.
Answer = Callable[[ServedModel, HttpClient, InferRequest, Inference, list[OutputTensor], Slot | None], None]
#: Submits a request of a model, with its body.
Submit = Callable[[ServedModel, InferRequest, RequestBody], None]
#: Reads a body in another process; returns the model and the request.
Read = Callable[[RequestBody], Awaitable[tuple[ServedModel, InferRequest]]]
#: Maximum text parsed on the event loop: a few milliseconds' work. Another process parses longer ones; threads would
#: not help, since making a million Python objects holds the interpreter's lock.
ON_LOOP_BYTES = 1 << 18
#: Longer texts are refused: tensors can be sent as binary data.
MAX_TEXT_BYTES = 1 << 24
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
        self.side_process = SideProcess()
        self.cached: dict[object, tuple[ServedModel, InferRequest]] = {}
        router.on_change(self.cached.clear)
        self._inflating = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

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

    def read_elsewhere(
        self, client: HttpClient, body: RequestBody, compressed: bool, read: Read, submit: Submit
    ) -> None:
        """Read and submit a request that would keep the event loop for long: a compressed or a large text."""
        disconnects: list[bool] = []
        client.on_disconnect = partial(disconnects.append, True)
        self.start_task(self._read_and_submit(client, body, disconnects, compressed, read, submit))

    async def run_beside(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Return the result of a function that another process runs. Raises `RefusedError`: also if it cannot."""
        try:
            return await self.side_process.run(function, *arguments, **named)
        except GpuprofError as error:
            message = f"a large text cannot be converted: {error.message} (send and ask for binary data)"
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message) from None

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` as a task of the event loop."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read_and_submit(
        self,
        client: HttpClient,
        body: RequestBody,
        disconnects: list[bool],
        compressed: bool,
        read: Read,
        submit: Submit,
    ) -> None:
        try:
            if compressed:
                body = await self._inflate(body)
            model, request = await read(body)
            if disconnects:
                self.release(body.slot)
            else:
                submit(model, request, body)
        except RefusedError as refusal:
            self.release(body.slot)
            client.refuse(refusal)

    async def _inflate(self, body: RequestBody) -> RequestBody:
        """Return the decompressed body, and give the memory of the compressed one back. Raises `RefusedError`."""
        if not is_compressed(body.data):
            raise bad_request("the body is not compressed as its headers say")
        async with self._inflating:
            data = await asyncio.to_thread(inflate, body.data, self.max_body_bytes)
        inflated = self.hold(data, len(data), body.arrived)
        self.release(body.slot)
        return inflated


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
