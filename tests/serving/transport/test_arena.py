from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuprof.serving.transport.arena import Arena, Slot, map_arena


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300_000)), max_size=60))
def test_slots_that_are_out_at_the_same_time_never_overlap(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(1 << 21)
    out: list[Slot] = []
    for give_back, size in steps:
        if give_back and out:
            arena.give_back(out.pop(size % len(out)))
        elif (slot := arena.take(size)) is not None:
            assert slot.size >= size and slot.offset + slot.size <= arena.capacity
            assert all(
                slot.offset >= other.offset + other.size or other.offset >= slot.offset + slot.size for other in out
            )
            out.append(slot)
    assert arena.used == sum(slot.size for slot in out)
    arena.close()


def test_a_full_arena_says_so_and_serves_again_what_was_given_back() -> None:
    arena = Arena(1 << 14)
    first = arena.take(1 << 13)
    second = arena.take(1 << 13)
    assert first is not None and second is not None and arena.take(1) is None
    arena.give_back(first)
    assert arena.take(100) == first
    arena.close()


def test_what_one_side_writes_the_other_reads() -> None:
    arena = Arena(1 << 14)
    slot = arena.take(5)
    assert slot is not None
    arena.view(slot.offset, 5)[:] = b"hello"
    assert bytes(map_arena(arena.fd, arena.capacity)[slot.offset : slot.offset + 5]) == b"hello"
    arena.close()


def test_little_is_wasted() -> None:
    arena = Arena(1 << 24)
    for size in (5000, 70_000, 602_112, 1_000_001):
        slot = arena.take(size)
        assert slot is not None and slot.size <= max(4096, 1.25 * size + 4096)
    arena.close()
