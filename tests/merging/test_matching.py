from __future__ import annotations

from gpuprof.merging.similarity import best_matching


def test_the_sum_is_maximal_where_the_nearest_first_would_not_be() -> None:
    assert best_matching({(0, 0): 0.9, (0, 1): 0.8, (1, 0): 0.8}) == {0: 1, 1: 0}


def test_what_has_no_edge_is_not_matched() -> None:
    assert best_matching({(3, 7): 0.5, (4, 7): 0.6}) == {4: 7}
    assert best_matching({}) == {}
