"""USHER's grouping of models whose compute and memory requirements balance each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import networkx

#: Breaks ties between matchings of equal weight, far below what a requirement is known to.
_TIE = 1e-6


def balanced_groups(requirements: Mapping[str, tuple[float, float]], most: int) -> tuple[tuple[str, ...], ...]:
    """Group models so that in each group ΣCreq ≈ ΣMreq (OSDI'24 §3.3.1).

    The variant of k-means that USHER names is not described; as in Elvinger's thesis (§5.2.2) pairs are formed in
    rounds by a matching of minimum weight among those of maximum cardinality, the weight of a pair of groups being
    |ΣCreq - ΣMreq| over both. Where all models lean the same way the weights add up and many matchings are equal: of
    those, the one that pairs neighbours in the given order is taken.

    Parameters
    ----------
    requirements : mapping of str to (float, float)
        Mean Creq and Mreq of each model.
    most : int
        Largest group.

    Returns
    -------
    tuple of tuple of str
        Groups and their models in the order of ``requirements``.
    """
    groups: list[tuple[str, ...]] = [(model,) for model in requirements]
    size = 2
    while size <= most and len(groups) > 1:
        groups = _paired(groups, requirements)
        size *= 2
    position = {model: index for index, model in enumerate(requirements)}
    ordered = [tuple(sorted(group, key=position.__getitem__)) for group in groups]
    return tuple(sorted(ordered, key=lambda group: position[group[0]]))


def _paired(
    groups: Sequence[tuple[str, ...]], requirements: Mapping[str, tuple[float, float]]
) -> list[tuple[str, ...]]:
    graph = networkx.Graph()
    graph.add_nodes_from(range(len(groups)))
    for one, two in combinations(range(len(groups)), 2):
        both = [requirements[model] for model in (*groups[one], *groups[two])]
        graph.add_edge(one, two, weight=abs(sum(creq - mreq for creq, mreq in both)) + _TIE * (two - one))
    matched = [tuple(sorted(pair)) for pair in networkx.min_weight_matching(graph)]
    alone = set(range(len(groups))) - {index for pair in matched for index in pair}
    return [groups[one] + groups[two] for one, two in sorted(matched)] + [groups[index] for index in sorted(alone)]
