"""USHER's grouping of models whose compute and memory requirements balance each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations

import networkx

#: Number of groups above which pairs are formed by sorting, with equal weight but another tie-break.
_MOST_MATCHED = 100
#: Breaks ties between matchings of equal weight, far below the precision of a requirement.
_TIE = 1e-6


def balanced_groups(requirements: Mapping[str, tuple[float, float]], most: int) -> tuple[tuple[str, ...], ...]:
    """Group models so that in each group ΣCreq ≈ ΣMreq (OSDI'24 §3.3.1).

    USHER does not describe its variant of k-means; as in Elvinger's thesis (§5.2.2), pairs are formed in rounds by a
    matching of minimum weight among those of maximum cardinality. The weight of a pair of groups is |ΣCreq - ΣMreq|
    over both. Where all models lean the same way the weights add up and many matchings are equal: the matching that
    pairs neighbours in the given order is taken. Among more than a hundred groups, the greatest surplus of compute is
    paired with the greatest of memory, then the next ones: as the weight is a convex function of a sum, no matching is
    lighter, and sorting replaces a search of minutes.

    ``requirements``: mean Creq and Mreq of each model; ``most``: largest group.

    Returns
    -------
    tuple of tuple of str
        Groups and their models in the order of ``requirements``.
    """
    groups: list[tuple[str, ...]] = [(model,) for model in requirements]
    size = 2
    while size <= most and len(groups) > 1:
        groups = _pair_groups(groups, requirements)
        size *= 2
    position = {model: index for index, model in enumerate(requirements)}
    sorted_groups = [tuple(sorted(group, key=position.__getitem__)) for group in groups]
    return tuple(sorted(sorted_groups, key=lambda group: position[group[0]]))


def _pair_groups(
    groups: Sequence[tuple[str, ...]], requirements: Mapping[str, tuple[float, float]]
) -> list[tuple[str, ...]]:
    surplus = [sum(requirements[model][0] - requirements[model][1] for model in group) for group in groups]
    pairs = _match(surplus) if len(groups) <= _MOST_MATCHED else _sorted_pairs(surplus)
    singles = set(range(len(groups))) - {index for pair in pairs for index in pair}
    return [groups[i] + groups[j] for i, j in sorted(pairs)] + [groups[index] for index in sorted(singles)]


def _match(surplus: Sequence[float]) -> list[tuple[int, int]]:
    graph = networkx.Graph()
    graph.add_nodes_from(range(len(surplus)))
    for i, j in combinations(range(len(surplus)), 2):
        graph.add_edge(i, j, weight=abs(surplus[i] + surplus[j]) + _TIE * (j - i))
    return [(min(pair), max(pair)) for pair in networkx.min_weight_matching(graph)]


def _sorted_pairs(surplus: Sequence[float]) -> list[tuple[int, int]]:
    """Return a matching of least Σ |surplus + surplus|: least with greatest; of an odd number one group is left out."""
    order = sorted(range(len(surplus)), key=lambda index: (surplus[index], index))
    if len(order) % 2:
        del order[_left_out([surplus[index] for index in order])]
    pairs = [(order[k], order[-1 - k]) for k in range(len(order) // 2)]
    return [(min(pair), max(pair)) for pair in pairs]


def _left_out(surpluses: Sequence[float]) -> int:
    """Return the position without which the pairs of least and greatest weigh least.

    Without a position of the lower half, the pairs outside it stay and those inside it shift by one; likewise above.
    """
    last, half = len(surpluses) - 1, len(surpluses) // 2
    outer_sums = [0.0, *accumulate(abs(surpluses[k] + surpluses[last - k]) for k in range(half))]
    low = [0.0, *accumulate(abs(surpluses[k + 1] + surpluses[last - k]) for k in reversed(range(half)))]
    high = [0.0, *accumulate(abs(surpluses[k] + surpluses[last - 1 - k]) for k in reversed(range(half)))]
    below = [(outer_sums[k] + low[half - k], k) for k in range(half + 1)]
    above = [(outer_sums[k] + high[half - k], last - k) for k in range(half)]
    return min(below + above)[1]
