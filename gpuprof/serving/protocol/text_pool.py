"""Expensive requests: large texts are read and written by another process, compressed bodies inflated by threads.

Threads would not help with texts: making a million Python objects holds the interpreter's lock. Untrusted texts are
parsed under a memory limit, and any failure there, even the end of the process, refuses only a single request.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
import signal
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from http import HTTPStatus
from multiprocessing import get_context
from typing import Any, ParamSpec, TypeVar

from gpuprof.serving.protocol.infer_response import write_response
from gpuprof.serving.router.infer_request import InferRequest, RequestBody, read_request
from gpuprof.serving.transport.arena import Arena, Slot
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import InputTensor, OutputTensor, RefusedError, out_of_memory
from gpuprof.serving.transport.metadata import ModelSpec
from gpuprof.serving.transport.wire import Buffer

#: Maximum text parsed on the event loop: a few milliseconds' work.
ON_LOOP_BYTES = 1 << 18
#: Longer texts are refused: tensors can be sent as binary data.
MAX_TEXT_BYTES = 1 << 24
#: Texts at or on their way to the process; inflating threads.
_AT_ONCE = 2
_MAX_WAITING = 16
_MAX_MEMORY_BYTES = 4 << 30
_PR_SET_PDEATHSIG = 1
#: Maximum expansion of a byte by Deflate (zlib.net/zlib_tech.html).
_MOST_RATIO = 1032
_PIECE_BYTES = 1 << 16
#: zlib recognises the header of gzip or zlib: 15 bits of window + 32 (zlib.h, inflateInit2).
_ANY_HEADER = 47

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A `RefusedError` on its way between processes."""

    status: HTTPStatus
    message: str


class TextPool:
    """Runs functions in another process."""

    def __init__(self) -> None:
        self._executor: ProcessPoolExecutor | None = None
        self._free = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0

    async def warm_up(self) -> None:
        """Start the process and import its modules, so that the first large text does not wait."""
        await self.run(_import_numpy)

    async def run(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Return the result of a module's function; arguments and results travel between processes.

        Raises
        ------
        RefusedError
            As raised by the function; 413, when it needs too much memory; 503, when too many texts wait.
        """
        if self._waiting >= _MAX_WAITING:
            message = "too many large texts wait to be read: send tensors as binary data"
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, message, 1.0, overloaded=True, reason="large texts")
        self._waiting += 1
        try:
            async with self._free:
                outcome = await asyncio.wrap_future(self._start().submit(_guard, function, arguments, named))
        except BrokenProcessPool:
            self._executor = None
            raise _too_costly() from None
        finally:
            self._waiting -= 1
        if isinstance(outcome, _Refusal):
            raise RefusedError(outcome.status, outcome.message)
        return outcome

    def close(self) -> None:
        """End the process when it has finished its present function."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor = None

    def _start(self) -> ProcessPoolExecutor:
        if self._executor is None:
            # Spawned: a fork of the router would have its sockets, and its threads' locks as they were.
            self._executor = ProcessPoolExecutor(1, get_context("spawn"), _limit_process)
        return self._executor


def refuse_long_text(size: int) -> None:
    """Refuse a text too long to parse. Raises `RefusedError`: 413."""
    if size > MAX_TEXT_BYTES:
        message = f"the request has {size} bytes of text, more than {MAX_TEXT_BYTES}: send tensors as binary data"
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


def _import_numpy() -> None:
    import numpy as np

    np.zeros(0)


def _guard(function: Callable[..., R], arguments: tuple[Any, ...], named: dict[str, Any]) -> R | _Refusal:
    try:
        return function(*arguments, **named)
    except RefusedError as refusal:
        return _Refusal(refusal.status, refusal.message)
    except (MemoryError, RecursionError):
        costly = _too_costly()
        return _Refusal(costly.status, costly.message)


def _too_costly() -> RefusedError:
    message = "the request's text takes too much memory to read: send tensors as binary data"
    return RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


def _limit_process() -> None:
    """Have this process end with the router, not before, and limit its memory."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))


# --- functions for the process


def read_large_request(spec: ModelSpec, data: bytes, json_bytes: int) -> InferRequest:
    """Read an HTTP request, its tensors as bytes. Raises `RefusedError`: 400."""
    return _copy_tensors(read_request(spec, RequestBody(data, json_bytes)))


def read_large_call(spec: ModelSpec, message: bytes) -> InferRequest:
    """Read a gRPC request, its tensors as bytes. Raises `RefusedError`: 400."""
    from gpuprof.serving.protocol.grpc_messages import InferCall, read_infer

    return _copy_tensors(read_infer(spec, InferCall.decode(message)))


def write_large_response(
    spec: ModelSpec, request: InferRequest, outputs: list[OutputTensor]
) -> tuple[bytes, list[Buffer]]:
    """Return the JSON of an answer and the binary tensors that follow it. Raises `RefusedError`: 400."""
    text, binary = write_response(spec, request, outputs)
    return text, [bytes(tensor) for tensor in binary]


def _copy_tensors(request: InferRequest) -> InferRequest:
    """Return the request with picklable tensors."""
    inputs = [
        tensor if isinstance(tensor.data, tuple) else InputTensor(tensor.shape, bytes(tensor.data))
        for tensor in request.inputs
    ]
    return replace(request, inputs=inputs)


# --- memory of the router


def place_inputs(request: InferRequest, arena: Arena) -> tuple[InferRequest, list[Slot]]:
    """Copy the large tensors of a request into the arena; return the changed request and its slots.

    Raises
    ------
    RefusedError
        503, when the arena is full.
    """
    slots: list[Slot] = []
    for tensor in request.inputs:
        if type(tensor.data) is not bytes or len(tensor.data) > INLINE_BYTES:
            break
    else:
        return request, slots
    return replace(request, inputs=[_place(tensor, arena, slots) for tensor in request.inputs]), slots


def _place(tensor: InputTensor, arena: Arena, slots: list[Slot]) -> InputTensor:
    data = tensor.data
    if isinstance(data, tuple):
        return tensor
    if len(data) <= INLINE_BYTES:  # a view would keep all of the message
        return InputTensor(tensor.shape, bytes(data)) if isinstance(data, memoryview) else tensor
    slot = arena.take(len(data))
    if slot is None:
        for taken in slots:
            arena.give_back(taken)
        raise out_of_memory()
    slots.append(slot)
    arena.view(slot.offset, len(data))[:] = data
    return InputTensor(tensor.shape, (slot.offset, len(data)))


class Inflater:
    """Inflates compressed bodies, a few at a time, charged to the arena. ``max_bytes``: of a body, inflated."""

    def __init__(self, arena: Arena, max_bytes: int) -> None:
        self._arena, self._max_bytes = arena, max_bytes
        self._free = asyncio.Semaphore(_AT_ONCE)

    async def inflate(self, message: Buffer) -> bytes:
        """Return the decompressed body.

        Raises
        ------
        RefusedError
            When the body cannot be inflated or is too large, or no memory is left.
        """
        most = min(self._max_bytes, _MOST_RATIO * len(message))
        async with self._free:
            if not self._arena.charge(most):
                raise out_of_memory()
            try:
                return await asyncio.to_thread(_inflate, message, self._max_bytes)
            finally:
                self._arena.discharge(most)


def is_compressed(message: Buffer) -> bool:
    """Return whether a message begins as gzip or zlib do; neither JSON nor a ModelInferRequest does."""
    beginning = bytes(message[:2])
    if beginning == b"\x1f\x8b":
        return True
    # RFC 1950, 2.2: Deflate with a 32 KiB window, and both bytes as a number are a multiple of 31.
    return beginning[:1] == b"\x78" and len(beginning) > 1 and int.from_bytes(beginning, "big") % 31 == 0


def _inflate(message: Buffer, most: int) -> bytes:
    """Return the decompressed message, inflated in pieces so that other threads can run Python."""
    inflater = zlib.decompressobj(_ANY_HEADER)
    inflated = bytearray()
    position = 0
    try:
        while position < len(message) and not inflater.eof:
            piece: Buffer = message[position : position + _PIECE_BYTES]
            position += len(piece)
            while piece and not inflater.eof:
                inflated += inflater.decompress(piece, _PIECE_BYTES)
                if len(inflated) > most:
                    text = f"the message is larger than {most} bytes"
                    raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
                piece = inflater.unconsumed_tail
    except zlib.error as error:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"the message cannot be inflated: {error}") from None
    if not inflater.eof or inflater.unused_data or position < len(message):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "the message is not compressed as one piece")
    return bytes(inflated)
