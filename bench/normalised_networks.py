"""Rewrites networks of the zoo so that their nodes are those that PyTorch launches for the same architecture."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import GraphProto, NodeProto, helper

#: Networks of the zoo whose files have the batch normalisations folded into its convolutions; PyTorch runs them.
_FOLDED = frozenset({"mobilenet_v2", "resnet18", "resnet101"})


def write_unfolded(name: str, source: Path, target: Path) -> None:
    """Write the network with a batch normalisation behind each convolution, and none of Caffe's scale layers."""
    model = onnx.load(str(source))
    nodes = _drop_scales(model.graph)
    if name in _FOLDED:
        nodes = _add_normalisations(model.graph, nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, str(target))


def write_normalised(path: Path) -> None:
    """Put a batch normalisation behind each convolution of the network at ``path``, whose export folded them."""
    model = onnx.load(str(path), load_external_data=False)
    nodes = _add_normalisations(model.graph, list(model.graph.node))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, str(path))


def _drop_scales(graph: GraphProto) -> list[NodeProto]:
    """Return the nodes without Caffe's layers: ``Mul`` and ``Add`` of constants behind a batch normalisation."""
    made = {name: node for node in graph.node for name in node.output}
    constant = {tensor.name for tensor in graph.initializer}
    constant |= {name for node in graph.node if node.op_type in ("Constant", "Unsqueeze") for name in node.output}
    instead: dict[str, str] = {}
    for node in graph.node:
        wanted = {"Mul": "BatchNormalization", "Add": "Mul"}.get(node.op_type)
        data = [name for name in node.input if name not in constant]
        if wanted is None or len(data) != 1 or len(node.input) != 2 or data[0] not in made:
            continue
        before = made[data[0]]
        if before.op_type == wanted and (wanted != "Mul" or before.output[0] in instead):
            instead[node.output[0]] = instead.get(data[0], data[0])
    kept = []
    for node in graph.node:
        if node.output[0] in instead:
            continue
        node.input[:] = [instead.get(name, name) for name in node.input]
        kept.append(node)
    return kept


def _add_normalisations(graph: GraphProto, nodes: list[NodeProto]) -> list[NodeProto]:
    channels = {tensor.name: tensor.dims[0] for tensor in graph.initializer if len(tensor.dims) > 2}
    kept = []
    for node in nodes:
        kept.append(node)
        if node.op_type != "Conv" or node.input[1] not in channels:
            continue
        output, count = node.output[0], channels[node.input[1]]
        node.output[0] = f"{output}_convolved"
        weights = [f"{output}_{part}" for part in ("scale", "shift", "mean", "variance")]
        for weight in weights:
            graph.initializer.append(helper.make_tensor(weight, onnx.TensorProto.FLOAT, [count], [1.0] * count))
        kept.append(helper.make_node("BatchNormalization", [node.output[0], *weights], [output]))
    return kept
