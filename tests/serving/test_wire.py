from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.serving.wire import BlockingStream, FrameReader, Kind, encode

MESSAGES = st.lists(st.tuples(st.sampled_from(list(Kind)), st.lists(st.integers(0, 9)), st.binary(max_size=300)))


@given(MESSAGES, st.integers(1, 50))
def test_frames_survive_any_way_of_cutting_the_stream(messages: list[tuple[Kind, list[int], bytes]], step: int) -> None:
    stream = b"".join(b"".join(map(bytes, encode(kind, head, [data]))) for kind, head, data in messages)
    reader = FrameReader()
    got = []
    for start in range(0, len(stream), step):
        got += [(frame.kind, frame.head, bytes(frame.payload)) for frame in reader.feed(stream[start : start + step])]
    assert got == messages


def test_rubbish_is_no_frame() -> None:
    with pytest.raises(ValueError, match="no sense"):
        FrameReader().feed(b"HTTP/1.1 200 OK\r\n")


def test_a_blocking_stream_takes_small_and_large_frames_and_sees_the_end() -> None:
    ours, theirs = socket.socketpair()
    payloads = [b"", b"x" * 10, b"y" * 3_000_000, b"z"]
    sender = BlockingStream(ours)

    def send() -> None:
        for number, payload in enumerate(payloads):
            sender.send(Kind.RUN, number, [payload])
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
