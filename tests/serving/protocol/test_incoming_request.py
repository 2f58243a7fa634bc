"""Bodies that come in pieces: where they go, and which are refused before they are there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.serving.protocol.http_message import read_head
from gpuprof.serving.protocol.http_route import Route
from gpuprof.serving.protocol.incoming_request import MAX_REFUSED_BYTES, IncomingRequest
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.wire import Buffer

JSON = b'{"inputs": []}'
LARGE = INLINE_BYTES + 1000


def incoming(length: int, refuse_early: Callable[[Buffer, str, float], None] | None = None) -> IncomingRequest:
    text = (
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n"
        b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n"
    ) % (len(JSON), length)
    begun = IncomingRequest.begin(read_head(text), 0.0)
    begun.set_route(Route(lambda client, head, body: None, 1 << 30, reads_body=True, refuse_early=refuse_early))
    return begun


def too_much(text: Buffer, client: str, waited_ms: float) -> None:
    raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "too much to do", overloaded=True)


def take(begun: IncomingRequest, data: bytes, cuts: list[int], arena: Arena) -> list[bool]:
    """Hand over the pieces that ``cuts`` make of ``data``; after each, whether the body is whole."""
    ends = [*sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
    found = []
    for begin, end in zip([0, *ends], ends, strict=False):
        piece = bytearray(data[begin:end])
        used, whole = begun.parse(piece, 0, len(piece), arena)
        assert used == len(piece)
        found.append(whole)
    return found


@given(st.lists(st.integers(1, LARGE), max_size=4))
def test_however_a_large_body_is_cut_it_lies_whole_in_the_arena(cuts: list[int]) -> None:
    data = JSON + bytes(number % 251 for number in range(LARGE - len(JSON)))
    seen: list[bytes] = []
    arena, begun = Arena(1 << 20), incoming(LARGE, lambda text, *_: seen.append(bytes(text)))
    assert take(begun, data, cuts, arena)[-1]
    received = begun.take_body()
    assert received.body.offset is not None and received.slot is not None
    assert bytes(arena.view(received.body.offset, LARGE)) == bytes(received.body.data) == data
    assert (received.body.offset + len(JSON)) % 64 == 0
    assert seen == ([] if any(cut < len(JSON) for cut in cuts) else [JSON])  # of a part of it nothing is known


@pytest.mark.parametrize("reason", ["foreseen", "no memory"])
def test_what_is_refused_by_its_beginning_is_received_nowhere_and_the_connection_goes_on(reason: str) -> None:
    arena = Arena(1 << 20)
    held = arena.take(1 << 20) if reason == "no memory" else None
    before = arena.used
    begun = incoming(LARGE, too_much if held is None else None)
    assert take(begun, JSON + bytes(LARGE - len(JSON)), [100, 5000], arena) == [False, False, True]
    assert begun.refusal is not None and begun.refusal.status == 503 and begun.view is None
    assert arena.used == before


def test_a_refused_body_that_would_take_long_is_not_waited_for() -> None:
    begun = incoming(MAX_REFUSED_BYTES + 1, too_much)
    with pytest.raises(RefusedError, match="too much to do"):
        take(begun, JSON + bytes(100), [], Arena(1 << 20))


def test_a_body_that_cannot_be_refused_because_its_json_is_not_there_lets_none_before_it() -> None:
    begun, arena = incoming(LARGE, too_much), Arena(1 << 20)
    begun.route = replace(begun.route, lifo_after_s=0.1)
    take(begun, JSON[:-1], [], arena)
    assert begun.lifo_after_s == math.inf and begun.admit_after_wait(1e6, arena)
    take(begun, JSON[-1:], [], arena)
    assert begun.lifo_after_s == 0.1 and not begun.admit_after_wait(1e6, arena)
    assert not arena.used


def test_of_a_small_body_nothing_is_foreseen() -> None:
    begun, arena = incoming(INLINE_BYTES, too_much), Arena(1 << 20)
    assert take(begun, JSON + bytes(INLINE_BYTES - len(JSON)), [], arena) == [True]
    assert begun.refusal is None and arena.used == 0
    assert begun.take_body().slot is None


def begin_post(*lines: bytes) -> IncomingRequest:
    head = b"POST / HTTP/1.1\r\nHost: x\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
    return IncomingRequest.begin(read_head(head), 0.0)


@pytest.mark.parametrize("framing", [b"Content-Length: 800000", b"Transfer-Encoding: chunked"])
def test_of_a_body_that_nobody_reads_nothing_is_kept_and_none_of_the_memory_for_tensors_taken(framing: bytes) -> None:
    begun, arena = begin_post(framing), Arena(1 << 16)
    begun.set_route(Route(lambda client, head, body: None))
    body = bytes(800_000)
    data = body if b"Length" in framing else b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    assert take(begun, data, [1000, 400_000], arena) == [False, False, True]
    assert begun.refusal is None and not arena.used
    assert not begun.take_body().body.data


@pytest.mark.parametrize(
    "endless", [b"4;" + b"a" * 5_000_000, b"4\r\naaaa\r\n0\r\n" + b"a: b\r\n" * 800_000], ids=["extension", "trailers"]
)
@pytest.mark.parametrize("reads_body", [True, False])
def test_what_stands_around_chunks_takes_no_memory_for_tensors_and_has_an_end(endless: bytes, reads_body: bool) -> None:
    begun, arena, taken = begin_post(b"Transfer-Encoding: chunked"), Arena(1 << 16), 0
    begun.set_route(Route(lambda client, head, body: None, 1 << 30, reads_body=reads_body))
    with pytest.raises(RefusedError, match="too much around them") as refused:
        while taken < len(endless):
            piece = bytearray(endless[taken : taken + 8192])
            begun.parse(piece, 0, len(piece), arena)
            taken += len(piece)
            assert arena.used <= 4
    assert refused.value.status == 400 and taken < 200_000


def test_chunks_of_a_byte_have_no_more_around_them_than_they_may() -> None:
    begun, arena = begin_post(b"Transfer-Encoding: chunked"), Arena(1 << 20)
    begun.set_route(Route(lambda client, head, body: None, 1 << 30, reads_body=True))
    assert take(begun, b"0001\r\na\r\n" * 30_000 + b"0\r\n\r\n", list(range(0, 270_000, 8192)), arena)[-1]
    assert begun.take_body().body.data == b"a" * 30_000


def test_a_length_of_more_digits_than_any_body_has_is_refused_with_how_many_it_may_have() -> None:
    with pytest.raises(RefusedError, match="Content-Length must be a number of at most 18 digits"):
        read_head(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 19 + b"\r\n\r\n")
