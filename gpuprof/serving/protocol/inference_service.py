"""Inference requests of all protocols on their way to the router: submitted, cancelled and refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from http import HTTPStatus
from typing import Any

from gpuprof.errors import GpuprofError
from gpuprof.serving.protocol.compression import inflate, is_compressed
from gpuprof.serving.protocol.http_route import HttpClient, ReceivedBody
from gpuprof.serving.protocol.large_texts import place_inputs
from gpuprof.serving.router.infer_request import InferRequest, RequestBody
from gpuprof.serving.router.router import Router, find_batch_key
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError, bad_request
from gpuprof.serving.watch.side_process import P, R, SideProcess

#: Called with the request, its inference, the outputs, and their slot.
Answer = Callable[[InferRequest, Inference, list[OutputTensor], Slot | None], None]
#: Reads a body in another process; returns the model and the request.
Read = Callable[[RequestBody], Awaitable[tuple[ServedModel, InferRequest]]]
#: Submits a request that was read, with its slots.
Submit = Callable[[ServedModel, InferRequest, list[Slot]], None]


class InferenceService:
    """Submits requests to the models. ``max_body_bytes``: of a request, decompressed."""

    def __init__(self, router: Router, max_body_bytes: int) -> None:
        self.router = router
        self.arena = router.arena
        self.max_body_bytes = max_body_bytes
        self.side_process = SideProcess()
        self._inflating = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self,
        model: ServedModel,
        connection: HttpClient,
        request: InferRequest,
        slots: list[Slot],
        arrived: float,
        done: Answer,
        traceparent: str = "",
        limit_ms: float | None = None,
    ) -> None:
        """Submit a request; a refused request releases its slots. ``limit_ms``: deadline of the call itself."""
        try:
            deadline_ms = model.limit_deadline_ms(request.timeout_ms)
            inference = Inference(
                rows=request.rows,
                inputs=request.inputs,
                wanted=request.outputs,
                arrived=arrived,
                deadline_ms=deadline_ms if limit_ms is None else min(deadline_ms, limit_ms),
                on_done=partial(done, request),
                on_refused=lambda _, refusal: connection.refuse(refusal),
                priority=request.priority,
                slots=slots,
                batch_key=find_batch_key(model, request),
                traceparent=traceparent,
                client=connection.peer,
            )
            model.submit(inference)
        except RefusedError as refusal:
            self.refuse(connection, refusal, slots)
            return
        connection.on_disconnect = partial(_cancel, inference)

    def refuse(self, connection: HttpClient, refusal: RefusedError, slots: list[Slot]) -> None:
        """Refuse a request and give its slots back."""
        self._release(slots)
        connection.refuse(refusal)

    def read_elsewhere(
        self, connection: HttpClient, received: ReceivedBody, compressed: bool, read: Read, submit: Submit
    ) -> None:
        """Read and submit a request that would keep the event loop for long: a compressed or a large text."""
        disconnects: list[bool] = []
        connection.on_disconnect = partial(disconnects.append, True)
        self.start_task(self._read_and_submit(connection, disconnects, received, compressed, read, submit))

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
        connection: HttpClient,
        disconnects: list[bool],
        received: ReceivedBody,
        compressed: bool,
        read: Read,
        submit: Submit,
    ) -> None:
        body = received.body
        try:
            if compressed:
                if not is_compressed(body.data):
                    raise bad_request("the body is not compressed as its headers say")
                async with self._inflating:
                    data = await asyncio.to_thread(inflate, body.data, self.max_body_bytes)
                body = RequestBody(data, len(data))
            model, request = await read(body)
            request, slots = place_inputs(request, self.arena)
        except RefusedError as refusal:
            connection.refuse(refusal)
            return
        finally:
            if received.slot is not None:
                self.arena.give_back(received.slot)
        if disconnects:
            self._release(slots)
        else:
            submit(model, request, slots)

    def _release(self, slots: list[Slot]) -> None:
        for slot in slots:
            self.arena.give_back(slot)


def _cancel(inference: Inference) -> None:
    inference.cancelled = True
