"""The GK-Estimator: start times along the graph, sets of concurrent kernels, and what they need together."""

from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench.published_ops import make_table
from gpuprof.domain.catalogue import device
from gpuprof.domain.model import ModelGraph, Op, Tensor
from gpuprof.domain.share import Share
from gpuprof.estimators.creq import SOURCE as CREQ_SOURCE
from gpuprof.estimators.creq import LaunchModel, achieved_occupancy_pct, shipped_creq
from gpuprof.estimators.cross_gpu.features import rates_of
from gpuprof.estimators.cross_gpu.kernels import parse_execution
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.estimators.gk import (
    SOURCE,
    GkEstimator,
    Kernel,
    KernelTable,
    Launch,
    concurrent_sets,
    launch_times,
    memory_bytes,
    read_kernel_table,
    require,
)
from gpuprof.estimators.learned.training_set import facts_of_op
from gpuprof.estimators.measured.measured import CREQ_METRICS
from gpuprof.estimators.memory import peak_activation_bytes
from gpuprof.kernel_db.schema import KernelRow, ModelRow, OpRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run
from gpuprof.profiling.timeline.creq import compute_requirement
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build
from tests.estimators.rows import GPU, database, measured_row, two_layers, with_kernels


def _tensor(name: str, elements: int = 1000) -> Tensor:
    return Tensor(name, "float32", (elements,))


def _op(name: str, kind: str, reads: list[str], makes: str, elements: int = 1000) -> Op:
    inputs = tuple(_tensor(read, elements) for read in reads)
    return Op(name, kind, "", inputs, (_tensor(makes, elements),), (), {"name": name}, 10, 100, 100)


def _graph(*ops: Op) -> ModelGraph:
    return ModelGraph("net", 1, ops, (_tensor("x"),), (ops[-1].outputs[0],), (), 17, "", "")


#: An Inception block in small: two branches from one input, joined.
BRANCHES = _graph(
    _op("stem", "Conv", ["x"], "a"),
    _op("left", "Conv", ["a"], "b"),
    _op("right", "Pool", ["a"], "c"),
    _op("join", "Concat", ["b", "c"], "y"),
)


def _table(**kernels: list[Kernel]) -> KernelTable:
    by_name = {op.name: op for op in BRANCHES.ops}
    return KernelTable(
        GPU,
        {by_name[name].signature: launched for name, launched in kernels.items()},
        {by_name[name].signature: facts_of_op(by_name[name], 1) for name in kernels},
    )


TABLE = _table(
    stem=[Kernel("pad", 1000.0, 20.0, 50.0), Kernel("conv", 9000.0, 60.0, 90.0)],
    left=[Kernel("conv", 5000.0, 70.0, 100.0)],
    right=[Kernel("pool", 2000.0, 25.0, 40.0)],
    join=[Kernel("copy", 1000.0, 10.0, 10.0)],
)


def test_a_kernel_starts_when_what_it_reads_is_there() -> None:
    launches, unknown = launch_times(BRANCHES, TABLE)
    assert [(launch.op, launch.start_ns) for launch in launches] == [
        (0, 0.0),
        (0, 1000.0),
        (1, 10000.0),
        (2, 10000.0),
        (3, 15000.0),
    ]
    assert unknown == ()


def test_branches_run_at_once_and_need_the_sum() -> None:
    requirement = require(BRANCHES, TABLE)
    assert requirement.max_occupancy_pct == 95.0
    assert requirement.wavg_occupancy_pct == pytest.approx((20.0 * 1 + 60.0 * 9 + 95.0 * 5 + 10.0 * 1) / 16)
    assert requirement.wavg_sm_util_pct == pytest.approx((50.0 * 1 + 90.0 * 9 + 100.0 * 5 + 10.0 * 1) / 16)
    assert requirement.latency_ms == pytest.approx(0.018)


def test_a_host_that_launches_more_slowly_than_the_device_runs_leaves_gaps_that_averages_count() -> None:
    quick, slow = require(BRANCHES, TABLE, host_ms=0.015), require(BRANCHES, TABLE, host_ms=0.032)
    assert quick == require(BRANCHES, TABLE)  # the kernels take 0.016 ms
    assert slow.max_occupancy_pct == quick.max_occupancy_pct
    assert slow.wavg_occupancy_pct == pytest.approx((quick.wavg_occupancy_pct or 0.0) / 2.0)
    assert slow.wavg_sm_util_pct == pytest.approx((quick.wavg_sm_util_pct or 0.0) / 2.0)
    blind = _table(**{op.name: [Kernel("k", 1000.0)] for op in BRANCHES.ops})
    assert require(BRANCHES, blind, host_ms=1.0).wavg_occupancy_pct is None


def test_tau_decides_what_is_concurrent() -> None:
    kernel = Kernel("k", 10.0)
    launches = [Launch(0, kernel, 0.0), Launch(1, kernel, 900.0), Launch(2, kernel, 1800.0), Launch(2, kernel, 1900.0)]
    assert [len(members) for members in concurrent_sets(launches, 1000.0)] == [2, 1, 1]
    assert [len(members) for members in concurrent_sets(launches, 2000.0)] == [3, 1]
    assert [len(members) for members in concurrent_sets(launches, 0.0)] == [1, 1, 1, 1]


def test_an_op_never_seen_has_the_kernels_of_the_nearest_of_its_type() -> None:
    bigger = replace(BRANCHES.ops[1], flops=40, bytes_read=400, bytes_written=400)
    nearest = TABLE.kernels_of("never seen", facts_of_op(bigger, 1))
    assert nearest is not None and {kernel.name for kernel in nearest} <= {"pad", "conv"}


def test_memory_is_what_is_alive_at_once() -> None:
    # a and b and c are alive together while the right branch runs; x is gone by then.
    assert peak_activation_bytes(BRANCHES) == 3 * 4000
    assert memory_bytes(BRANCHES) == 3 * 4000


def test_a_view_shares_its_inputs_memory() -> None:
    chain = _graph(_op("one", "Relu", ["x"], "a"), _op("two", "Reshape", ["a"], "b"), _op("three", "Relu", ["b"], "y"))
    assert peak_activation_bytes(chain) == 2 * 4000


def test_the_table_is_read_from_the_database_with_medians_over_repeats(tmp_path: Path) -> None:
    op = BRANCHES.ops[0]
    row = OpRow("r1", "net", GPU.name, 1, 0, "stem", "Conv", op.signature, shapes="1000->1000", dtype="float32")
    kernels = [
        KernelRow("r1", "net", GPU.name, 1, name, position, repeat, op_signature=op.signature, op_name="stem",
                  duration_ns=duration + 10 * repeat, achieved_occupancy_pct=50.0)
        for repeat in range(3)
        for position, (name, duration) in enumerate((("pad", 100), ("conv", 900)))
    ]  # fmt: skip
    db = KernelDb.create(tmp_path / "db")
    run = RunRow("r1", datetime(2026, 1, 1, tzinfo=UTC), GPU.name, "test", "net")
    db.append(Run(run, ops=[row], kernels=kernels))
    launched = read_kernel_table(db, GPU).kernels_of(op.signature, facts_of_op(op, 1))
    assert launched == (Kernel("pad", 110.0, 50.0), Kernel("conv", 910.0, 50.0))


def test_sm_utilisation_is_of_the_launch_as_in_a_profile_and_not_the_activity_that_is_counted(tmp_path: Path) -> None:
    op, v100 = BRANCHES.ops[0], device("v100")
    row = OpRow("r1", "net", "v100", 1, 0, "stem", "Conv", op.signature, shapes="1000->1000", dtype="float32")
    kernel = KernelRow("r1", "net", "v100", 1, "k", 0, 0, op_signature=op.signature, op_name="stem", start_ns=0,
                       duration_ns=900, sm_active_pct=12.0, grid_x=100, grid_y=1, grid_z=1, block_x=256, block_y=1,
                       block_z=1, registers_per_thread=32)  # fmt: skip
    db = KernelDb.create(tmp_path / "db")
    db.append(Run(RunRow("r1", datetime(2026, 1, 1, tzinfo=UTC), "v100", "test", "net"), ops=[row], kernels=[kernel]))
    launched = read_kernel_table(db, v100).kernels_of(op.signature, facts_of_op(op, 1))
    profiled = compute_requirement(pd.DataFrame([asdict(kernel)]), None, v100)
    assert launched is not None and profiled is not None
    assert launched[0].sm_util_pct == profiled.wavg_sm_util_pct == pytest.approx(100.0 * 13 / 80)  # eight blocks an SM
    blind = read_kernel_table(db, replace(v100, sm=None)).kernels_of(op.signature, facts_of_op(op, 1))
    assert blind is not None and blind[0].sm_util_pct is None


def test_a_model_takes_what_its_kernels_take_together(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "two.onnx")
    estimate = GkEstimator(with_kernels(tmp_path / "db", path, duration_ns=50_000)).estimate(str(path), GPU, 1, Share())
    assert estimate.latency_ms.value == pytest.approx(3 * 0.05) and estimate.latency_ms.source == SOURCE
    assert estimate.creq("max_occupancy") is not None and estimate.creq("max_occupancy").value == 50.0  # type: ignore[union-attr]
    assert estimate.creq("wavg_occupancy") == estimate.creq("max_occupancy")
    assert estimate.memory_bytes is not None and estimate.memory_bytes.value > 2 * 64 * 64 * 4


def test_averages_are_over_the_gaps_between_kernels_that_end_sooner_than_the_host_launches(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "two.onnx")
    estimate = GkEstimator(with_kernels(tmp_path / "db", path, duration_ns=1100)).estimate(str(path), GPU, 1, Share())
    most, average = estimate.creq("max_occupancy"), estimate.creq("wavg_occupancy")
    assert most is not None and average is not None
    assert most.value == 50.0 and average.value < 45.0


def test_an_op_type_without_kernels_is_named_and_widens_the_interval(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "two.onnx")
    db = with_kernels(tmp_path / "db", path, types=("MatMul",))
    estimate = GkEstimator(db).estimate(str(path), GPU, 1, Share())
    assert estimate.unknown_ops == ("Relu",)
    assert estimate.latency_ms.value > 2 * 0.005 and estimate.latency_ms.upper() > 1.5 * estimate.latency_ms.value


def test_the_interval_is_what_measured_models_were_off_by(tmp_path: Path) -> None:
    files = [two_layers(tmp_path / f"net{i}.onnx", 32 + i) for i in range(4)]
    db = with_kernels(tmp_path / "db", files[0])
    rows = [measured_row(file.stem, 1, 2.0 * 0.015, device=GPU.name, path=str(file), run_id="r2") for file in files]
    database(tmp_path / "db", rows, run_id="r2")
    latency = GkEstimator(KernelDb(db.path)).estimate("net0", GPU, 1, Share()).latency_ms
    assert latency.high == pytest.approx(2.0 * latency.value, rel=0.05) and latency.low == pytest.approx(
        latency.value / 2.0, rel=0.05
    )


V100 = device("v100")
EAGER = parse_execution("float32", "eager")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("creq") / "network.onnx"
    build(find_architecture("random_cnn"), path)
    return path


def _creq(path: Path, batch: int, sm_pct: float = 100.0) -> dict[str, float]:
    estimate = DatabaseEstimator(None, {"net": path}, execution=EAGER).estimate("net", V100, batch, Share(sm_pct))
    return {metric: figure.value for metric, figure in estimate.creq_pct}


def test_averages_grow_with_the_batch_until_the_gpu_is_full(network: Path) -> None:
    requirements = [_creq(network, batch) for batch in (1, 8, 64, 512)]
    for metric in ("wavg_occupancy", "wavg_sm_util"):
        values = [requirement[metric] for requirement in requirements]
        assert values == sorted(values)
        assert values[0] < 0.5 * values[-1]
    assert requirements[-1]["wavg_sm_util"] > 80.0


def test_every_requirement_has_a_source_and_an_interval_within_a_hundred(network: Path) -> None:
    estimate = DatabaseEstimator(None, {"net": network}, execution=EAGER).estimate("net", V100, 12, Share())
    assert [metric for metric, _ in estimate.creq_pct] == list(CREQ_METRICS)
    for _, figure in estimate.creq_pct:
        assert figure.source == f"{CREQ_SOURCE}: float32, pytorch-eager" and not figure.is_observed
        assert figure.low is not None and figure.high is not None
        assert 0.0 <= figure.low <= figure.value <= figure.high <= 100.0


def test_what_was_profiled_is_never_mixed_with_predictions(tmp_path: Path) -> None:
    rows: list[ModelRow] = [measured_row("net", 4, 5.0, device="v100")]
    estimator = DatabaseEstimator(database(tmp_path / "db", rows), {})
    assert estimator.estimate("net", V100, 4, Share()).creq_pct == ()


def test_under_a_part_of_the_gpu_nothing_is_said(network: Path) -> None:
    assert _creq(network, 4, 50.0) == {}


def test_a_grid_of_one_block_a_processor_has_no_tail_and_many_waves_come_near_to_all() -> None:
    occupancy = achieved_occupancy_pct(np.array([64.0, 64.0, 16.0]), np.array([0.5, 1000.0, 1000.0]), V100)
    assert occupancy[:2] == pytest.approx(94.5, abs=0.1)
    assert occupancy[2] == pytest.approx(94.5 / 4, abs=0.1)


def test_a_wide_elementwise_op_fills_the_gpu_and_a_small_one_few_processors() -> None:
    model: LaunchModel = shipped_creq()[0]
    sizes = np.array([2.0**12, 2.0**26])
    ops = make_table("elementwise", 2, read_bytes=4 * sizes, written_bytes=4 * sizes, elements=sizes, width=4.0)
    predicted = model.predict(ops, V100, rates_of(V100, "float32"))
    assert predicted.sm_utilization_pct[0] < 10.0 < 99.0 < predicted.sm_utilization_pct[1]
    assert predicted.occupancy_pct[1] > 90.0
