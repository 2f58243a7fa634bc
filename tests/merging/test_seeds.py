from __future__ import annotations

import numpy as np
import pytest

from gpuprof.merging.seeds import _pairs_with_dropped


@pytest.mark.parametrize("seed", range(5))
def test_dropped_lookups_name_exactly_the_matrices_on_both_sides_of_their_matches(seed: int) -> None:
    random = np.random.default_rng(seed)
    keys_a, keys_b = np.sort(random.integers(0, 12, 60)), random.integers(0, 12, 40)
    owner_a, owner_b = random.integers(0, 5, 60), random.integers(0, 4, 40)
    start = np.searchsorted(keys_a, keys_b)
    count = np.searchsorted(keys_a, keys_b, side="right") - start
    dropped = np.flatnonzero((random.random(40) < 0.4) & (count > 0))
    expected = {(int(owner_a[i]), int(owner_b[k])) for k in dropped for i in range(60) if keys_a[i] == keys_b[k]}
    assert _pairs_with_dropped(owner_a, owner_b, start, count, dropped) == expected
    assert _pairs_with_dropped(owner_a, owner_b, start, count, dropped[:0]) == set()
