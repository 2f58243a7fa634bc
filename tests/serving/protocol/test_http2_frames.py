"""What a client sends over HTTP/2, looked at frame by frame."""

from __future__ import annotations

import random

import pytest

from gpuprof.serving.protocol.http2_frames import ACKNOWLEDGEMENT, PREFACE, ClientFrames, FrameError, find_preface_end

DATA, HEADERS, SETTINGS, PING, CONTINUATION = 0, 1, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int = 0, body: bytes = b"", stream: int = 1) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def pass_on(pieces: list[bytes]) -> tuple[bytes, int]:
    """Return what is passed on of a client's bytes that come in these pieces, and what they cost."""
    frames, passed, carried = ClientFrames(), b"", b""
    for piece in pieces:
        buffer = memoryview(bytearray(carried + piece))
        size, carried = frames.follow(buffer, len(buffer))
        passed += bytes(buffer[:size])
    return passed, frames.cost


def test_a_preface_is_whole_with_the_last_byte_of_its_settings_and_nothing_else_is_one() -> None:
    preface = PREFACE + frame(SETTINGS, 0, bytes(18), 0)
    assert [find_preface_end(preface[:size]) for size in range(len(preface))] == [0] * len(preface)
    assert find_preface_end(preface + b"more") == len(preface)
    wrong = [b"GET / HTTP/1.1\r\n", PREFACE + frame(PING, 0, bytes(8), 0), PREFACE + ACKNOWLEDGEMENT]
    for text in [*wrong, PREFACE + frame(SETTINGS, 0, bytes(6000), 0)]:
        with pytest.raises(FrameError):
            find_preface_end(text)


@pytest.mark.parametrize("size", [*range(1, 40), 100, 150])
def test_wherever_frames_are_cut_all_is_passed_on_but_the_first_acknowledgement(size: int) -> None:
    head = [frame(HEADERS, 0, b"a" * 30), frame(CONTINUATION, 0, b"b" * 7), frame(CONTINUATION, END_HEADERS, b"")]
    before = frame(HEADERS, END_HEADERS, b"h" * 50) + frame(DATA, 0, ACKNOWLEDGEMENT * 3)
    after = b"".join(head) + frame(DATA, END_STREAM, b"") + frame(PING, 0, bytes(8)) + ACKNOWLEDGEMENT
    sent = before + ACKNOWLEDGEMENT + after
    pieces = [sent[begin : begin + size] for begin in range(0, len(sent), size)]
    assert pass_on(pieces) == pass_on([sent]) == (before + after, 6)


def test_random_frames_are_passed_on_as_they_came() -> None:
    rng = random.Random(1)
    kinds = [DATA, HEADERS, SETTINGS, PING, 2, 3, 8, 200]
    sent = b"".join(
        frame(kind, END_HEADERS if kind == HEADERS else 0, rng.randbytes(rng.randrange(300)))
        for kind in rng.choices(kinds, k=500)
    )
    cuts = sorted(rng.sample(range(len(sent)), 300))
    pieces = [sent[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    assert pass_on(pieces)[0] == sent


def test_the_head_of_a_call_is_held_back_until_it_is_whole() -> None:
    before, head = frame(PING, 0, bytes(8)), frame(HEADERS, 0, b"a" * 100)
    end = frame(CONTINUATION, END_HEADERS, b"b" * 10)
    assert pass_on([before + head]) == (before, 1)
    assert pass_on([before + head, end[:-1]])[0] == before
    assert pass_on([before + head, end])[0] == before + head + end


@pytest.mark.parametrize(
    "rest",
    [
        [frame(CONTINUATION, 0, bytes(16_000))[:9]],  # by its length alone, before it has come
        [frame(CONTINUATION, 0, b"a")] * 20,
        [frame(CONTINUATION, 0, bytes(1500))] * 12,
        [frame(PING, 0, bytes(8), 0)],
    ],
)
def test_a_head_that_does_not_end_is_refused(rest: list[bytes]) -> None:
    with pytest.raises(FrameError):
        pass_on([frame(HEADERS, 0, bytes(1000)), *rest])


def test_control_frames_and_empty_data_cost_and_data_does_not() -> None:
    assert pass_on([frame(DATA, 0, bytes(16_000)) * 100])[1] == 0
    assert pass_on([frame(DATA, END_STREAM)])[1] == 0
    assert pass_on([frame(DATA) * 100])[1] == 100
    assert pass_on([frame(PING, 0, bytes(8), 0) * 100])[1] == 100
    assert pass_on([frame(SETTINGS, 0, bytes(1536), 0)])[1] == 7
