"""ModelStreamInfer: a stream of requests, each answered when it is done, errors as messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from gpuprof.serving.protocol.grpc_inference import InferenceCalls
from gpuprof.serving.protocol.grpc_messages import InferCall, LargeCall, write_stream_error, write_streamed
from gpuprof.serving.transport.inference import Inference, RefusedError, out_of_memory
from gpuprof.serving.transport.wire import Buffer

#: Requests of one stream that are not answered yet; more are not read.
_DEPTH = 64


class InferStream:
    """One stream: reads its requests, and writes answers in the order in which they are done.

    Parameters
    ----------
    calls : InferenceCalls
    context : ServicerContext
    count_refusal : callable
        Told what is refused by a message of the stream.
    """

    def __init__(self, calls: InferenceCalls, context: Any, count_refusal: Callable[[RefusedError], None]) -> None:
        self._count_refusal = count_refusal
        self._calls = calls
        self._arena = calls.arena
        self._context = context
        self._answers: asyncio.Queue[tuple[bytes, int] | RefusedError | None] = asyncio.Queue()
        self._waiting: set[Inference] = set()
        self._permits = asyncio.Semaphore(_DEPTH)
        self._unanswered = 0
        self._client_ended = self._is_over = self._is_stopping = False

    async def run(self) -> None:
        """Return when the client has said everything and everything is answered."""
        reader = asyncio.ensure_future(self._read_messages())
        try:
            await self._write()
        finally:
            self._is_over = True
            reader.cancel()
            for inference in self._waiting:
                inference.cancelled = True
            while not self._answers.empty():
                left = self._answers.get_nowait()
                self._arena.discharge(left[1] if isinstance(left, tuple) else 0)

    def stop(self) -> None:
        """End the stream when everything is answered: the server stops, and the client may have nothing more to say."""
        self._is_stopping = True
        self._finish_if_all_is_answered()

    async def _write(self) -> None:
        while (answer := await self._answers.get()) is not None:
            if isinstance(answer, RefusedError):
                raise answer
            body, charged = answer
            try:
                await self._context.write(body)
            finally:
                self._arena.discharge(charged)
            self._permits.release()

    async def _read_messages(self) -> None:
        while True:
            await self._permits.acquire()
            try:
                call = await self._calls.receive(self._context)
            except RefusedError as refusal:  # what follows need not make sense either
                refusal.forget_origin()  # it waits behind answers that may be read slowly
                self._answers.put_nowait(refusal)
                return
            if call is None:
                break
            self._unanswered += 1
            await self._submit(call)
            del call
        self._client_ended = True
        self._finish_if_all_is_answered()

    async def _submit(self, call: InferCall | LargeCall) -> None:
        asked: list[Inference] = []
        settle = partial(self._settle, call.id, asked)
        try:
            inference = await self._calls.accept(call, self._context, settle)
        except RefusedError as refusal:
            settle(refusal)
            return
        asked.append(inference)
        self._waiting.add(inference)

    def _settle(self, request_id: str, asked: list[Inference], outcome: Sequence[Buffer] | RefusedError) -> None:
        self._waiting.difference_update(asked)
        if self._is_over:
            return
        if isinstance(outcome, RefusedError):
            self._count_refusal(outcome)
            body = write_stream_error(outcome.message, request_id)
        else:
            body = b"".join(write_streamed(outcome))
        charged = len(body)
        if not self._arena.charge(charged):
            body, charged = write_stream_error(out_of_memory().message, request_id), 0
        self._unanswered -= 1
        self._answers.put_nowait((body, charged))
        self._finish_if_all_is_answered()

    def _finish_if_all_is_answered(self) -> None:
        if self._unanswered:
            return
        if self._client_ended:
            self._answers.put_nowait(None)
        elif self._is_stopping:
            self._answers.put_nowait(RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping"))
