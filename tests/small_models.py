"""Small ONNX models written for tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, TypeProto, helper, numpy_helper, parser

Dims = Sequence[int | str | None]


def write_model(
    path: Path,
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, Dims],
    outputs: Mapping[str, Dims | TypeProto | None],
    weights: Mapping[str, np.ndarray] | None = None,
    *,
    opset: int = 17,
    ir_version: int = 8,
    types: Mapping[str, int] | None = None,
) -> Path:
    """Write a model of float tensors, where ``types`` does not say otherwise, and return its path."""
    kinds = types or {}

    def info(name: str, dims: Dims | TypeProto | None) -> onnx.ValueInfoProto:
        if isinstance(dims, TypeProto):
            return helper.make_value_info(name, dims)
        return helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), dims)

    graph = helper.make_graph(
        list(nodes),
        "test",
        [info(name, dims) for name, dims in inputs.items()],
        [info(name, dims) for name, dims in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    domains = {"": opset} | {node.domain: 3 if node.domain == "ai.onnx.ml" else 1 for node in nodes if node.domain}
    opsets = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version), path)
    return path


def write_text(
    path: Path, text: str, weights: Mapping[str, np.ndarray] | None = None, opset: int = 17, ir_version: int = 8
) -> Path:
    """Write the model of a text ``(inputs) => (outputs) { nodes }`` in ONNX's syntax and return its path."""
    model = parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": {opset}, "com.microsoft": 1]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in (weights or {}).items())
    onnx.save(model, path)
    return path


def floats(*shape: int) -> np.ndarray:
    """Return float32 numbers that are all different."""
    size = int(np.prod(shape))
    return (np.arange(size, dtype=np.float32) / np.float32(max(1, size)) - 0.5).reshape(shape)


def integers(*values: int) -> np.ndarray:
    """Return a list of int64."""
    return np.array(values, np.int64)


def write_text_model(path: Path, width: int = 64, tokens: int = 256) -> Path:
    """Write a model of token ids ``[batch, seq]``: a table, attention over the sequence, and its mean."""
    text = f"""(int64[batch,seq] ids) => (float[batch,{width}] y) {{ x = Gather (table, ids) q = MatMul (x, w)
        k = Transpose <perm = [0,2,1]> (x) scores = MatMul (q, k) parts = Softmax <axis = -1> (scores)
        mixed = MatMul (parts, x) y = ReduceMean <axes = [1], keepdims = 0> (mixed) }}"""
    return write_text(path, text, {"table": floats(tokens, width), "w": floats(width, width)})


def write_classifier(path: Path) -> Path:
    """Write a model of ``ai.onnx.ml`` as scikit-learn's converter does: scaled numbers, a label, a map of scores each.

    Its input is ``x`` of shape [batch, 2], its outputs are ``label`` and ``scores``, a map of 7 and 9 for each item.
    """
    domain = "ai.onnx.ml"
    nodes = [
        helper.make_node("Scaler", ["x"], ["scaled"], domain=domain, offset=[0.0, 0.0], scale=[1.0, 1.0]),
        helper.make_node(
            "LinearClassifier", ["scaled"], ["label", "table"], domain=domain, classlabels_ints=[7, 9],
            coefficients=[1.0, 0.0, 0.0, 1.0], intercepts=[0.0, 0.0], post_transform="NONE",
        ),
        helper.make_node("ZipMap", ["table"], ["scores"], domain=domain, classlabels_int64s=[7, 9]),
    ]  # fmt: skip
    scores = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    outputs: dict[str, Dims | TypeProto] = {"label": ["batch"], "scores": helper.make_sequence_type_proto(scores)}
    return write_model(path, nodes, {"x": ["batch", 2]}, outputs, types={"label": TensorProto.INT64})


def write_encoder(path: Path) -> Path:
    """Write a model of texts: ``city`` [batch, 1], one of three, and ``y``, which of them it is."""
    nodes = [
        helper.make_node(
            "OneHotEncoder", ["city"], ["y"], domain="ai.onnx.ml", cats_strings=["oslo", "rome", "lima"], zeros=0
        )
    ]
    return write_model(path, nodes, {"city": ["batch", 1]}, {"y": ["batch", 1, 3]}, types={"city": TensorProto.STRING})


def write_splitter(path: Path) -> Path:
    """Write a model whose output ``parts`` is a sequence of the rows of its input ``x`` [batch, 2]."""
    nodes = [helper.make_node("SplitToSequence", ["x"], ["parts"], axis=0)]
    parts = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    return write_model(path, nodes, {"x": ["batch", 2]}, {"parts": parts})
