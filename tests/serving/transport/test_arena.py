from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.serving.transport.arena import POISON, Arena, Slot, map_arena

SIZE = st.integers(1, 300_000)


@given(st.lists(st.tuples(st.sampled_from(["take", "give back"]), SIZE), max_size=60))
def test_slots_that_are_out_at_the_same_time_never_overlap_and_keep_what_they_have(
    steps: list[tuple[str, int]],
) -> None:
    arena = Arena(1 << 21, poison=True)
    out: list[tuple[Slot, int]] = []
    for number, (step, size) in enumerate(steps):
        if step == "take":
            slot = arena.take(size)
        elif out:
            old, mark = out.pop(size % len(out))
            slot = None
            assert bytes(arena.view(old.offset, old.size)) == bytes([mark]) * old.size
            arena.give_back(old)
        else:
            continue
        if slot is not None:
            mark = number % 200
            assert slot.size >= size and slot.offset + slot.size <= arena.capacity
            arena.view(slot.offset, slot.size)[:] = bytes([mark]) * slot.size
            out.append((slot, mark))
        assert all(bytes(arena.view(block.offset, block.size)) == bytes([mark]) * block.size for block, mark in out)
    assert arena.used == sum(slot.size for slot, _ in out)
    for slot, _ in out:
        arena.give_back(slot)
    whole = arena.take(arena.capacity)
    assert whole == Slot(0, arena.capacity)  # all is one piece again
    arena.give_back(whole)
    arena.close()


def test_small_slots_after_large_ones_and_large_after_small_find_room() -> None:
    arena = Arena(1 << 24)
    for size in (4_500_000, 600_000, 4_500_000, 8_192):
        slots = []
        while (slot := arena.take(size)) is not None:
            slots.append(slot)
        assert len(slots) == (1 << 24) // slots[0].size
        for slot in slots:
            arena.give_back(slot)
    arena.close()


def test_who_gives_back_twice_is_told() -> None:
    arena = Arena(1 << 14)
    slot = arena.take(1)
    assert slot is not None
    arena.give_back(slot)
    with pytest.raises(RuntimeError, match="twice"):
        arena.give_back(slot)
    arena.close()


def test_what_is_given_back_is_poisoned_where_that_is_wanted() -> None:
    arena = Arena(1 << 14, poison=True)
    slot = arena.take(1 << 13)
    assert slot is not None
    view = arena.view(slot.offset, slot.size)
    view[:] = bytes(slot.size)
    arena.give_back(slot)
    assert set(view) == {POISON}
    arena.close()


def test_memory_that_nothing_lies_in_is_returned_to_the_system() -> None:
    import os

    arena = Arena(1 << 28)
    slot = arena.take(1 << 28)
    assert slot is not None
    arena.view(slot.offset, slot.size)[:: 1 << 12] = bytes(1 << 16)
    assert os.fstat(arena.fd).st_blocks * 512 == 1 << 28
    arena.trim()
    assert os.fstat(arena.fd).st_blocks * 512 == 1 << 28  # somebody has it
    arena.give_back(slot)
    arena.trim()
    assert os.fstat(arena.fd).st_blocks == 0
    arena.close()


def test_what_one_side_writes_the_other_reads() -> None:
    arena = Arena(1 << 14)
    slot = arena.take(5)
    assert slot is not None
    arena.view(slot.offset, 5)[:] = b"hello"
    assert bytes(map_arena(arena.fd, arena.capacity)[slot.offset : slot.offset + 5]) == b"hello"
    arena.close()
