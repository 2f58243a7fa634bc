import re
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
def test_frames_survive_any_cuts_of_the_stream(messages: list[tuple[FrameKind, list[int], bytes]], step: int) -> None:
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


def count_sleeps(thread: int) -> int:
    """Return how often a thread of this process has gone to sleep, once that number no longer changes."""
    status = Path(f"/proc/self/task/{thread}/status")
    counts = [-1]
    while len(counts) < 2 or counts[-1] != counts[-2]:
        time.sleep(0.05)
        match = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.MULTILINE)
        assert match is not None
        counts.append(int(match[1]))
    return counts[-1]


def test_a_stream_that_waits_sleeps_on_while_its_earlier_frame_is_read() -> None:
    ours, theirs = socket.socketpair()
    stream = BlockingStream(theirs)
    thread = threading.Thread(target=stream.receive, daemon=True)
    thread.start()
    assert thread.native_id is not None
    stream.send(FrameKind.PONG, None)
    before = count_sleeps(thread.native_id)
    assert ours.recv(1 << 16)
    assert count_sleeps(thread.native_id) == before
    ours.close()
    thread.join(20.0)
    theirs.close()
