"""Compressed messages of all protocols: inflated by threads, a few at a time, and only what there is memory for."""

from __future__ import annotations

import asyncio
import zlib
from http import HTTPStatus
from typing import Protocol

from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.client_turns import ClientTurns
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.wire import Buffer

_INFLATED_AT_ONCE = 2
#: Deflate makes a byte of at most so many (zlib.net/zlib_tech.html).
_MOST_RATIO = 1032
_PIECE_BYTES = 1 << 16
#: zlib recognises the header, that of gzip or its own: 15 bits of window + 32 (zlib.h, inflateInit2).
_ANY_HEADER = 47


class MessageMemory(Protocol):
    """Where inflated messages are counted."""

    def charge(self, size: int) -> None:
        """Count ``size`` bytes. Raises `RefusedError` when there is no memory for them."""

    def release(self, size: int) -> None:
        """Count ``size`` bytes no longer."""


class Inflater:
    """Inflates the messages of one protocol.

    Parameters
    ----------
    memory : MessageMemory
    max_bytes : int
        Of a message, inflated.
    invalid : HTTPStatus
        The refusal's where a message cannot be inflated.
    """

    def __init__(self, memory: MessageMemory, max_bytes: int, invalid: HTTPStatus) -> None:
        self._memory = memory
        self._max_bytes = max_bytes
        self._invalid = invalid
        self._turns = ClientTurns(_INFLATED_AT_ONCE)

    async def inflate(self, message: Buffer, client: str) -> Buffer:
        """Return what a message of this client was compressed from, charged to the memory: the caller releases it.

        Raises
        ------
        RefusedError
            When it cannot be inflated, is too large, or finds no memory.
        """
        most = min(self._max_bytes, _MOST_RATIO * len(message))
        inflated: bytearray | RefusedError = bytearray()
        async with self._turns.turn(client):
            self._memory.charge(most)
            try:
                inflated = await asyncio.to_thread(_inflate, message, self._max_bytes, self._invalid)
            finally:
                self._memory.release(most - (0 if isinstance(inflated, RefusedError) else len(inflated)))
        if isinstance(inflated, RefusedError):
            raise inflated
        return bytes(inflated) if len(inflated) <= INLINE_BYTES else inflated


def is_compressed(message: Buffer) -> bool:
    """Return whether a message begins as gzip or zlib do; neither JSON nor a message of gRPC here does."""
    beginning = bytes(message[:2])
    if beginning == b"\x1f\x8b":
        return True
    # RFC 1950, 2.2: Deflate with 32 KiB of window, and both bytes as one number a multiple of 31.
    return beginning[:1] == b"\x78" and len(beginning) > 1 and int.from_bytes(beginning, "big") % 31 == 0


def _inflate(message: Buffer, most: int, invalid: HTTPStatus) -> bytearray | RefusedError:
    """Return what a message was compressed from, or why not: raising would keep what there is of it.

    It is done piece by piece: one large piece is copied once more, and nobody else runs Python meanwhile.
    """
    inflater = zlib.decompressobj(_ANY_HEADER)
    inflated = bytearray()
    try:
        for begin in range(0, len(message), _PIECE_BYTES):
            piece: Buffer = message[begin : begin + _PIECE_BYTES]
            while piece and not inflater.eof:
                inflated += inflater.decompress(piece, _PIECE_BYTES)
                if len(inflated) > most:
                    text = f"the message is larger than {most} bytes"
                    return RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
                piece = inflater.unconsumed_tail
            if inflater.eof and (inflater.unused_data or begin + _PIECE_BYTES < len(message)):
                break
        else:
            inflated += inflater.flush()
            if inflater.eof and len(inflated) <= most:
                return inflated
    except zlib.error as error:
        return RefusedError(invalid, f"the message cannot be inflated: {error}")
    return RefusedError(invalid, "the message is not compressed as one piece")
