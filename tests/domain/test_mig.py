"""MIG geometry against brute force, and against what is known of the A100."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.catalogue import device
from gpuprof.domain.device import Device, MigProfile
from gpuprof.domain.mig import (
    MigPlacement,
    basic_profiles,
    count_profiles,
    distinct_layouts,
    find_violation,
    is_legal,
    legal_starts,
    make_placement,
    maximal_layouts,
)

A100 = device("a100-80")
WITH_MIG = ["a30", "a100-40", "a100-80", "h100", "h200", "b200"]


def _place(*words: str) -> list[MigPlacement]:
    return [make_placement(A100, name, int(start)) for name, start in (word.split("@") for word in words)]


@st.composite
def geometries(draw: st.DrawFn) -> Device:
    """Small GPUs with any profiles, sensible or not."""
    memory = draw(st.integers(1, 5))
    profiles = []
    for index in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, memory))
        starts = draw(st.sets(st.integers(0, memory - size), min_size=1, max_size=4))
        slices, most = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        sms = draw(st.integers(1, 4))
        profiles.append(MigProfile(f"{slices}g.{index}gb", sms, size, size, slices, tuple(sorted(starts)), most))
    return Device(
        "toy", "gpu", 16, 1000.0, {}, memory, 1.0, 1, mig_slices=memory, mig_profiles=tuple(profiles)
    )  # fmt: skip


def _brute_legal(gpu: Device, items: tuple[MigPlacement, ...]) -> bool:
    slots = [slot for item in items for slot in range(item.start, item.start + item.profile.memory_slices)]
    names = [item.profile.name for item in items]
    return (
        len(slots) == len(set(slots))
        and all(item.start in item.profile.start_slots for item in items)
        and all(names.count(profile.name) <= profile.max_count for profile in gpu.mig_profiles)
        and sum(item.profile.compute_slices for item in items)
        <= max(profile.compute_slices for profile in gpu.mig_profiles)
    )


def _all_legal(gpu: Device) -> set[frozenset[MigPlacement]]:
    pairs = [MigPlacement(profile, start) for profile in gpu.mig_profiles for start in profile.start_slots]
    return {
        frozenset(chosen)
        for size in range(gpu.mig_slices + 1)
        for chosen in combinations(pairs, size)
        if _brute_legal(gpu, chosen)
    }


@given(geometries())
def test_maximal_layouts_are_what_brute_force_finds(gpu: Device) -> None:
    legal = _all_legal(gpu)
    maximal = {layout for layout in legal if not any(layout < rival for rival in legal)}
    layouts = maximal_layouts(gpu)
    assert {frozenset(layout) for layout in layouts} == maximal
    assert len(layouts) == len(maximal)
    assert all([item.start for item in layout] == sorted(item.start for item in layout) for layout in layouts)


@given(geometries(), st.data())
def test_legality_and_legal_starts_agree_with_brute_force(gpu: Device, data: st.DataObject) -> None:
    profiles = st.sampled_from(gpu.mig_profiles)
    items = data.draw(st.lists(st.builds(MigPlacement, profiles, st.integers(0, 5)), max_size=4))
    legal = _brute_legal(gpu, tuple(items))
    assert is_legal(gpu, items) == legal
    if legal:
        profile = data.draw(profiles)
        starts = [start for start in range(6) if _brute_legal(gpu, (*items, MigPlacement(profile, start)))]
        assert list(legal_starts(gpu, profile, items)) == starts


def test_an_a100_has_19_maximal_layouts_of_its_basic_profiles() -> None:
    basic = basic_profiles(A100)
    assert [profile.name for profile in basic] == ["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"]
    assert len(maximal_layouts(A100, basic)) == 19
    assert len(distinct_layouts(A100, basic)) == 14
    held = [Counter(dict(count_profiles(layout))) for layout in distinct_layouts(A100, basic)]
    assert sum(not any(layout < rival for rival in held) for layout in held) == 12  # 3g + 3g is in 4g + 3g by size only


def test_the_layout_of_parvagpus_figure_that_the_driver_refuses_is_refused() -> None:
    ones = _place(*(f"1g.10gb@{slot}" for slot in range(5)))
    assert find_violation(A100, [*ones, *_place("2g.20gb@5")]) == "2g.20gb may start at slots 0, 2, 4 but got 5"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["3g.40gb@0", "1g.10gb@3"], "1g.10gb@3 overlaps 3g.40gb@0 at memory slice 3"),
        (["4g.40gb@4"], "4g.40gb may start at slots 0 but got 4"),
        (["1g.10gb@7"], "1g.10gb may start at slots 0, 1, 2, 3, 4, 5, 6 but got 7"),
    ],
)
def test_a_refusal_names_the_rule_and_the_values(words: list[str], rule: str) -> None:
    assert find_violation(A100, _place(*words)) == rule


def test_counts_and_compute_slices_are_limited() -> None:
    profile = MigProfile("1g.1gb", 1, 1, 1, 1, (0, 1, 2, 3), max_count=2)
    wide = MigProfile("2g.1gb", 2, 1, 1, 2, (0, 1, 2, 3), max_count=4)
    gpu = Device("toy", "gpu", 4, 1.0, {}, 4, 1.0, 1, mig_slices=4, mig_profiles=(profile, wide))
    three = [MigPlacement(profile, start) for start in range(3)]
    assert find_violation(gpu, three) == "at most 2 × 1g.1gb fit but got 3"
    assert (
        find_violation(gpu, [three[0], MigPlacement(wide, 1)])
        == "the instances take 3 compute slices but the GPU has 2"
    )
