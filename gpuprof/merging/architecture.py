"""Groups models by architecture: DBSCAN over the edit distance of their operator graphs (USHER §3.4.1).

The edit distance counts the operators and edges to add, delete or replace until two graphs are equal; computing it is
NP-hard. The upper bound of Riesen and Bunke (2009) is used: the Hungarian algorithm matches the operators of both
graphs, at a cost made of the operators' types and the types of their neighbours, and the edits implied by the matching
are counted. Equal graphs get exactly 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gpuprof.graph.nodes import list_captured
from gpuprof.merging.source import SourceModel

#: Largest distance inside a group, in edits per operator. The paper's 10⁻⁷ groups identical graphs only; models
#: fine-tuned to another task differ in their head.
DEFAULT_EPS = 0.25


@dataclass(frozen=True)
class OperatorTypeGraph:
    """The graph of a model's operator types."""

    types: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]  #: Producer, consumer.

    @cached_property
    def around(self) -> tuple[tuple[Counter[str], Counter[str]], ...]:
        """Counts of the types of each operator's predecessors and of its successors."""
        before: list[Counter[str]] = [Counter() for _ in self.types]
        after: list[Counter[str]] = [Counter() for _ in self.types]
        for producer, consumer in self.edges:
            after[producer][self.types[consumer]] += 1
            before[consumer][self.types[producer]] += 1
        return tuple(zip(before, after, strict=True))


def read_type_graph(source: SourceModel) -> OperatorTypeGraph:
    """Return the operator graph of a normalised source."""
    producer = {name: i for i, node in enumerate(source.nodes) for name in node.output if name}
    edges = {
        (producer[name], i)
        for i, node in enumerate(source.nodes)
        for name in (*node.input, *list_captured(node))
        if name in producer
    }
    return OperatorTypeGraph(tuple(node.op_type for node in source.nodes), tuple(sorted(edges)))


def edit_distance(a: OperatorTypeGraph, b: OperatorTypeGraph) -> float:
    """Return an upper bound of the edit distance of two operator graphs; 0 for equal ones."""
    return 0.0 if a == b else _count_edits(a, b, _match_operators(a, b))


def relative_distance(a: OperatorTypeGraph, b: OperatorTypeGraph) -> float:
    """Return the edit distance per operator and edge of the larger graph, about 0 to 1."""
    size = max(len(a.types) + len(a.edges), len(b.types) + len(b.edges))
    return edit_distance(a, b) / size if size else 0.0


def group_architectures(architectures: Sequence[OperatorTypeGraph], eps: float = DEFAULT_EPS) -> list[list[int]]:
    """Return groups of positions whose architectures are similar, in order of their first member.

    ``eps``: radius of DBSCAN's neighbourhood, a `relative_distance`.
    """
    from sklearn.cluster import DBSCAN

    n = len(architectures)
    distances = np.zeros((n, n))
    for i in range(n):
        for j in range(i):
            distances[i, j] = distances[j, i] = relative_distance(architectures[i], architectures[j])
    labels = DBSCAN(eps=max(eps, 1e-12), min_samples=1, metric="precomputed").fit(distances).labels_
    groups: dict[int, list[int]] = {}
    for position, found in enumerate(labels):
        groups.setdefault(int(found), []).append(position)
    return list(groups.values())


def _match_operators(a: OperatorTypeGraph, b: OperatorTypeGraph) -> dict[int, int]:
    """Return the matching of operators with the least local edit cost."""
    from scipy.optimize import linear_sum_assignment

    n, m = len(a.types), len(b.types)
    costs = np.full((n + m, n + m), np.inf)
    costs[:n, :m] = _replacement_costs(a, b)
    costs[n:, m:] = 0.0
    costs[np.arange(n), m + np.arange(n)] = [1 + _degree(sides) / 2 for sides in a.around]
    costs[n + np.arange(m), np.arange(m)] = [1 + _degree(sides) / 2 for sides in b.around]
    rows, columns = linear_sum_assignment(costs)
    return {int(i): int(j) for i, j in zip(rows, columns, strict=True) if i < n and j < m}


def _replacement_costs(a: OperatorTypeGraph, b: OperatorTypeGraph) -> npt.NDArray[np.float64]:
    """Return 1 for each pair of different types, and half an edit, shared by its ends, for each different edge."""
    kinds = sorted({*a.types, *b.types})

    def count_neighbours(graph: OperatorTypeGraph) -> npt.NDArray[np.float64]:
        counts = [[side[kind] for side in sides for kind in kinds] for sides in graph.around]
        return np.array(counts, np.float64).reshape(len(graph.types), 2 * len(kinds))

    types = [np.array([kinds.index(kind) for kind in graph.types]) for graph in (a, b)]
    costs: npt.NDArray[np.float64] = (types[0][:, None] != types[1][None, :]).astype(np.float64)
    # Equal costs are decided by the position in the graph, because repeated blocks look alike.
    positions = [np.arange(len(graph.types)) / len(graph.types) for graph in (a, b)]
    costs += 1e-3 * np.abs(positions[0][:, None] - positions[1][None, :])
    for ours, theirs in zip(count_neighbours(a).T, count_neighbours(b).T, strict=True):
        costs += np.abs(ours[:, None] - theirs[None, :]) / 4
    return costs


def _degree(sides: tuple[Counter[str], Counter[str]]) -> int:
    return sum(side.total() for side in sides)


def _count_edits(a: OperatorTypeGraph, b: OperatorTypeGraph, matching: dict[int, int]) -> float:
    """Return the number of edits from ``a`` to ``b`` under a matching of their operators."""
    replaced = sum(a.types[i] != b.types[j] for i, j in matching.items())
    unmatched = len(a.types) + len(b.types) - 2 * len(matching)
    theirs = set(b.edges)
    kept = sum((matching.get(p, -1), matching.get(c, -1)) in theirs for p, c in a.edges)
    return float(replaced + unmatched + len(a.edges) + len(b.edges) - 2 * kept)
