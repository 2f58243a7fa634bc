"""Whose turn it is on a connection, as the frames of both sides say."""

from __future__ import annotations

import random

import pytest

from gpuprof.serving.protocol.http2_frames import ClientFrames, FrameError, ServerFrames
from gpuprof.serving.protocol.open_calls import OpenCalls

DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, body: bytes = b"abcd") -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def head(stream: int, flags: int = 0) -> bytes:
    return frame(HEADERS, END_HEADERS | flags, stream)


class Connection:
    """Both sides of a connection, whose bytes come in pieces."""

    def __init__(self) -> None:
        self.client = ClientFrames()
        self.calls = self.client.calls
        self._server, self._carried = ServerFrames(self.calls), b""

    def ask(self, sent: bytes) -> None:
        buffer = memoryview(bytearray(self._carried + sent))
        _, self._carried = self.client.follow(buffer, len(buffer))

    def answer(self, sent: bytes) -> None:
        self._server.follow(memoryview(sent), len(sent))


@pytest.mark.parametrize("size", [*range(1, 14), 30, 100])
def test_a_call_is_the_servers_turn_from_its_last_byte_to_the_head_of_its_answer(size: int) -> None:
    one = Connection()
    asked = frame(SETTINGS, 0, 0, b"") + head(1) + frame(DATA, 0, 1) + frame(DATA, END_STREAM, 1, b"m" * 40)
    for begin in range(0, len(asked), size):
        assert not one.calls.is_computing
        one.ask(asked[begin : begin + size])
    assert one.calls.is_computing and len(one.calls) == 1
    told = frame(SETTINGS, 0, 0, b"s" * 12) + frame(PING, 1, 0, b"p" * 8)
    for begin in range(0, len(told), size):
        one.answer(told[begin : begin + size])
        assert one.calls.is_computing
    begun = head(1)
    for begin in range(0, len(begun), size):
        one.answer(begun[begin : begin + size])
    assert not one.calls.is_computing and len(one.calls) == 1
    rest = frame(DATA, 0, 1, b"x" * 50) + head(1, END_STREAM)
    for begin in range(0, len(rest), size):
        one.answer(rest[begin : begin + size])
    assert not one.calls


@pytest.mark.parametrize("last", [frame(RST_STREAM, 0, 3), head(3, END_STREAM)])
def test_a_call_that_is_refused_or_reset_is_over_for_both(last: bytes) -> None:
    one = Connection()
    one.ask(head(1) + head(3, END_STREAM))
    assert one.calls.is_computing
    one.answer(last)
    assert not one.calls.is_computing and len(one.calls) == 1
    one.ask(head(3, END_STREAM) + frame(DATA, END_STREAM, 3))  # what was on its way opens nothing
    assert not one.calls.is_computing and len(one.calls) == 1
    one.ask(frame(RST_STREAM, 0, 1))
    assert not one.calls


def test_who_ends_a_request_only_after_its_answer_began_has_the_turn() -> None:
    """Else one who opens no window for the answer would keep a connection busy for good."""
    one = Connection()
    one.ask(head(1) + frame(DATA, 0, 1))
    one.answer(head(1))
    one.ask(frame(DATA, END_STREAM, 1, b""))
    assert not one.calls.is_computing and len(one.calls) == 1


def test_a_head_in_several_frames_begins_its_call_when_it_is_whole() -> None:
    one = Connection()
    one.ask(frame(HEADERS, END_STREAM, 1, b"h" * 30) + frame(CONTINUATION, 0, 1))
    assert not one.calls
    one.ask(frame(CONTINUATION, END_HEADERS, 1)[:-1])
    assert not one.calls
    one.ask(b"d")
    assert one.calls.is_computing


def test_only_parts_of_calls_count_as_going_on() -> None:
    one = Connection()
    one.ask(frame(PING, 0, 0, bytes(8)) + frame(SETTINGS, 0, 0, b"") + frame(8, 0, 0))
    one.answer(frame(PING, 1, 0, bytes(8)) + frame(SETTINGS, 1, 0, b""))
    assert not one.calls.has_moved
    one.ask(head(1))
    assert one.calls.has_moved
    one.calls.has_moved = False
    one.answer(frame(DATA, 0, 1))
    assert one.calls.has_moved


def test_more_calls_than_any_server_takes_are_no_http_2() -> None:
    one = Connection()
    with pytest.raises(FrameError, match="more calls"):
        one.ask(b"".join(head(stream) for stream in range(1, 20_001, 2)))


def test_counts_stay_right_whatever_comes() -> None:
    rng, calls, states = random.Random(0), OpenCalls(), dict[int, str]()
    newest = -1
    for _ in range(20_000):
        stream = rng.randrange(1, 2 * len(states) + 30, 2)
        match rng.randrange(5):
            case 0:
                if len(states) < 100:
                    newest += 2
                    stream = newest
                    states[stream] = "request"
                    calls.begin(stream)
            case 1:
                calls.finish(stream)
                if states.get(stream) == "request":
                    states[stream] = "answer"
            case 2:
                calls.answer(stream, is_last=False)
                if stream in states:
                    states[stream] = "rest"
            case 3:
                calls.answer(stream, is_last=True)
                states.pop(stream, None)
            case _:
                calls.forget(newest)
                states.pop(newest, None)
        assert len(calls) == len(states) and calls.is_computing == ("answer" in states.values())


@pytest.mark.parametrize("size", [*range(1, 60, 7), 200])
@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_no_more_calls_begin_than_there_is_room_for_and_what_stands_behind_them_waits(size: int, room: int) -> None:
    client, carried = ClientFrames(), b""
    trailers = head(1, END_STREAM)
    sent = head(1) + frame(DATA, 0, 1) + trailers + head(3, END_STREAM) + frame(PING, 0, 0, b"p" * 8) + head(5)
    passed = b""
    for begin in range(0, len(sent), size):
        buffer = memoryview(bytearray(carried + sent[begin : begin + size]))
        count, carried = client.follow(buffer, len(buffer), room - client.calls.begun)
        passed += bytes(buffer[:count])
    assert client.calls.begun == min(room, 3) and client.lacks_room == (room < 3)
    assert passed + carried == sent
    rest = memoryview(bytearray(carried))
    assert client.follow(rest, len(rest), 3) == (len(rest), b"")
    assert client.calls.begun == 3 and not client.lacks_room
