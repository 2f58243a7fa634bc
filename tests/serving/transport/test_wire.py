from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.serving.transport.inference import StageTimes
from gpuprof.serving.transport.server_timing import UNKNOWN_MS, ServerTimes, read_times, write_timing
from gpuprof.serving.transport.wire import BlockingStream, FrameBuffer, FrameKind, encode_frame
from tests.reruns import serves_in_real_time

pytestmark = serves_in_real_time

MESSAGES = st.lists(st.tuples(st.sampled_from(list(FrameKind)), st.lists(st.integers(0, 9)), st.binary(max_size=300)))


def receive_frames(buffer: FrameBuffer, data: bytes) -> list[tuple[int, object, bytes]]:
    """Put ``data`` into the buffer, as a socket does, and return the frames that come out."""
    frames = []
    while data:
        room = buffer.free_view()
        count = min(len(room), len(data))
        room[:count], data = data[:count], data[count:]
        frames += [(frame.kind, frame.head, bytes(frame.payload)) for frame in buffer.take(count)]
    return frames


@given(MESSAGES, st.integers(1, 50))
def test_frames_survive_any_way_of_cutting_the_stream(
    messages: list[tuple[FrameKind, list[int], bytes]], step: int
) -> None:
    stream = b"".join(b"".join(map(bytes, encode_frame(kind, head, [data]))) for kind, head, data in messages)
    buffer = FrameBuffer()
    frames = []
    for start in range(0, len(stream), step):
        frames += receive_frames(buffer, stream[start : start + step])
    assert frames == messages


def test_frames_that_outgrow_the_buffer_stand_among_small_ones() -> None:
    messages = [
        (FrameKind.RUN, [1], b"a"),
        (FrameKind.DONE, [2], b"b" * 400_000),
        (FrameKind.RUN, [3], b""),
        (FrameKind.PONG, [4], b"c"),
    ]
    stream = b"".join(b"".join(map(bytes, encode_frame(kind, head, [data]))) for kind, head, data in messages)
    assert receive_frames(FrameBuffer(), stream) == messages


def test_rubbish_is_no_frame() -> None:
    with pytest.raises(ValueError, match="no sense"):
        receive_frames(FrameBuffer(), b"HTTP/1.1 200 OK\r\n")


def test_a_frame_beyond_the_limit_is_refused_before_memory_is_taken_for_it() -> None:
    (large,) = encode_frame(FrameKind.HELLO, "x" * 300)
    with pytest.raises(ValueError, match="no sense"):
        receive_frames(FrameBuffer(limit=200), bytes(large[:20]))


def test_a_blocking_stream_takes_small_and_large_frames_and_sees_the_end() -> None:
    ours, theirs = socket.socketpair()
    payloads = [b"", b"x" * 10, b"y" * 3_000_000, b"z"]
    sender = BlockingStream(ours)

    def send() -> None:
        for number, payload in enumerate(payloads):
            sender.send(FrameKind.RUN, number, [payload])
        ours.close()

    thread = threading.Thread(target=send)
    thread.start()
    receiver = BlockingStream(theirs)
    for number, payload in enumerate(payloads):
        frame = receiver.receive()
        assert frame is not None
        assert frame.head == number
        assert frame.payload == payload
    assert receiver.receive() is None
    thread.join()
    theirs.close()


def test_what_is_written_is_what_is_read() -> None:
    line = write_timing(StageTimes(queue=1_500_000, infer=2_250_000), 0.0042)
    assert line == b"Server-Timing: queue;dur=1.500, infer;dur=2.250, total;dur=4.200\r\n"
    name, _, value = line.lower().partition(b":")
    assert name == b"server-timing" and read_times(value.strip()) == ServerTimes(1.5, 2.25, 4.2)


@pytest.mark.parametrize(
    ("value", "total_ms"),
    [
        (b'total;desc="all of it";dur="7.5"', 7.5),
        (b" db;dur=3 , total ; dur = 4", 4.0),
        (b"cache;desc=hit, db;dur=3", UNKNOWN_MS),
        (b"total", UNKNOWN_MS),
        (b"total;dur=soon", UNKNOWN_MS),
        (b"total;dur=nan", UNKNOWN_MS),
        (b"total;dur=-3", UNKNOWN_MS),
        (b"", UNKNOWN_MS),
    ],
)
def test_only_a_total_that_can_be_one_is_read_from_other_servers(value: bytes, total_ms: float) -> None:
    assert read_times(value) == ServerTimes(total_ms=total_ms)
