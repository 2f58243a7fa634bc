from __future__ import annotations

from itertools import combinations

import networkx
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.placement.published.usher import balanced_groups, pair_opposites


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-60, 60), min_size=2, max_size=13))
def test_pairs_of_opposites_weigh_as_much_as_the_least_matching(surpluses: list[int]) -> None:
    graph = networkx.Graph()
    for first, second in combinations(range(len(surpluses)), 2):
        graph.add_edge(first, second, weight=abs(surpluses[first] + surpluses[second]))
    weights = [
        sum(abs(surpluses[first] + surpluses[second]) for first, second in pairs)
        for pairs in (pair_opposites(surpluses), networkx.min_weight_matching(graph))
    ]
    assert len({index for pair in pair_opposites(surpluses) for index in pair}) == len(surpluses) // 2 * 2
    assert weights[0] == weights[1]


def test_a_thousand_models_are_grouped_with_their_opposites() -> None:
    # half of them need 10% more compute than memory, half the opposite
    models = {f"m{index}": (20.0, 10.0) if index % 2 else (10.0, 20.0) for index in range(1001)}
    groups = balanced_groups(models, 4)
    assert sorted(model for group in groups for model in group) == sorted(models)
    assert [len(group) for group in groups].count(4) == 250
    assert all(sum(models[m][0] - models[m][1] for m in group) == 0.0 for group in groups if len(group) == 4)


def test_groups_are_no_larger_than_the_limit() -> None:
    models = {f"m{index}": (float(index), 5.0) for index in range(7)}
    assert {len(group) for group in balanced_groups(models, 1)} == {1}
    assert max(len(group) for group in balanced_groups(models, 2)) == 2
