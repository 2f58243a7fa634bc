"""Small synthetic databases and graphs for the tests of the estimators."""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from gpuprof.domain.device import Device
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import ColocationRow, DeviceRow, KernelRow, ModelRow, OpRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run
from tests.small_models import write_model

CPU = Device("cpu-test-4c", "cpu", 4, 2000.0, {"float32": 1e11}, 2**33, 1e10, 2**25)
GPU = Device("gpu-test", "gpu", 80, 1500.0, {"float32": 1e13}, 2**34, 1e12, 2**22)


def database(
    path: Path,
    models: Iterable[ModelRow] = (),
    devices: Iterable[DeviceRow] = (),
    colocations: Iterable[ColocationRow] = (),
    ops: Iterable[OpRow] = (),
    run_id: str = "r1",
) -> KernelDb:
    """Write one run into a new or existing database."""
    db = KernelDb.create(path)
    run = RunRow(run_id, datetime(2026, 1, 1, tzinfo=UTC), CPU.name, "test", "any")
    db.append(Run(run, tuple(devices), tuple(models), tuple(ops), (), tuple(colocations)))
    return db


def measured_row(
    model: str,
    batch: int,
    latency_ms: float,
    *,
    device: str = CPU.name,
    share: float = 100.0,
    processes: int = 1,
    run_id: str = "r1",
    memory: int | None = None,
    std_ms: float | None = None,
    repeats: int | None = None,
    stable: bool | None = True,
    path: str | None = None,
    sha256: str | None = None,
    mig: str | None = None,
) -> ModelRow:
    """Return a row of the table ``models``."""
    return ModelRow(
        run_id, model, device, batch, share, mig, processes, sha256, path, stable, repeats, latency_ms, std_ms,
        memory_peak_bytes=memory,
    )  # fmt: skip


def two_layers(path: Path, width: int = 64, middle: str = "Relu") -> Path:
    """Write a small network with a free batch: width → width → relu, or an op of nobody's → width."""
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="first"),
        helper.make_node(middle, ["a"], ["b"], name="relu", domain="" if middle == "Relu" else "nobody"),
        helper.make_node("MatMul", ["b", "w1"], ["y"], name="second"),
    ]
    weights = {name: np.full((width, width), 0.01, np.float32) for name in ("w0", "w1")}
    write_model(path, nodes, {"x": ["N", width]}, {"y": ["N", width]}, weights)
    if middle != "Relu":  # whose shape must be declared
        model = onnx.load(path)
        model.graph.value_info.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, ["N", width]))
        onnx.save(model, path)
    return path


def with_kernels(
    path: Path, model: Path, duration_ns: int = 5000, types: Iterable[str] = ("MatMul", "Relu")
) -> KernelDb:
    """Write a database in which every op of these types launched one kernel on the GPU."""
    graph = load_graph(model)
    ops = [(position, op) for position, op in enumerate(graph.ops) if op.op_type in types]
    db = KernelDb.create(path)
    run = RunRow("k1", datetime(2026, 1, 1, tzinfo=UTC), GPU.name, "test", "any")
    rows = [
        OpRow("k1", graph.name, GPU.name, 1, position, op.name, op.op_type, op.signature, dtype="float32",
              flops=op.flops, bytes_read=op.bytes_read, bytes_written=op.bytes_written)
        for position, op in ops
    ]  # fmt: skip
    kernels = [
        KernelRow("k1", graph.name, GPU.name, 1, f"kernel{position}", position, 0, op_signature=op.signature,
                  op_name=op.name, duration_ns=duration_ns, achieved_occupancy_pct=50.0)
        for position, op in ops
    ]  # fmt: skip
    db.append(Run(run, ops=rows, kernels=kernels))
    return db
