"""Groups models by architecture: DBSCAN over the distance of their operator graphs (USHER §3.4.1).

The paper's edit distance, the operators and edges to add, delete or replace until two graphs are equal, is NP-hard to
compute. Here the operators are counted by their types, and the edges by the types of their ends, that one graph has and
the other lacks. Graphs that differ in a block differ by its operators and edges, wherever it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gpuprof.graph.nodes import list_captured
from gpuprof.merging.source import SourceModel

#: Largest distance inside a group. The paper's 10⁻⁷ groups identical graphs only; models fine-tuned to another task
#: differ in their head.
DEFAULT_EPS = 0.25

#: Number of operators by type, and of edges by the types of their producer and consumer.
GraphCounts = Counter[tuple[str, ...]]


def count_graph(source: SourceModel) -> GraphCounts:
    """Return the counts of a normalised source's operators and edges."""
    counts: GraphCounts = Counter((node.op_type,) for node in source.nodes)
    makers = {name: node.op_type for node in source.nodes for name in node.output if name}
    for node in source.nodes:
        counts.update((makers[n], node.op_type) for n in (*node.input, *list_captured(node)) if n in makers)
    return counts


def relative_distance(a: GraphCounts, b: GraphCounts) -> float:
    """Return the operators and edges that one graph has and the other lacks, as a part of the larger graph's."""
    return max((a - b).total(), (b - a).total()) / max(a.total(), b.total(), 1)


def group_architectures(graphs: Sequence[GraphCounts], eps: float = DEFAULT_EPS) -> list[list[int]]:
    """Return groups of positions whose architectures are similar, in order of their first member.

    ``eps``: radius of DBSCAN's neighbourhood, a `relative_distance`.
    """
    from sklearn.cluster import DBSCAN

    distances = np.array([[relative_distance(a, b) for b in graphs] for a in graphs])
    labels = DBSCAN(eps=max(eps, 1e-12), min_samples=1, metric="precomputed").fit(distances).labels_
    groups: dict[int, list[int]] = {}
    for position, label in enumerate(labels):
        groups.setdefault(int(label), []).append(position)
    return list(groups.values())
