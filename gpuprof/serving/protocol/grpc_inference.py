"""Inference over gRPC: one call for one request, or a stream of requests and answers.

grpcio owns every byte that it sends: an answer is copied out of the arena when the worker has given it, and its slot is
free at once. What a client has not read yet is charged to the arena until grpcio has let go of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gpuprof.serving.protocol.grpc_messages import (
    InferCall,
    LargeCall,
    open_call,
    read_urgency,
    write_infer,
)
from gpuprof.serving.protocol.grpc_reader import MessageReader
from gpuprof.serving.protocol.known_calls import KnownCalls
from gpuprof.serving.protocol.large_texts import place_inputs, read_large_call
from gpuprof.serving.protocol.parse_pool import refuse_long_text
from gpuprof.serving.protocol.peer_counts import peer_of
from gpuprof.serving.protocol.protocol_parts import ProtocolParts
from gpuprof.serving.router.infer_request import InferRequest
from gpuprof.serving.router.router import Router, find_batch_key, find_deadline_ms
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError, bad_request, out_of_memory
from gpuprof.serving.transport.wire import Buffer

#: Of a message beside raw tensors, what is read on the event loop: all streams of a connection can end theirs at once,
#: and they are read before it is known whose turn it is.
_ON_LOOP_BYTES = 1 << 16


class InferenceCalls:
    """Answers ModelInfer, and submits the requests of streams.

    Parameters
    ----------
    router : Router
    reader : MessageReader
    receive_s : float
        How long the message of a call may take to arrive.
    shared : ProtocolParts
        Reads messages that have much beside raw tensors, and says in which order small ones are read.
    """

    def __init__(self, router: Router, reader: MessageReader, receive_s: float, shared: ProtocolParts) -> None:
        self.arena = router.arena
        self._reader = reader
        self._pool, self._turns = shared.pool, shared.turns
        self._router = router
        self._receive_s = receive_s
        self._known = KnownCalls()

    async def infer(self, _: object, context: Any) -> bytes:
        """Answer a call with one request.

        It is registered as a call that sends a stream, which on the wire is the same: so the message is read here,
        within a limit of time.

        Raises
        ------
        RefusedError
            When it is wrong, or is not answered.
        """
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        inference = None
        try:
            message = await self._reader.read_message(context, self._receive_s)
            if message is None:
                raise bad_request("the call has no message")
            call = self._open_call(message)
            del message
            settle = partial(_settle, answer)
            inference = self._accept_now(call, context, settle) or await self.accept(call, context, settle)
            del call  # what is large of it lies in the arena now
            body = await answer
            if not self.arena.charge(len(body)):
                raise out_of_memory()
        except asyncio.CancelledError:
            if inference is not None:
                inference.cancelled = True
            raise
        # grpcio keeps its last call, and with it this function, for as long as no other comes: not the answer, too.
        size = len(body)
        context.add_done_callback(lambda _: self.arena.discharge(size))
        return body

    async def receive(self, context: Any) -> InferCall | LargeCall | None:
        """Return the next request of a stream, which `accept` must be given, None where the client sends no more.

        Raises
        ------
        RefusedError
            When it is no request, or finds no memory.
        """
        message = await self._reader.read_message(context)
        return None if message is None else self._open_call(message)

    def _open_call(self, message: Buffer) -> InferCall | LargeCall:
        """Read a message as far as it is read before it is known whose turn it is."""
        try:
            return self._known.find(message) or open_call(message, _ON_LOOP_BYTES)
        except RefusedError:
            self._reader.release(len(message))
            raise

    def _accept_now(
        self,
        call: InferCall | LargeCall,
        context: Any,
        settle: Callable[[Sequence[Buffer] | RefusedError], None],
    ) -> Inference | None:
        """Submit what was received if it is read at once and nobody waits, as mostly; None: `accept` is to be called.

        Raises
        ------
        RefusedError
            As `accept`.
        """
        arrived = time.monotonic()
        if type(call) is not InferCall or not self._turns.admits_all(arrived):
            return None
        try:
            model = self._router.find(call.name, call.version)
            return self._read_and_submit(model, call, context, settle, arrived)
        finally:
            self._reader.release(len(call.data))

    async def accept(
        self,
        call: InferCall | LargeCall,
        context: Any,
        settle: Callable[[Sequence[Buffer] | RefusedError], None],
    ) -> Inference:
        """Submit what was received; ``settle`` is called once, later, with the parts of the answer or the refusal.

        Raises
        ------
        RefusedError
            When it is wrong, or cannot be answered in time; then ``settle`` is not called.
        """
        arrived = time.monotonic()
        try:
            model = self._router.find(call.name, call.version)
            if isinstance(call, LargeCall):
                refuse_long_text(call.text_bytes)
                async with self._pool.turn(peer_of(context)):
                    request = await self._pool.run(read_large_call, model.spec, call.data)
                return self._submit(model, request, context, settle, arrived)
            if self._turns.admits_all(arrived) or self._turns.admits(model.name, arrived):
                return self._read_and_submit(model, call, context, settle, arrived)
            return await self._read_in_turn(
                model, partial(self._read_and_submit, model, call, context, settle, arrived)
            )
        finally:
            self._reader.release(call.size)

    async def _read_in_turn(self, model: ServedModel, read: Callable[[], Inference]) -> Inference:
        """Have a message read when it is its model's turn, unless its call has ended by then."""
        begun: asyncio.Future[Inference] = asyncio.get_running_loop().create_future()

        def take_turn() -> None:
            if begun.done():
                return
            try:
                begun.set_result(read())
            except Exception as error:  # raised where the call awaits it
                begun.set_exception(error)

        self._turns.wait(model.name, take_turn)
        try:
            return await begun
        except asyncio.CancelledError:
            if begun.done() and not begun.cancelled() and begun.exception() is None:
                begun.result().cancelled = True
            raise

    def _read_and_submit(
        self,
        model: ServedModel,
        call: InferCall,
        context: Any,
        settle: Callable[[Sequence[Buffer] | RefusedError], None],
        arrived: float,
    ) -> Inference:
        if call.size > INLINE_BYTES:
            model.refuse_early(partial(read_urgency, call.message), peer_of(context))
        return self._submit(model, self._known.read_request(model.spec, call), context, settle, arrived)

    def _submit(
        self,
        model: ServedModel,
        request: InferRequest,
        context: Any,
        settle: Callable[[Sequence[Buffer] | RefusedError], None],
        arrived: float,
    ) -> Inference:
        request, slots = place_inputs(request, self.arena)
        inference = self._inference(model, request, context, settle)
        inference.arrived, inference.slots = arrived, slots
        try:
            inference.charge_inputs(self.arena)
            model.submit(inference)
        except RefusedError:
            inference.release(self.arena)
            raise
        return inference

    def _inference(
        self,
        model: ServedModel,
        asked: InferRequest,
        context: Any,
        settle: Callable[[Sequence[Buffer] | RefusedError], None],
    ) -> Inference:
        def done(_: Inference, outputs: list[OutputTensor], slot: Slot | None) -> None:
            settle(write_infer(model.spec, asked, outputs))
            if slot is not None:
                self.arena.give_back(slot)

        left_s = context.time_remaining()
        until_ms = find_deadline_ms(model, asked)
        return Inference(
            asked.rows, asked.inputs, asked.outputs, 0.0,
            until_ms if left_s is None else min(until_ms, 1000.0 * left_s),
            done, lambda _, refusal: settle(refusal),
            priority=asked.priority, batch_key=find_batch_key(model, asked),
            # grpcio makes an object of each of the metadata.
            traceparent="" if self._router.tracer is None else _metadata_value(context, "traceparent"),
            client=peer_of(context),
        )  # fmt: skip


def _settle(answer: asyncio.Future[bytes], outcome: Sequence[Buffer] | RefusedError) -> None:
    """Copy the parts of an answer together: afterwards nobody reads the arena any more."""
    if answer.done():  # the client has gone
        return
    if isinstance(outcome, RefusedError):
        answer.set_exception(outcome)
    else:
        answer.set_result(b"".join(outcome))


def _metadata_value(context: Any, name: str) -> str:
    return next((str(value) for key, value in context.invocation_metadata() or () if key == name), "")
