"""USHER's bipartite matching of the weighted operators of two models (§3.4.2)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import linear_sum_assignment

#: Operators less similar than this are not merged (the paper's ω, its figure 26b).
OMEGA = 0.4


def best_matching(similarities: Mapping[tuple[int, int], float]) -> dict[int, int]:
    """Return the matching left → right with the largest sum of similarities, by the Hungarian algorithm.

    ``similarities``: weight of each edge, above 0; pairs without an edge are absent and never matched.
    """
    lefts = sorted({left for left, _ in similarities})
    rights = sorted({right for _, right in similarities})
    if not lefts:
        return {}
    row = {left: i for i, left in enumerate(lefts)}
    column = {right: j for j, right in enumerate(rights)}
    weights = np.zeros((len(lefts), len(rights)))
    for (left, right), similarity in similarities.items():
        weights[row[left], column[right]] = similarity
    chosen = zip(*linear_sum_assignment(weights, maximize=True), strict=True)
    return {lefts[i]: rights[j] for i, j in chosen if (lefts[i], rights[j]) in similarities}
