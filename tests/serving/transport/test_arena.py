import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.errors import InputError
from gpuprof.serving.transport.arena import POISON, Arena, Slot, map_arena
from gpuprof.serving.transport.datatypes import ITEM_BYTES, datatype_of, join_strings, split_strings, to_bytes, to_json

SIZE = st.integers(1, 300_000)


@given(st.lists(st.tuples(st.sampled_from(["take", "give back"]), SIZE), max_size=60))
def test_slots_that_are_out_together_never_overlap_and_keep_what_they_have(steps: list[tuple[str, int]]) -> None:
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
    assert set(view) == {*POISON}
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


INTEGERS = [name for name in ITEM_BYTES if name.startswith(("INT", "UINT"))]


@pytest.mark.parametrize("datatype", INTEGERS)
def test_the_whole_range_of_an_integer_type_survives_and_nothing_beyond_is_taken(datatype: str) -> None:
    bits = 8 * ITEM_BYTES[datatype]
    low, high = (0, 2**bits - 1) if datatype.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert to_json(to_bytes([low, 0, high], datatype), datatype, 3) == [low, 0, high]
    for value in (low - 1, high + 1):
        with pytest.raises(ValueError, match="range"):
            to_bytes([value], datatype)


@pytest.mark.parametrize("datatype", INTEGERS)
def test_a_whole_number_that_is_written_as_a_float_is_one(datatype: str) -> None:
    assert to_json(to_bytes([1.0, 2, 0.0], datatype), datatype, 3) == [1, 2, 0]


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64"])
def test_floats_survive_and_whole_numbers_are_floats_too(datatype: str) -> None:
    assert to_json(to_bytes([0.5, -2, 1], datatype), datatype, 3) == [0.5, -2.0, 1.0]


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("FP32", "1"),
        ("FP32", True),
        ("FP32", None),
        ("INT32", 1.5),
        ("INT32", float("inf")),
        ("INT8", True),
        ("BOOL", 2),
        ("BYTES", 1),
        ("FP64", [1]),
    ],
)
def test_a_value_of_another_kind_is_refused(datatype: str, value: object) -> None:
    with pytest.raises(ValueError, match="must hold"):
        to_bytes([value], datatype)


def test_bfloat16_travels_only_as_binary() -> None:
    with pytest.raises(ValueError, match="BF16"):
        to_bytes([1.0], "BF16")
    with pytest.raises(ValueError, match="BF16"):
        to_json(b"\x80\x3f", "BF16", 1)


@given(st.lists(st.binary(max_size=20), max_size=10))
def test_strings_survive(strings: list[bytes]) -> None:
    assert split_strings(join_strings(strings), len(strings)) == strings


@given(st.binary(max_size=40), st.integers(0, 5))
def test_bytes_that_are_no_strings_are_refused_with_a_value_error(data: bytes, count: int) -> None:
    try:
        strings = split_strings(data, count)
    except ValueError:
        return
    assert join_strings(strings) == data


def test_a_type_that_the_protocol_lacks_is_said() -> None:
    assert datatype_of("tensor(float)", "x") == "FP32"
    with pytest.raises(InputError, match=r"tensor 'x' has type seq\(tensor\(float\)\)"):
        datatype_of("seq(tensor(float))", "x")
