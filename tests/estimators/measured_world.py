"""A device whose ops obey a law, and networks measured on it: what regressors can be tested on without waiting."""

import json
from pathlib import Path

import numpy as np
from onnx import helper

from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.domain.share import Share
from gpuprof.estimators.learned.training_set import facts_of_op, roofline_ns
from gpuprof.estimators.memory import arena_footprint
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import ModelRow, OpRow
from gpuprof.kernel_db.store import KernelDb
from tests.estimators.rows import CPU, database, measured_row
from tests.small_models import write_model

BATCHES = (1, 2, 4, 8)


def convolutional(path: Path, channels: tuple[int, ...], side: int = 16) -> Path:
    """Write a chain of 3 × 3 convolutions with ReLU behind each, and a dense layer, with a free batch."""
    nodes, weights, below, value = [], {}, 3, "x"
    for i, width in enumerate(channels):
        weights[f"w{i}"] = np.full((width, below, 3, 3), 0.01, np.float32)
        nodes.append(helper.make_node("Conv", [value, f"w{i}"], [f"c{i}"], name=f"conv{i}", pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{i}"], [f"r{i}"], name=f"relu{i}"))
        below, value = width, f"r{i}"
    weights["dense"] = np.full((below, 10), 0.01, np.float32)
    nodes.append(helper.make_node("GlobalAveragePool", [value], ["pooled"], name="pool"))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["flat"], name="flatten"))
    nodes.append(helper.make_node("MatMul", ["flat", "dense"], ["y"], name="last"))
    return write_model(path, nodes, {"x": ["N", 3, side, side]}, {"y": ["N", 10]}, weights)


def true_ns(op: Op, batch: int) -> float:
    """Return what an op takes on this device: half of its peak, and a microsecond to start."""
    least = float(roofline_ns([facts_of_op(op, batch)], CPU, Share())[0])
    return 2.0 * least + 1000.0


def true_bytes(graph: ModelGraph) -> int:
    """Two copies of the weights, half more than the arena reserves, and a fixed part."""
    return 2 * graph.weight_bytes + arena_footprint(graph).reserved * 3 // 2 + 100_000


def measure(folder: Path, networks: dict[str, tuple[int, ...]]) -> KernelDb:
    """Write networks and what they take: ReLUs are executed as part of their convolution."""
    ops: list[OpRow] = []
    models: list[ModelRow] = []
    for name, channels in networks.items():
        path = convolutional(folder / f"{name}.onnx", channels)
        for batch in BATCHES:
            graph = load_graph(path, batch, name=name)
            rows = [_op_row(graph, position, op) for position, op in enumerate(graph.ops)]
            latency = sum(row.duration_p50_ns or 0 for row in rows) / 1e6
            memory = true_bytes(graph)
            ops += rows
            models.append(
                measured_row(
                    name, batch, latency, path=str(path), sha256=graph.sha256, memory=memory, std_ms=0.01 * latency
                )
            )
    return database(folder / "db", models, ops=ops)


def _op_row(graph: ModelGraph, position: int, op: Op) -> OpRow:
    fused = op.op_type == "Relu"
    time = None if fused else round(true_ns(op, graph.batch))
    return OpRow(
        "r1", graph.name, CPU.name, graph.batch, position, op.name, op.op_type, op.signature,
        shapes=f"{_text(op.inputs)}->{_text(op.outputs)}", dtype="float32",
        attributes=json.dumps(op.attributes, default=str), flops=op.flops, bytes_read=op.bytes_read,
        bytes_written=op.bytes_written, weight_bytes=op.weight_bytes, duration_p50_ns=time,
    )  # fmt: skip


def _text(tensors: tuple[Tensor, ...]) -> str:
    return ",".join("x".join(map(str, tensor.shape)) for tensor in tensors)
