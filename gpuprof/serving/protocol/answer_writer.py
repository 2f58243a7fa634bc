"""Writes the answers of one connection, and frees the memory in which they lie once it is sent."""

from __future__ import annotations

import asyncio

from gpuprof.serving.transport.arena import Arena, Slot
from gpuprof.serving.transport.wire import Buffer

#: Beyond so many unsent bytes no further request of the connection is read.
_MAX_UNSENT_BYTES = 1 << 16
#: An answer of up to so many bytes is written in one piece: copying it costs less than another buffer.
_MAX_JOINED_BYTES = 1 << 12


class AnswerWriter:
    """Writes answers to a transport.

    Attributes
    ----------
    unsent_bytes : int
        What the kernel has not taken of the last answer when it was written.
    is_blocked : bool
        Whether so much is unsent that no further request is to be read.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._unsent_slots: list[Slot] = []
        self._transport: asyncio.Transport | None = None
        self.unsent_bytes = 0
        self.is_blocked = False

    def open(self, transport: asyncio.Transport) -> None:
        """Write to this transport, whose buffer reports when its last byte is sent: then memory is free again."""
        transport.set_write_buffer_limits(high=0)
        self._transport = transport

    def write(self, head: bytes, body: Buffer, tail: list[Buffer], slot: Slot | None) -> None:
        """Write an answer to the open transport; ``slot``, in which ``tail`` lies, is given back when it is sent."""
        transport = self._transport
        assert transport is not None
        if slot is not None:
            self._unsent_slots.append(slot)
        if not tail:
            transport.write(head + body)
        elif len(body) + sum(map(len, tail)) > _MAX_JOINED_BYTES:
            transport.writelines([head + body, *tail])
        else:
            transport.write(b"".join((head, body, *tail)))
        self.unsent_bytes = transport.get_write_buffer_size()
        if self._unsent_slots and not self.unsent_bytes:
            self.release()
        self.is_blocked = self.unsent_bytes > _MAX_UNSENT_BYTES

    def finish(self) -> None:
        """Free the memory of answers: everything is sent."""
        self.release()
        self.unsent_bytes = 0
        self.is_blocked = False

    def release(self) -> None:
        """Give back the memory of unsent answers."""
        for slot in self._unsent_slots:
            self._arena.give_back(slot)
        self._unsent_slots = []

    @property
    def is_idle(self) -> bool:
        """Whether no answer is being sent."""
        return not self._unsent_slots and not self.is_blocked
