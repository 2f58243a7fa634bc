"""Normalises a model before it is merged: folds constants and batch normalisations, and removes identities.

Exporters compute shapes by dozens of ops, which differ between two exports of the same network. With all sizes except
the batch bound, these computations are constant except for the batch, and only ops on data remain. A runtime folds
batch normalisations into convolutions when it loads a graph and holds the results: these are what models can share.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, helper, numpy_helper

from gpuprof.graph.nodes import graphs_of, list_captured
from gpuprof.merging.source import Array, SourceModel

_NOTHING = {"Identity", "Dropout"}
_REARRANGED = {"Transpose", "Reshape", "Identity"}


def normalise(source: SourceModel) -> None:
    """Clean up ``source`` in place.

    Known values become weights. Transposes and reshapes of weights are applied, and batch normalisations folded into
    the convolutions before them. Varying Reshape targets get -1 for the batch. Ops without effect are bypassed, and
    unused values removed.
    """
    renamed: dict[str, str] = {}
    nodes = []
    for node in source.nodes:
        _rename(node, renamed)
        if _is_known(source, node) or _rearrange(source, node):
            continue
        if node.op_type in _NOTHING and _is_identity(source, node):
            renamed[node.output[0]] = node.input[0]
            continue
        if node.op_type == "Reshape":
            _fix_target(source, node)
        nodes.append(node)
    source.nodes = nodes
    source.nodes = [norm for norm in nodes if not _fold_norm(source, norm)]
    source.nodes = _remove_unused(source, source.nodes)
    used_names = {name for node in source.nodes for name in (*node.input, *list_captured(node))} | set(source.outputs)
    source.weights = {name: tensor for name, tensor in source.weights.items() if name in used_names}


def attribute(node: NodeProto, name: str, default: object = None) -> object:
    """Return an attribute of a node as a Python value."""
    for item in node.attribute:
        if item.name == name:
            return helper.get_attribute_value(item)
    return default


def whole(node: NodeProto, name: str, default: int) -> int:
    """Return an integer attribute of a node."""
    value = attribute(node, name, default)
    return value if isinstance(value, int) else default


def add_weight(source: SourceModel, name: str, value: Array) -> None:
    """Add a constant to ``source``."""
    source.weights[name] = numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)


def _rename(node: NodeProto, renamed: dict[str, str]) -> None:
    for i, name in enumerate(node.input):
        if name in renamed:
            node.input[i] = renamed[name]
    for item in node.attribute:
        for nested in (*([item.g] if item.HasField("g") else []), *item.graphs):
            for graph in graphs_of(nested):
                for inner in graph.node:
                    for i, name in enumerate(inner.input):
                        inner.input[i] = renamed.get(name, name)
                for info in graph.output:
                    info.name = renamed.get(info.name, info.name)


def _is_known(source: SourceModel, node: NodeProto) -> bool:
    names = [name for name in node.output if name]
    if not all(name in source.constants and name not in source.outputs for name in names):
        return False
    for name in names:
        add_weight(source, name, source.constants[name])
    return True


def _rearrange(source: SourceModel, node: NodeProto) -> bool:
    names = [name for name in node.input if name]
    if node.op_type not in _REARRANGED or node.domain or not all(name in source.weights for name in names):
        return False
    output = node.output[0]
    if output in source.outputs:
        return False
    value = source.array(node.input[0])
    if node.op_type == "Transpose":
        order = attribute(node, "perm")
        value = np.transpose(value, list(order) if isinstance(order, list | tuple) else None)
    elif node.op_type == "Reshape":
        value = value.reshape([dim.at(1) for dim in source.values[output].dims])
    add_weight(source, output, value)
    return True


def _is_identity(source: SourceModel, node: NodeProto) -> bool:
    if node.output[0] in source.outputs or len([name for name in node.output if name]) > 1:
        return False
    if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
        training = source.weights.get(node.input[2])
        return training is not None and not numpy_helper.to_array(training).any()
    return True


def _fold_norm(source: SourceModel, norm: NodeProto) -> bool:
    """Fold a batch normalisation of constants into the convolution before it; return whether it could be."""
    if norm.op_type != "BatchNormalization" or norm.domain or len(norm.output) > 1:
        return False
    conv = source.maker(norm.input[0])
    if conv is None or conv.op_type != "Conv" or conv.domain or source.uses(norm.input[0]) > 1:
        return False
    constants = [name for name in (*conv.input[1:], *norm.input[1:5]) if name]
    if not all(name in source.weights for name in constants) or source.array(conv.input[1]).dtype.kind != "f":
        return False
    weight = source.array(conv.input[1])
    scale, shift, mean, variance = (np.asarray(source.array(name), np.float64) for name in norm.input[1:5])
    bias = np.asarray(source.array(conv.input[2]), np.float64) if len(conv.input) > 2 and conv.input[2] else 0.0
    epsilon = attribute(norm, "epsilon", 1e-5)
    factor = scale / np.sqrt(variance + (epsilon if isinstance(epsilon, float) else 0.0))
    folded = np.asarray(weight, np.float64) * factor.reshape(-1, *(1 for _ in weight.shape[1:]))
    names = [_new_name(source, f"{norm.output[0]}/{part}") for part in ("weight", "bias")]
    add_weight(source, names[0], folded.astype(weight.dtype))
    add_weight(source, names[1], ((bias - mean) * factor + shift).astype(weight.dtype))
    conv.input[:] = [conv.input[0], *names]
    conv.output[0] = norm.output[0]
    return True


def _new_name(source: SourceModel, name: str) -> str:
    while name in source.values or name in source.weights:
        name += "_"
    return name


def _fix_target(source: SourceModel, node: NodeProto) -> None:
    dims = source.values[node.output[0]].dims
    varying = [axis for axis, dim in enumerate(dims) if dim.per_batch]
    if node.input[1] in source.weights or len(varying) != 1 or any(dim.fixed == 0 for dim in dims if not dim.per_batch):
        return
    target = _new_name(source, f"{node.output[0]}/target")
    add_weight(source, target, np.array([-1 if dim.per_batch else dim.fixed for dim in dims], np.int64))
    node.input[1] = target


def _remove_unused(source: SourceModel, nodes: list[NodeProto]) -> list[NodeProto]:
    needed_names = set(source.outputs)
    used_nodes = []
    for node in reversed(nodes):
        if any(name in needed_names for name in node.output):
            used_nodes.append(node)
            needed_names |= {*node.input, *list_captured(node)}
    return used_nodes[::-1]
