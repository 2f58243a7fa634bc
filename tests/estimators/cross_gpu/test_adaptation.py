"""A few measured ops of a GPU move the estimates for it, narrow their intervals, and leave the rest as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.estimators.cross_gpu.adaptation import Adaptation, adapt
from gpuprof.estimators.cross_gpu.cross_gpu import shipped_model
from gpuprof.estimators.cross_gpu.execution import parse_execution
from gpuprof.estimators.cross_gpu.features import bound_times
from gpuprof.estimators.cross_gpu.kernels import LaunchMode, list_kernels
from gpuprof.estimators.cross_gpu.measured_ops import TimedOp, adapt_model, read_timed_ops
from gpuprof.estimators.cross_gpu.rates import rates_of
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import PER_OP, OpRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run
from gpuprof.profiling.cpu.op_rows import op_facts
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build


def _adapt(ratio: np.ndarray, kind: str = "product 4") -> Adaptation:
    return adapt(np.full(len(ratio), kind), ratio, np.full(len(ratio), 0.3))


def test_measurements_move_estimates_to_them_the_more_the_better() -> None:
    ratio = 1.3 * np.exp(np.random.default_rng(2).normal(0, 0.03, 100))
    errors = [0.3 / 1.3]
    for count in (5, 20, 100):
        shift, left = _adapt(ratio[:count]).correct(np.array(["product 4"]))
        errors.append(abs(float(np.exp(shift[0])) / 1.3 - 1.0))
        assert (left[0] == 1.0) == (count < 9)  # nine of ten cannot be said of fewer
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02 and left[0] < 0.3


def test_a_kind_that_was_not_measured_stays_as_predicted() -> None:
    shift, left = _adapt(np.full(50, 1.5)).correct(np.array(["softmax 4", "product 2"]))
    assert list(shift) == [0.0, 0.0] and list(left) == [1.0, 1.0]


def test_deviations_wider_than_on_other_gpus_widen_no_interval() -> None:
    _, left = _adapt(np.exp(np.random.default_rng(3).normal(0, 2.0, 50))).correct(np.array(["product 4"]))
    assert left[0] == 1.0


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adaptation") / "transformer_encoder.onnx"
    build(find_architecture("transformer_encoder"), path)
    return path


def _database(path: Path, network: Path, slower: Callable[[str], float], gpu: str = "t4") -> KernelDb:
    """Return a database of the ops of a network, each so many times slower than it is estimated."""
    graph = load_graph(network, 8)
    rates = rates_of(device(gpu), "float32")
    rows: list[OpRow] = []
    for op in graph.ops:
        kernels = list_kernels(replace(graph, ops=(op,)), "float32", LaunchMode.EAGER)
        if len(kernels.ops) == 1:
            seconds = shipped_model().kernel_times(kernels.ops, rates)[0] * slower(op.op_type)
            rows.append(
                OpRow(
                    run_id="r1", model="net", device=gpu, batch=8, position=len(rows), name=op.name, **op_facts(op),
                    duration_mean_ns=round(seconds * 1e9), runtime="pytorch", execution="eager", precision="float32",
                )
            )  # fmt: skip
    database = KernelDb.create(path)
    run = RunRow(run_id="r1", started_at=datetime.now(UTC), device=gpu, collector="nsys", model="net")
    database.append(Run(run, ops=rows))
    return database


def test_a_profile_of_ops_moves_the_model_and_another_gpu_stays(network: Path, tmp_path: Path) -> None:
    database = _database(tmp_path / "db", network, lambda op_type: 1.5)
    execution = parse_execution("float32", "eager")
    plain = DatabaseEstimator(None, execution=execution)
    moved = DatabaseEstimator(database, execution=execution)
    for batch in (64, 512):
        before, after = (
            estimator.estimate(str(network), device("t4"), batch, Share()).latency_ms for estimator in (plain, moved)
        )
        assert 1.15 < after.value / before.value < 1.6  # products of other sizes than measured move less
        assert after.upper() / after.value < before.upper() / before.value
        assert "ops measured" in after.source
    elsewhere = [estimator.estimate(str(network), device("l4"), 64, Share()).latency_ms for estimator in (plain, moved)]
    assert elsewhere[0] == elsewhere[1]


def test_no_measurement_makes_a_kernel_faster_than_the_peaks(network: Path, tmp_path: Path) -> None:
    database = _database(tmp_path / "db", network, lambda op_type: 0.05)
    gpu = device("t4")
    model = adapt_model(shipped_model(), gpu, read_timed_ops(database, "t4"))
    kernels = list_kernels(load_graph(network, 512), "float32", LaunchMode.EAGER)
    rates = rates_of(gpu, "float32")
    least = bound_times(kernels.ops, rates).hard_s.sum()
    assert least * (1 - 1e-9) <= model.time_parts(kernels, rates, LaunchMode.EAGER).kernels_s


def test_rows_that_say_nothing_of_a_kernel_are_left_out() -> None:
    shapes, flops = "4096x4096,4096x4096->4096x4096", 2 * 4096**3
    row = TimedOp(PER_OP, "Gemm", shapes, "float32", None, flops, 1, 1, 1, 30_000_000, "pytorch", "float32")
    odd = [
        replace(row, shapes=None),
        replace(row, shapes="64x32"),
        replace(row, shapes="a,b->c"),
        replace(row, attributes=json.dumps([1])[:-1]),
        replace(row, precision="fp8"),
        replace(row, op_type="Reshape"),
        replace(row, op_type="Softmax", shapes="->"),
    ]
    assert adapt_model(shipped_model(), device("t4"), odd) is shipped_model()
    adapted = adapt_model(shipped_model(), device("t4"), [row, *odd]).adaptation
    assert adapted is not None and adapted.ops == 1
