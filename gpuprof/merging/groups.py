"""Groups models by architecture, and corresponding nodes: weighted ones by similarity, all others by their inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from gpuprof.graph.nodes import list_captured
from gpuprof.merging.similarity import (
    CommonBlock,
    Matrix,
    Moment,
    Pair,
    WeightedOperator,
    best_matching,
    block_similarity,
    common_blocks,
    moments,
    weight_matrix,
    weighted_operators,
)
from gpuprof.merging.source import SourceModel


@dataclass(slots=True)
class NodeGroup:
    """Corresponding nodes of different models."""

    nodes: dict[int, int]  #: Model → position of its node.
    moment: Moment  #: Start time of all nodes.
    #: Model → weighted operator; empty for nodes without large weights.
    operators: dict[int, WeightedOperator] = field(default_factory=dict)
    similarity: float = 1.0  #: Least similarity of any two members; 1 for nodes without large weights.
    #: Longest common submatrix of the weights of each pair of models.
    blocks: dict[tuple[int, int], CommonBlock] = field(default_factory=dict)


def group_nodes(sources: Sequence[SourceModel], omega: float) -> list[NodeGroup]:
    """Return groups of corresponding nodes of normalised ``sources``.

    Models are added in order, as in §3.4.2. Weighted operators join existing groups by the Hungarian algorithm: same
    type and attributes, same start time, similarity of at least ``omega`` to each member. Every other node joins the
    group of nodes with the same type, attributes, moment and constants, and with inputs from the same groups.
    """
    return _Grouper(sources, omega).run()


class _Grouper:
    def __init__(self, sources: Sequence[SourceModel], omega: float) -> None:
        self._sources = sources
        self._omega = omega
        self._moments = [moments(source) for source in sources]
        self._operators = [{o.position: o for o in weighted_operators(source)} for source in sources]
        self._inputs = _input_classes(sources)
        self._by_signature: dict[object, list[int]] = {}
        self._groups: list[NodeGroup] = []

    def run(self) -> list[NodeGroup]:
        """Return every node in its group."""
        for model in range(len(self._sources)):
            matches = self._match(model)
            producers: dict[str, tuple[int, int]] = {}
            for position, node in enumerate(self._sources[model].nodes):
                index = matches.get(position)
                if index is None:
                    index = self._place(model, position, node, producers)
                self._groups[index].nodes[model] = position
                producers |= {name: (index, i) for i, name in enumerate(node.output) if name}
        return self._groups

    def _match(self, model: int) -> dict[int, int]:
        """Add a model's weighted operators to groups; return the group of each by its position."""
        groups, operators = self._groups, self._operators[model]
        candidates = [
            (index, position)
            for index, group in enumerate(groups)
            for position, operator in operators.items()
            if group.operators and _may_match(next(iter(group.operators.values())), operator)
        ]
        blocks = {earlier: self._compare(earlier, model, candidates) for earlier in range(model)}
        edges = {}
        for index, position in candidates:
            similarity = min(
                block_similarity(
                    blocks[m][index, position].area,
                    self._weight(m, operator).size,
                    self._weight(model, operators[position]).size,
                )
                for m, operator in groups[index].operators.items()
            )
            if similarity >= self._omega and similarity > 0:
                edges[index, position] = similarity
        matches = {}
        for index, position in best_matching(edges).items():
            group = groups[index]
            group.similarity = min(group.similarity, edges[index, position])
            group.blocks |= {(m, model): blocks[m][index, position] for m in group.operators}
            group.operators[model] = operators[position]
            matches[position] = index
        return matches

    def _compare(self, earlier: int, model: int, candidates: Sequence[Pair]) -> dict[Pair, CommonBlock]:
        """Return the common blocks of candidates (group, position) with ``earlier``'s operators in the groups."""
        groups, operators = self._groups, self._operators[model]
        pairs = [(index, position) for index, position in candidates if earlier in groups[index].operators]
        places = {position: place for place, position in enumerate(operators)}
        blocks = common_blocks(
            [self._weight(earlier, groups[index].operators[earlier]) for index, _ in pairs],
            [self._weight(model, operator) for operator in operators.values()],
            [(number, places[position]) for number, (_, position) in enumerate(pairs)],
        )
        return {pair: blocks[number, places[pair[1]]] for number, pair in enumerate(pairs)}

    def _weight(self, model: int, operator: WeightedOperator) -> Matrix:
        return weight_matrix(self._sources[model], operator)

    def _place(self, model: int, position: int, node: NodeProto, producers: dict[str, tuple[int, int]]) -> int:
        """Return the group of a node, a new one if no existing group fits."""
        moment = self._moments[model][position]
        operator = self._operators[model].get(position)
        if operator is None and not list_captured(node):
            signature = (_signature(node), moment, self._input_identity(model, node, producers))
            group_indices = self._by_signature.setdefault(signature, [])
            for index in group_indices:
                if model not in self._groups[index].nodes:
                    return index
            group_indices.append(len(self._groups))
        group = NodeGroup({model: position}, moment, {} if operator is None else {model: operator})
        self._groups.append(group)
        return len(self._groups) - 1

    def _input_identity(self, model: int, node: NodeProto, producers: dict[str, tuple[int, int]]) -> tuple[object, ...]:
        source = self._sources[model]
        identity: list[object] = []
        for i, name in enumerate(node.input):
            if node.op_type == "Reshape" and i == 1:
                dims = source.values[node.output[0]].dims
                # The target may contain the batch, in which models may differ: only the rest of the shape is compared.
                identity.append((len(dims), tuple(None if dim.per_batch else dim for dim in dims[1:])))
            elif name in source.weights:
                identity.append(source.digest(name))
            elif name in producers:
                identity.append(producers[name])
            else:
                identity.append(self._inputs[model].get(name, name and (model, name)))
        return tuple(identity)


def _may_match(a: WeightedOperator, b: WeightedOperator) -> bool:
    return a.level == b.level and _kind(a.node) == _kind(b.node)


def _kind(node: NodeProto) -> tuple[object, ...]:
    """Return a node's type and attributes as a comparable key."""
    attributes = sorted((a.name, a.SerializeToString(deterministic=True)) for a in node.attribute)
    return node.domain, node.op_type, tuple(attributes)


def _signature(node: NodeProto) -> tuple[object, ...]:
    """Return the node properties that must be equal in all models, its inputs' origins aside."""
    return _kind(node), tuple(bool(name) for name in node.input), tuple(bool(name) for name in node.output)


def _input_classes(sources: Sequence[SourceModel]) -> list[dict[str, object]]:
    """Return the class of each model's inputs: equal type and shape, and the same name or else the same order."""
    shared = set(sources[0].inputs).intersection(*(source.inputs for source in sources))
    classes: list[dict[str, object]] = []
    for source in sources:
        counts: Counter[object] = Counter()
        input_classes: dict[str, object] = {}
        for name in sorted(source.inputs):
            value = source.values[name]
            kind = (value.dtype, tuple(None if dim.per_batch else dim for dim in value.dims))
            input_classes[name] = ("input", kind, name if name in shared else counts[kind])
            counts[kind] += name not in shared
        classes.append(input_classes)
    return classes


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
    """Return the number of operators and edges in only one of two graphs, relative to the larger graph."""
    return max((a - b).total(), (b - a).total()) / max(a.total(), b.total(), 1)


def group_architectures(graphs: Sequence[GraphCounts], eps: float = DEFAULT_EPS) -> list[list[int]]:
    """Return groups of positions whose architectures are similar, by DBSCAN (USHER §3.4.1), in order of first members.

    The paper's edit distance, the operators and edges to add, delete or replace until two graphs are equal, is NP-hard
    to compute. Here the operators are counted by their types, and the edges by the types of their ends, that one graph
    has and the other lacks. Graphs that differ in a block differ by its operators and edges, wherever it is.

    ``eps``: radius of DBSCAN's neighbourhood, a `relative_distance`.
    """
    from sklearn.cluster import DBSCAN

    distances = np.array([[relative_distance(a, b) for b in graphs] for a in graphs])
    labels = DBSCAN(eps=max(eps, 1e-12), min_samples=1, metric="precomputed").fit(distances).labels_
    groups: dict[int, list[int]] = {}
    for position, label in enumerate(labels):
        groups.setdefault(int(label), []).append(position)
    return list(groups.values())
