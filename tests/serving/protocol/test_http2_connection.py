"""Connections that are fed frames by hand, however they are cut: what calls receive, send and give back."""

from __future__ import annotations

import asyncio
import gzip
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.serving.protocol.grpc_call import GrpcCall, GrpcMethod, GrpcStatus, Message
from gpuprof.serving.protocol.http2_connection import SCRATCH_BYTES, Http2Connection
from gpuprof.serving.protocol.http2_frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    PADDED,
    PREFACE,
    PRIORITY,
    FrameKind,
    Problem,
    Setting,
    frame,
    number_frame,
    read_frame_head,
    settings_frame,
)
from gpuprof.serving.protocol.http2_stream import Http2Stream, Receiver
from gpuprof.serving.transport.arena import ALIGNMENT, Arena
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.wire import Buffer

LIMIT = 1 << 18
LARGE = INLINE_BYTES + 1000


class Wire(asyncio.Transport):
    """Keeps what a connection writes, as if the client read it at once unless it is told to stand still."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = self.paused = False
        self.unsent = 0

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.written += b"".join(map(bytes, list_of_data))

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class EchoSite:
    """Answers each message with itself, at once or when told."""

    def __init__(self, *, streams: bool = False, later: bool = False) -> None:
        self.arena = Arena(1 << 24)
        self.scratch = bytearray(SCRATCH_BYTES)
        self.connections: set[Http2Connection] = set()
        self.later = later
        self.received: list[tuple[GrpcCall, Message]] = []
        self.messages: list[bytes] = []
        self.foreseen: list[bytes] = []
        self._method = GrpcMethod(self._take, LIMIT, streams, lambda beginning: 7, self._foresee)

    def open(self, stream: Http2Stream, headers: dict[bytes, bytes]) -> Receiver:
        return GrpcCall(stream, headers, self._method, self.arena)

    def _foresee(self, call: GrpcCall, beginning: Buffer) -> None:
        self.foreseen.append(bytes(beginning))
        if bytes(beginning[:4]) == b"away":
            call.fail(GrpcStatus.RESOURCE_EXHAUSTED, "too much to do")

    def _take(self, call: GrpcCall, message: Message) -> None:
        self.received.append((call, message))
        self.messages.append(bytes(message.data))
        if not self.later:
            call.answer([message.data], message.slot)


class Client:
    """Speaks to a connection, and reads what it writes."""

    def __init__(self, site: EchoSite, *settings_of: tuple[Setting, int]) -> None:
        self.wire = Wire()
        self.connection = Http2Connection(site)
        self.connection.connection_made(self.wire)
        self._encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._read = 0
        self.say(PREFACE + settings_frame(dict(settings_of)))

    def say(self, data: bytes, cuts: Iterable[int] = ()) -> None:
        """Send bytes, in pieces that end at ``cuts``."""
        begin = 0
        for end in [*sorted({cut for cut in cuts if cut < len(data)}), len(data)]:
            piece = data[begin:end]
            while piece:
                room = self.connection.get_buffer(-1)
                count = min(len(room), len(piece))
                room[:count] = piece[:count]
                self.connection.buffer_updated(count)
                piece = piece[count:]
            begin = end

    def headers(self, number: int, *more: tuple[str, str], flags: int = END_HEADERS, padding: int = 0) -> bytes:
        block = self._encoder.encode([(":method", "POST"), (":path", "/a/b"), *more])
        if padding:
            return frame(FrameKind.HEADERS, flags | PADDED, number, bytes((padding,)) + block + bytes(padding))
        return frame(FrameKind.HEADERS, flags, number, block)

    def request(self, number: int, message: bytes, sizes: Iterable[int] = (), padding: int = 0) -> bytes:
        """Return a whole call, its message in DATA frames of these sizes."""
        text = prefixed(message)
        frames = [self.headers(number, padding=padding)]
        for size in sizes:
            if size < len(text):
                frames.append(data_frame(number, text[:size], 0, padding))
                text = text[size:]
        return b"".join([*frames, data_frame(number, text, END_STREAM, padding)])

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Return the frames that came since the last time: kind, flags, stream, payload."""
        while self._read < len(self.wire.written):
            size, kind, flags, number = read_frame_head(self.wire.written, self._read)
            begin = self._read + 9
            self._read = begin + size
            yield kind, flags, number, self.wire.written[begin : self._read]

    def answers(self) -> dict[int, tuple[bytes, dict[str, str]]]:
        """Return data and headers of each stream that something came for."""
        data: dict[int, bytes] = defaultdict(bytes)
        said: dict[int, dict[str, str]] = defaultdict(dict)
        for kind, _, number, payload in self.frames():
            if kind == FrameKind.DATA:
                data[number] += payload
            elif kind == FrameKind.HEADERS:
                said[number] |= {str(name): str(value) for name, value in self._decoder.decode(payload)}
        return {number: (data[number], said[number]) for number in {*data, *said}}


def prefixed(message: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


def data_frame(number: int, payload: bytes, flags: int = 0, padding: int = 0) -> bytes:
    if padding:
        return frame(FrameKind.DATA, flags | PADDED, number, bytes((padding,)) + payload + bytes(padding))
    return frame(FrameKind.DATA, flags, number, payload)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 300, INLINE_BYTES, LARGE, 150_000]), min_size=1, max_size=4),
    st.lists(st.integers(1, 200_000), max_size=20),
    st.lists(st.integers(1, 70_000), max_size=5),
    st.integers(0, 20),
)
def test_messages_come_back_whole_however_they_are_cut(
    sizes: list[int], cuts: list[int], frames: list[int], padding: int
) -> None:
    site = EchoSite()
    client = Client(site, (Setting.INITIAL_WINDOW_SIZE, 1 << 30))
    client.say(number_frame(FrameKind.WINDOW_UPDATE, 0, 1 << 30))
    sent = [bytes((number,)) * size for number, size in enumerate(sizes)]
    requests = [client.request(2 * number + 1, message, frames, padding) for number, message in enumerate(sent)]
    client.say(b"".join(requests), cuts)
    answers = client.answers()
    assert site.messages == sent
    assert [answers[2 * number + 1][0] for number in range(len(sent))] == [prefixed(message) for message in sent]
    assert all(said["grpc-status"] == "0" for _, said in answers.values())
    assert site.arena.used == 0 and client.connection.is_idle


def test_the_byte_that_is_asked_for_is_aligned() -> None:
    site = EchoSite(later=True)
    client = Client(site)
    client.say(client.request(1, b"x" * LARGE))
    assert (site.received[0][1].offset + 7) % ALIGNMENT == 0
    assert bytes(site.arena.view(site.received[0][1].offset, LARGE)) == b"x" * LARGE


def test_answers_keep_to_the_windows_and_frames_of_the_client() -> None:
    site = EchoSite()
    client = Client(site, (Setting.INITIAL_WINDOW_SIZE, 20_000), (Setting.MAX_FRAME_SIZE, 17_000))
    sent = bytes(range(256)) * 200  # 51,200 bytes
    client.say(client.request(1, sent))
    got = [payload for kind, _, _, payload in client.frames() if kind == FrameKind.DATA]
    assert [len(payload) for payload in got] == [17_000, 3_000]
    assert site.arena.used > 0 and client.connection.is_stuck
    client.say(number_frame(FrameKind.WINDOW_UPDATE, 1, 40_000))
    got += [payload for kind, _, _, payload in client.frames() if kind == FrameKind.DATA]
    assert b"".join(got) == prefixed(sent)
    assert site.arena.used == 0 and client.connection.is_idle
    client.say(client.request(3, sent))  # what the connection as a whole may send is used up: 65,535 in all
    assert sum(len(payload) for kind, _, _, payload in client.frames() if kind == FrameKind.DATA) == 65_535 - 51_205
    client.say(settings_frame({Setting.INITIAL_WINDOW_SIZE: 100_000}))
    assert not [payload for kind, _, _, payload in client.frames() if kind == FrameKind.DATA]
    client.say(number_frame(FrameKind.WINDOW_UPDATE, 0, 100_000))
    assert client.answers()[3][1]["grpc-status"] == "0"
    assert site.arena.used == 0


def test_memory_of_an_answer_is_kept_until_it_is_sent() -> None:
    site = EchoSite()
    client = Client(site)
    client.wire.unsent = 1
    client.say(client.request(1, b"x" * LARGE))
    assert client.answers()[1][1]["grpc-status"] == "0" and site.arena.used > 0
    client.wire.unsent = 0
    client.connection.resume_writing()
    assert site.arena.used == 0


def test_a_client_that_does_not_read_is_not_read() -> None:
    client = Client(EchoSite())
    client.wire.unsent = 1 << 24
    client.say(frame(FrameKind.PING, 0, 0, b"12345678"))
    assert client.wire.paused
    client.wire.unsent = 0
    client.connection.resume_writing()
    assert not client.wire.paused
    assert (FrameKind.PING, ACK, 0, b"12345678") in list(client.frames())


@pytest.mark.parametrize("how", ["lost", "reset", "broken"])
def test_memory_of_a_call_that_is_broken_off_is_given_back(how: str) -> None:
    site = EchoSite(later=True)
    client = Client(site)
    client.say(client.request(1, b"x" * LARGE)[:-500])
    assert site.arena.used > 0 and client.connection.is_stuck
    if how == "lost":
        client.connection.connection_lost(None)
    elif how == "reset":
        client.say(b"x" * 500 + number_frame(FrameKind.RST_STREAM, 1, Problem.NO_ERROR))
        call, message = site.received[0]
        call.answer([message.data], message.slot)
    else:
        client.say(b"x" * 500 + number_frame(FrameKind.WINDOW_UPDATE, 0, (1 << 31) - 1))
        assert client.wire.closed
        call, message = site.received[0]
        call.answer([message.data], message.slot)
        client.connection.connection_lost(None)
    assert site.arena.used == 0


def test_a_call_that_is_refused_by_its_beginning_is_not_received() -> None:
    site = EchoSite()
    client = Client(site)
    whole = client.request(1, b"away" + bytes(LARGE), sizes=(500, 8000))
    cut = len(whole) - LARGE // 2
    client.say(whole[:cut])
    assert client.answers()[1][1]["grpc-status"] == str(int(GrpcStatus.RESOURCE_EXHAUSTED))
    assert number_frame(FrameKind.RST_STREAM, 1, Problem.NO_ERROR) in client.wire.written
    assert site.arena.used == 0 and site.received == [] and len(site.foreseen[0]) < 500
    client.say(whole[cut:])  # it was on its way
    client.say(client.request(3, b"stay" + bytes(LARGE)) + client.request(5, b"away"))
    answers = client.answers()
    assert answers[3][0] == prefixed(b"stay" + bytes(LARGE))
    assert answers[5][0] == prefixed(b"away") and len(site.foreseen) == 2  # small ones come whole in any case


def test_nothing_is_foreseen_of_a_compressed_message() -> None:
    site = EchoSite()
    client = Client(site)
    text = prefixed(gzip.compress(bytes(random.Random(0).randbytes(LARGE)), 1), 1)
    client.say(client.headers(1, ("grpc-encoding", "gzip")) + data_frame(1, text, END_STREAM))
    assert len(site.messages[0]) == LARGE and site.foreseen == []


def test_headers_may_be_continued_padded_and_have_a_priority() -> None:
    site = EchoSite()
    client = Client(site)
    block = hpack.Encoder().encode([(":path", "/a/b"), ("x", "y" * 40)])
    first = frame(FrameKind.HEADERS, PADDED | PRIORITY, 1, b"\x03" + bytes(5) + block[:10] + bytes(3))
    client.say(first + frame(FrameKind.CONTINUATION, END_HEADERS, 1, block[10:]))
    client.say(data_frame(1, prefixed(b"hello"), END_STREAM))
    assert site.received[0][0].headers[b"x"] == b"y" * 40
    client.say(frame(FrameKind.HEADERS, 0, 3, block) + frame(FrameKind.PING, 0, 0, bytes(8)))
    assert client.wire.closed


def test_a_compressed_message_is_unpacked_and_one_that_grows_too_large_is_not() -> None:
    site = EchoSite()
    client = Client(site)
    for number, message in ((1, b"a" * 70_000), (3, b"a" * (LIMIT + 1))):
        text = prefixed(gzip.compress(message), 1)
        client.say(client.headers(number, ("grpc-encoding", "gzip")) + data_frame(number, text, END_STREAM))
    client.say(client.headers(5) + data_frame(5, prefixed(b"x", 1), END_STREAM))
    said = {number: int(headers.get("grpc-status", -1)) for number, (_, headers) in client.answers().items()}
    assert site.messages == [b"a" * 70_000]
    assert (said[3], said[5]) == (GrpcStatus.RESOURCE_EXHAUSTED, GrpcStatus.UNIMPLEMENTED)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"", GrpcStatus.INVALID_ARGUMENT),
        (prefixed(b"abc")[:-1], GrpcStatus.INTERNAL),
        (prefixed(b"abc") * 2, GrpcStatus.INVALID_ARGUMENT),
        (b"\0" + (LIMIT + 1).to_bytes(4, "big"), GrpcStatus.RESOURCE_EXHAUSTED),
    ],
)
def test_a_call_without_exactly_one_message_has_its_status(text: bytes, status: GrpcStatus) -> None:
    site = EchoSite()
    client = Client(site)
    client.say(client.headers(1) + data_frame(1, text, END_STREAM) + client.request(3, b"after"))
    answers = client.answers()
    assert int(answers[1][1]["grpc-status"]) == status
    assert answers[3][0] == prefixed(b"after")


def test_a_stream_answers_each_message_and_ends_when_all_are_answered() -> None:
    site = EchoSite(streams=True)
    client = Client(site)
    client.say(client.headers(1) + data_frame(1, prefixed(b"a") + prefixed(b"bb")[:3]))
    assert client.answers()[1][0] == prefixed(b"a")
    client.say(data_frame(1, prefixed(b"bb")[3:], END_STREAM))
    data, said = client.answers()[1]
    assert (data, said["grpc-status"]) == (prefixed(b"bb"), "0")


def test_a_stream_whose_answers_are_not_taken_is_broken_off() -> None:
    site = EchoSite(streams=True)
    client = Client(site, (Setting.INITIAL_WINDOW_SIZE, 0))
    client.say(client.headers(1) + data_frame(1, prefixed(b"a") * 2000))
    assert (FrameKind.RST_STREAM, 0, 1, Problem.ENHANCE_YOUR_CALM.to_bytes(4, "big")) in list(client.frames())
    client.say(client.headers(3))
    assert not client.wire.closed


def test_who_leaves_answers_what_was_asked_and_nothing_more() -> None:
    site = EchoSite(later=True)
    client = Client(site)
    client.say(client.request(1, b"before"))
    client.connection.leave()
    client.say(client.request(3, b"after"))
    assert (FrameKind.GOAWAY, 0, 0, (1).to_bytes(4, "big") + bytes(4)) in list(client.frames())
    assert site.messages == [b"before"] and not client.connection.is_idle
    call, message = site.received[0]
    call.answer([message.data], message.slot)
    assert client.answers()[1][1]["grpc-status"] == "0" and client.connection.is_idle


@pytest.mark.parametrize(
    "text",
    [
        frame(FrameKind.PUSH_PROMISE, 0, 1, bytes(4)),
        frame(FrameKind.CONTINUATION, END_HEADERS, 1),
        frame(FrameKind.SETTINGS, 0, 0, b"abc"),
        settings_frame({Setting.MAX_FRAME_SIZE: 5}),
        data_frame(7, b"x"),
        frame(FrameKind.HEADERS, END_HEADERS, 2, b"\x82"),
        frame(FrameKind.HEADERS, END_HEADERS | PADDED, 1, b"\xff"),
        frame(FrameKind.HEADERS, END_HEADERS, 1, b"\x00"),
        frame(FrameKind.PING, 0, 0, bytes(1 << 17)),
        b"".join(frame(FrameKind.HEADERS if not n else FrameKind.CONTINUATION, 0, 1, bytes(60_000)) for n in range(3)),
    ],
)
def test_what_breaks_the_rules_ends_the_connection_with_a_word(text: bytes) -> None:
    client = Client(EchoSite())
    client.say(text)
    assert client.wire.closed
    assert FrameKind.GOAWAY in [kind for kind, *_ in client.frames()]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_frames_never_raise_and_never_keep_memory(data: st.DataObject) -> None:
    site = EchoSite(streams=data.draw(st.booleans()))
    client = Client(site, (Setting.INITIAL_WINDOW_SIZE, data.draw(st.sampled_from([0, 10, 1 << 20]))))
    payloads = st.binary(max_size=40) | st.just(prefixed(b"x" * 300)) | st.just(b"\0\0\1\0\0" + bytes(50_000))
    for _ in range(data.draw(st.integers(1, 8))):
        kind, flags = data.draw(st.integers(0, 10)), data.draw(st.integers(0, 255))
        number = data.draw(st.sampled_from([0, 1, 1, 3, 5, 2]))
        text = frame(kind, flags, number, data.draw(payloads))  # type: ignore[arg-type]
        client.say(client.headers(number) + text if data.draw(st.booleans()) and number % 2 else text)
        if client.wire.closed:
            break
    client.connection.connection_lost(None)
    assert site.arena.used == 0
