from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.mig import is_legal
from gpuprof.domain.share import Share
from gpuprof.placement.contract import plain_device, sliced_device
from gpuprof.placement.optimal.pattern import PartitionSlot, PatternPacker, best_packing, list_configurations, multisets

WHOLE = ("plain", None)


def slots(*percents: float) -> tuple[PartitionSlot, ...]:
    return tuple(PartitionSlot(Share(percent)) for percent in percents)


def test_the_contents_of_halves_and_quarters() -> None:
    patterns = PatternPacker(WHOLE, slots(25.0, 50.0, 100.0)).list_maximal()
    assert patterns is not None
    assert {pattern.slots for pattern in patterns} == {
        ((PartitionSlot(Share(100.0)), 1),),
        ((PartitionSlot(Share(50.0)), 2),),
        ((PartitionSlot(Share(50.0)), 1), (PartitionSlot(Share(25.0)), 2)),
        ((PartitionSlot(Share(25.0)), 4),),
    }


@given(percents=st.lists(st.integers(4, 40).map(lambda n: 2.5 * n), min_size=1, max_size=4, unique=True))
def test_contents_are_within_the_whole_and_nothing_can_be_added(percents: list[float]) -> None:
    patterns = PatternPacker(WHOLE, slots(*percents)).list_maximal()
    assert patterns
    for pattern in patterns:
        used = sum(slot.share.sm_pct * count for slot, count in pattern.slots)
        assert used <= 100.0 + 1e-9
        assert used + min(percents) > 100.0
    assert len({pattern.slots for pattern in patterns}) == len(patterns)


def test_too_many_contents_are_not_listed_and_the_first_ones_are_within_the_whole() -> None:
    packer = PatternPacker(WHOLE, slots(*(2.5 * n for n in range(1, 41))))
    assert packer.list_maximal() is None
    for pattern in packer.initial_patterns():
        assert sum(slot.share.sm_pct * count for slot, count in pattern.slots) <= 100.0 + 1e-9


def test_nearly_equal_shares_by_the_dozen_do_not_take_for_ever() -> None:
    assert PatternPacker(WHOLE, slots(*(8.0 + 0.001 * n for n in range(40)))).list_maximal() is None


def test_the_best_content_is_that_of_the_greatest_worth() -> None:
    packer = PatternPacker(WHOLE, slots(30.0, 50.0, 70.0))
    pattern, value = packer.best_pattern(dict(zip(packer.slots, (3.0, 4.0, 6.5), strict=True)))
    assert pattern.slots == ((PartitionSlot(Share(30.0)), 1), (PartitionSlot(Share(70.0)), 1))
    assert value == 9.5


SIZES = st.tuples(st.integers(2, 10).map(lambda n: 10.0 * n), st.integers(1, 9))


@given(sizes=st.lists(SIZES, min_size=1, max_size=4, unique=True), memory=st.integers(9, 20))
def test_where_memory_is_counted_patterns_are_within_it_and_every_other_way_is_part_of_one(
    sizes: list[tuple[float, int]], memory: int
) -> None:
    packer = PatternPacker(WHOLE, tuple(PartitionSlot(Share(percent), held) for percent, held in sizes), memory)
    patterns = packer.list_maximal()
    assert patterns is not None
    listed = [dict(pattern.slots) for pattern in patterns]
    every = [
        dict(zip(packer.slots, counts, strict=True))
        for counts in product(range(6), repeat=len(sizes))
        if sum(n * percent for n, (percent, _) in zip(counts, sizes, strict=True)) <= 100.0
        and sum(n * held for n, (_, held) in zip(counts, sizes, strict=True)) <= memory
    ]
    for chosen in listed:
        assert {slot: chosen.get(slot, 0) for slot in packer.slots} in every
    for chosen in every:
        assert any(all(wider.get(slot, 0) >= n for slot, n in chosen.items()) for wider in listed)
    values = {slot: 1.0 + 0.1 * number for number, slot in enumerate(packer.slots)}
    _, value = packer.best_pattern(values)
    assert value == pytest.approx(max(sum(n * values[slot] for slot, n in chosen.items()) for chosen in every))


def test_cuts_are_legal_layouts_of_the_instances_asked_for_and_the_whole() -> None:
    device = sliced_device()
    configurations = list_configurations(device, [Share(100.0, "3g.40gb"), Share(50.0, "1g.10gb"), Share(50.0)])
    assert all(is_legal(device, configuration.layout) for configuration in configurations)
    assert {item.profile.name for configuration in configurations for item in configuration.layout} == {
        "3g.40gb",
        "1g.10gb",
    }
    assert [configuration.partitions() for configuration in configurations if not configuration.layout] == [
        {("sliced", None): 1}
    ]


def test_a_device_without_mig_is_cut_in_no_other_way() -> None:
    assert [configuration.layout for configuration in list_configurations(plain_device(), [Share(50.0)])] == [()]


@given(
    drawn=st.lists(st.tuples(st.integers(15, 100), st.integers(0, 5)), min_size=1, max_size=4, unique=True),
    memory=st.integers(1, 9),
)
def test_with_memory_they_are_those_of_all_combinations_to_which_nothing_can_be_added(
    drawn: list[tuple[int, int]], memory: int
) -> None:
    sizes = [(PartitionSlot(Share(float(percent)), held), percent, held) for percent, held in drawn if held <= memory]
    patterns = PatternPacker(WHOLE, tuple(slot for slot, _, _ in sizes), memory).list_maximal()
    expected = set()
    for counts in product(range(7), repeat=len(sizes)):
        space = 100 - sum(n * percent for n, (_, percent, _) in zip(counts, sizes, strict=True))
        free = memory - sum(n * held for n, (_, _, held) in zip(counts, sizes, strict=True))
        if min(space, free) >= 0 and not any(percent <= space and held <= free for _, percent, held in sizes):
            expected.add(frozenset((slot, n) for n, (slot, _, _) in zip(counts, sizes, strict=True) if n))
    assert patterns is not None
    assert {frozenset(pattern.slots) for pattern in patterns} == (expected if sizes else set())
    assert len(patterns) == len(expected if sizes else ())


@given(
    items=st.lists(st.tuples(st.integers(3, 12), st.floats(-1.0, 9.0)), min_size=1, max_size=3),
    capacity=st.integers(1, 20),
)
def test_it_is_as_good_as_trying_everything(items: list[tuple[int, float]], capacity: int) -> None:
    sizes, values = [size for size, _ in items], [value for _, value in items]
    counts, value = best_packing(sizes, values, capacity)
    every = [
        taken
        for taken in product(*(range(capacity // size + 1) for size in sizes))
        if sum(n * size for n, size in zip(taken, sizes, strict=True)) <= capacity
    ]
    best = max(sum(n * worth for n, worth in zip(taken, values, strict=True)) for taken in every)
    assert sum(n * size for n, size in zip(counts, sizes, strict=True)) <= capacity
    assert sum(n * worth for n, worth in zip(counts, values, strict=True)) == pytest.approx(value)
    assert value == pytest.approx(best)
    assert multisets(sizes, capacity) == len(every)
