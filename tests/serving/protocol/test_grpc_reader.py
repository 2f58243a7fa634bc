"""Messages of gRPC on their way in: their time, their memory, and what compressed ones are inflated to."""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.serving.protocol import grpc_reader
from gpuprof.serving.protocol.grpc_reader import MessageReader
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import RefusedError

LIMIT = 1 << 20
COMPRESS: list[Callable[[bytes], bytes]] = [gzip.compress, zlib.compress]
MIB = 1 << 20


class Call:
    """Stands where grpcio's context of a call is: gives one message, or none ever."""

    def __init__(self, message: bytes | None = None) -> None:
        self._message = message

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4242"

    async def read(self) -> bytes:
        if self._message is None:
            await asyncio.Event().wait()
        assert self._message is not None
        return self._message


def run(test: Callable[[Arena, MessageReader], Coroutine[Any, Any, None]], capacity: int = 8 * MIB) -> None:
    async def main() -> None:
        arena = Arena(capacity)
        await test(arena, MessageReader(arena, LIMIT))
        assert arena.used == 0
        arena.close()

    asyncio.run(main())


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the process weighs: the last entry."""
    told = [100 * MIB]
    monkeypatch.setattr(grpc_reader, "private_bytes", lambda: told[-1])
    monkeypatch.setattr(grpc_reader, "return_free_memory", lambda: None)
    return told


@given(st.binary(min_size=0, max_size=4000), st.integers(1, 60), st.sampled_from(COMPRESS))
def test_a_compressed_message_is_what_it_was(part: bytes, times: int, compress: Callable[[bytes], bytes]) -> None:
    async def test(arena: Arena, reader: MessageReader) -> None:
        message = await reader.read_message(Call(compress(part * times)))
        assert message == part * times
        assert arena.used == len(message)
        reader.release(len(message))

    run(test)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (gzip.compress(bytes(LIMIT + 1)), "larger than"),
        (gzip.compress(bytes(100)) * 2, "not compressed as one piece"),
        (gzip.compress(bytes(100_000))[:-9], "not compressed as one piece"),
        (gzip.compress(b"abc") + bytes(1 << 18), "not compressed as one piece"),
        (b"\x1f\x8b" + bytes(50), "cannot be inflated"),
    ],
    ids=["too large", "two pieces", "cut off", "more behind", "no data"],
)
def test_what_cannot_be_inflated_within_the_limit_is_refused_and_leaves_nothing(message: bytes, said: str) -> None:
    async def test(arena: Arena, reader: MessageReader) -> None:
        with pytest.raises(RefusedError, match=said):
            await reader.read_message(Call(message))

    run(test)


def test_messages_count_from_when_they_are_whole_until_they_are_released() -> None:
    async def test(arena: Arena, reader: MessageReader) -> None:
        await reader.read_message(Call(bytes(5 * MIB)))
        assert arena.used == 5 * MIB
        with pytest.raises(RefusedError, match="no memory"):
            await reader.read_message(Call(bytes(5 * MIB)))
        reader.release(5 * MIB)

    run(test)


def test_what_many_unfinished_messages_have_in_memory_counts_and_too_much_of_it_ends_the_slowest(
    weights: list[int],
) -> None:
    async def test(arena: Arena, reader: MessageReader) -> None:
        calls = [asyncio.ensure_future(reader.read_message(Call())) for _ in range(10)]
        await asyncio.sleep(0)
        weights.append(weights[0] + 5 * MIB)
        reader.weigh()
        assert arena.used == 5 * MIB
        assert arena.take(4 * MIB) is None  # nobody else has it
        weights.append(weights[0] + 9 * MIB)
        reader.weigh()  # has what is free returned first
        await asyncio.sleep(0.05)
        assert not any(call.done() for call in calls)
        reader.weigh()
        await asyncio.sleep(0.05)
        assert [call.done() for call in calls] == [True] * 5 + [False] * 5
        with pytest.raises(RefusedError, match="no memory"):
            calls[0].result()
        weights.append(weights[0])
        reader.weigh()
        for call in calls[5:]:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    run(test)


def test_as_many_messages_as_there_is_memory_for_are_not_weighed(weights: list[int]) -> None:
    async def test(arena: Arena, reader: MessageReader) -> None:
        calls = [asyncio.ensure_future(reader.read_message(Call())) for _ in range(8)]
        await asyncio.sleep(0)
        weights.append(weights[0] + 50 * MIB)
        reader.weigh()
        assert arena.used == 0
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    run(test)


def test_a_message_that_does_not_come_in_time_is_refused() -> None:
    async def test(arena: Arena, reader: MessageReader) -> None:
        limited, patient = (
            asyncio.ensure_future(reader.read_message(Call(), 5.0)),
            asyncio.ensure_future(reader.read_message(Call())),
        )
        await asyncio.sleep(0)
        reader.watch(time.monotonic() + 4.0)
        await asyncio.sleep(0)
        assert not limited.done()
        reader.watch(time.monotonic() + 6.0)
        with pytest.raises(RefusedError, match="not arrived within 5 s"):
            await limited
        assert not patient.done()
        patient.cancel()

    run(test)
