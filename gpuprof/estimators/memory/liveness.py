"""Liveness of the tensors of a graph, and the largest number of live bytes."""

from __future__ import annotations

from gpuprof.domain.model import ModelGraph

#: Ops whose output is their first input's memory under another shape, in runtimes' execution.
VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})


def peak_activation_bytes(graph: ModelGraph) -> int:
    """Return the largest number of live bytes of inputs, outputs and activations at any op, in the graph's order.

    A tensor lives from its producer to its last reader; inputs of the graph live from the start, outputs to the end; an
    op that only changes a shape shares its input's memory.
    """
    owner = _owners(graph)
    weights = {tensor.name for tensor in graph.weights}
    last = _last_use(graph, owner)
    sizes: dict[str, int] = {}
    alive = peak = 0
    for tensor in graph.inputs:
        sizes[tensor.name] = tensor.bytes
        alive += tensor.bytes
    ends: dict[int, list[str]] = {}
    for name, position in last.items():
        ends.setdefault(position, []).append(name)
    for position, op in enumerate(graph.ops):
        for tensor in op.outputs:
            if owner.get(tensor.name, tensor.name) == tensor.name and tensor.name not in weights:
                sizes[tensor.name] = tensor.bytes
                alive += tensor.bytes
                last.setdefault(tensor.name, position)
                if last[tensor.name] == position and tensor.name not in ends.get(position, []):
                    ends.setdefault(position, []).append(tensor.name)
        peak = max(peak, alive)
        alive -= sum(sizes.get(name, 0) for name in ends.get(position, ()))
    return max(peak, alive)


def _owners(graph: ModelGraph) -> dict[str, str]:
    owner: dict[str, str] = {}
    for op in graph.ops:
        for tensor in op.outputs:
            source = op.inputs[0].name if op.op_type in VIEWS and op.inputs else tensor.name
            owner[tensor.name] = owner.get(source, source)
    return owner


def _last_use(graph: ModelGraph, owner: dict[str, str]) -> dict[str, int]:
    """Return the position of the last op that reads each tensor; outputs of the graph live beyond the end."""
    last: dict[str, int] = {}
    for position, op in enumerate(graph.ops):
        for tensor in op.inputs:
            last[owner.get(tensor.name, tensor.name)] = position
    for tensor in graph.outputs:
        last[owner.get(tensor.name, tensor.name)] = len(graph.ops)
    return last
