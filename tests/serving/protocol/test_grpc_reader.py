"""Messages of gRPC on their way in: their time, their memory, and what compressed ones are inflated to."""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
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
        self._aborted = asyncio.Event()
        self.was_read_cancelled = False

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4242"

    async def read(self) -> bytes:
        if self._message is None:
            try:
                await self._aborted.wait()
            except asyncio.CancelledError:
                self.was_read_cancelled = True
                raise
            raise grpc.aio.AbortError
        return self._message

    async def abort(self, code: grpc.StatusCode, details: str, trailers: object) -> None:
        self._aborted.set()
        raise grpc.aio.AbortError


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
        reader.release(5 * MIB)

    run(test)


def test_a_message_that_finds_no_memory_waits_for_some_and_is_refused_when_there_is_none_for_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(arena: Arena, reader: MessageReader) -> None:
        await reader.read_message(Call(bytes(5 * MIB)))
        waiting = asyncio.ensure_future(reader.read_message(Call(bytes(5 * MIB))))
        for _ in range(3):
            reader.weigh()
            await asyncio.sleep(0.01)
        assert not waiting.done()
        reader.release(5 * MIB)
        reader.weigh()
        assert len(await waiting or b"") == arena.used == 5 * MIB
        monkeypatch.setattr(grpc_reader, "_ROOM_S", -1.0)
        with pytest.raises(RefusedError, match="no memory"):
            await reader.read_message(Call(bytes(5 * MIB)))
        reader.release(5 * MIB)

    run(test)


def test_what_had_come_of_a_message_counts_no_longer_beside_the_whole_message_nor_do_answers(
    weights: list[int],
) -> None:
    async def test(arena: Arena, reader: MessageReader) -> None:
        calls = [asyncio.ensure_future(reader.read_message(Call())) for _ in range(10)]
        await asyncio.sleep(0)
        assert arena.charge(MIB)  # an answer
        weights.append(weights[0] + 7 * MIB)
        reader.weigh()
        assert arena.used == 7 * MIB
        await reader.read_message(Call(bytes(5 * MIB)))
        assert arena.used == 7 * MIB
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        reader.release(5 * MIB)
        arena.discharge(MIB)
        weights.append(weights[0])
        reader.weigh()

    run(test)


def test_messages_that_wait_for_memory_end_where_there_is_too_much_in_it(
    weights: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(arena: Arena, reader: MessageReader) -> None:
        monkeypatch.setattr(grpc_reader, "_ROOM_S", 1e9)
        slot = arena.take(8 * MIB - 4096)
        assert slot is not None
        waiting = [asyncio.ensure_future(reader.read_message(Call(bytes(MIB)))) for _ in range(4)]
        await asyncio.sleep(0)
        weights.append(weights[0] + 4 * MIB)
        while not all(call.done() for call in waiting):
            reader.weigh()
            await asyncio.sleep(0.01)
        assert all(isinstance(call.exception(), RefusedError) for call in waiting)
        arena.give_back(slot)
        weights.append(weights[0])
        reader.weigh()

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


def test_a_message_that_does_not_come_in_time_is_refused_without_cancelling_the_read_to_which_it_would_be_lost() -> (
    None
):
    async def test(arena: Arena, reader: MessageReader) -> None:
        late = Call()
        limited, patient = (
            asyncio.ensure_future(reader.read_message(late, 5.0)),
            asyncio.ensure_future(reader.read_message(Call())),
        )
        await asyncio.sleep(0)
        reader.watch(time.monotonic() + 4.0)
        await asyncio.sleep(0)
        assert not limited.done()
        reader.watch(time.monotonic() + 6.0)
        with pytest.raises(RefusedError, match="not arrived within 5 s"):
            await limited
        assert not late.was_read_cancelled and not patient.done()
        patient.cancel()

    run(test)


def test_what_asks_for_the_health_of_a_full_server_is_read_while_messages_with_tensors_end(
    weights: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(arena: Arena, reader: MessageReader) -> None:
        monkeypatch.setattr(grpc_reader, "_SHORT_S", 1e9)
        asking = asyncio.ensure_future(reader.read_message(Call(), is_short=True))
        await asyncio.sleep(0)
        calls = [asyncio.ensure_future(reader.read_message(Call())) for _ in range(8)]
        await asyncio.sleep(0)
        weights.append(weights[0] + 10 * MIB)
        for _ in range(5):
            reader.weigh()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert await reader.read_message(Call(b"ok"), is_short=True) == b"ok"
        done = [isinstance(call.exception(), RefusedError) for call in calls if call.done()]
        assert done and all(done)
        assert not asking.done()
        for call in (asking, *calls):
            call.cancel()
        await asyncio.gather(asking, *calls, return_exceptions=True)
        reader.release(2)
        weights.append(weights[0])
        reader.weigh()

    run(test)
