from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.placement.published import usher_groups
from gpuprof.placement.published.usher_groups import balanced_groups

SURPLUSES = st.lists(st.integers(-60, 60), min_size=2, max_size=13)


def weight(surplus: list[float], pairs: list[tuple[int, int]]) -> float:
    return sum(abs(surplus[first] + surplus[two]) for first, two in pairs)


@settings(deadline=None, max_examples=200)
@given(SURPLUSES)
def test_sorting_pairs_as_lightly_as_the_matching_does(numbers: list[int]) -> None:
    surplus = [float(number) for number in numbers]
    pairs = usher_groups._sorted_pairs(surplus)
    assert len(pairs) == len(surplus) // 2
    assert len({index for pair in pairs for index in pair}) == 2 * len(pairs)
    assert abs(weight(surplus, pairs) - weight(surplus, usher_groups._match(surplus))) < 1e-9


def test_a_thousand_models_are_grouped_with_their_opposites() -> None:
    # half of them need 10% more compute than memory, half the opposite
    models = {f"m{index}": (20.0, 10.0) if index % 2 else (10.0, 20.0) for index in range(1001)}
    groups = balanced_groups(models, 4)
    assert sorted(model for group in groups for model in group) == sorted(models)
    assert [len(group) for group in groups].count(4) == 250
    assert all(sum(models[m][0] - models[m][1] for m in group) == 0.0 for group in groups if len(group) == 4)


def test_groups_are_no_larger_than_asked_for() -> None:
    models = {f"m{index}": (float(index), 5.0) for index in range(7)}
    assert {len(group) for group in balanced_groups(models, 1)} == {1}
    assert max(len(group) for group in balanced_groups(models, 2)) == 2
