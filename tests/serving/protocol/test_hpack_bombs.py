"""Which connections are shut out because memory grows far more than by what came."""

from __future__ import annotations

from gpuprof.serving.protocol.grpc_connection_bytes import Peer
from gpuprof.serving.protocol.hpack_bombs import HpackBombDetector

A, B, C = (("10.0.0.7", port) for port in (4001, 4002, 4003))
MB = 1 << 20


def excess_of(
    received: dict[Peer, int],
    grown: int,
    admitted: frozenset[Peer] = frozenset(),
    explained: dict[Peer, int] | None = None,
) -> set[Peer]:
    """Look before anything came and twice afterwards, as only who is suspected at two looks is shut out."""
    detector = HpackBombDetector()
    detector.note(dict.fromkeys(received, 0), {}, 0.01)
    assert not detector.find_excess(admitted, 0)
    detector.note(received, explained or {}, 0.01)
    assert not detector.find_excess(admitted, grown)
    detector.note(received, explained or {}, 0.01)
    return set(detector.find_excess(admitted, grown))


def test_who_was_not_admitted_and_sends_more_than_a_head_is_shut_out_where_memory_grows_far_more() -> None:
    received = {A: 1 << 19, B: 1000, C: 1 << 15}
    assert excess_of(received, 210 * MB) == {A, C}
    assert excess_of(received, MB) == {A}  # no head or first window is so large


def test_memory_that_was_there_before_or_grows_slowly_shuts_out_nobody() -> None:
    detector = HpackBombDetector()
    received = {A: 0}
    for look in range(1000):
        detector.note(received, {}, 0.1)
        assert not detector.find_excess(set(), look * MB // 10)
    received = {A: 1 << 16}
    detector.note(received, {}, 0.1)
    assert not detector.find_excess(set(), 101 * MB)


def test_large_messages_of_admitted_calls_lie_in_memory_as_they_came() -> None:
    received = {A: 60 * MB, B: 60 * MB, C: 1 << 15}
    assert not excess_of(received, 130 * MB, frozenset((A, B)))
    assert not excess_of(received, 10 * MB, frozenset((A, B)), {A: 60 * MB, B: 60 * MB})


def test_of_those_who_were_admitted_the_one_who_sent_the_most_is_shut_out_under_a_flood_of_heads() -> None:
    received = {A: 8 * MB, B: 6 * MB}
    assert excess_of(received, 600 * MB, frozenset((A, B))) == {A}
    assert not excess_of(received, 100 * MB, frozenset((A, B)))


def test_what_messages_explained_before_explains_nothing_later() -> None:
    detector = HpackBombDetector()
    detector.note({A: 1000}, {A: 64 * MB}, 0.01)
    for _ in range(2):
        detector.note({A: 1000 + MB}, {A: 64 * MB}, 0.01)
        excess = detector.find_excess(set(), 0)
    assert excess == [A]


def test_who_was_admitted_since_the_last_look_is_not_shut_out() -> None:
    detector = HpackBombDetector()
    for admitted in (set[Peer](), {A}):
        detector.note({A: 1 << 16, B: 1 << 16}, {}, 0.01)
        excess = detector.find_excess(admitted, 600 * MB)
    assert excess == [B]


def test_memory_of_requests_and_answers_shuts_out_nobody_nor_what_they_leave_for_a_while() -> None:
    detector = HpackBombDetector()
    for charged in (0, 100 * MB, 0, 0):
        detector.note({A: 1 << 16}, {}, 0.01)
        assert not detector.find_excess(set(), 4 * 100 * MB if charged else 300 * MB, charged)
    detector.note({A: 1 << 17}, {}, 4.0)
    assert not detector.find_excess(set(), 600 * MB, 0)
    detector.note({A: 1 << 17}, {}, 0.01)
    assert detector.find_excess(set(), 600 * MB, 0) == [A]


def test_memory_that_large_requests_needed_less_of_than_they_might_is_no_flood_afterwards() -> None:
    detector = HpackBombDetector()
    for charged, grown in ((200 * MB, 210 * MB), (0, 150 * MB), (0, 150 * MB)):
        detector.note({A: 1 << 19}, {A: 0 if charged else 1 << 18}, 3.5)
        assert not detector.find_excess({A}, grown, charged)
        assert not detector.is_flooded
