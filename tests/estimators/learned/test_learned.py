"""Regressors of op times and memory: what they learn, carry over, promise, keep on disk and refuse."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

import gpuprof
from gpuprof.domain.catalogue import device
from gpuprof.domain.device import Device
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.creq import predict_graph
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.estimators.held_out import (
    CONSTANT,
    ROOFLINE,
    SCALED,
    UNSEEN,
    Prediction,
    coverage,
    leave_one_architecture_out,
    predict_left_out_batches,
    summarise_errors,
)
from gpuprof.estimators.learned.learned import (
    LearnedModel,
    fit,
    fit_requirements,
    fit_with_intervals,
    load_model,
    predict_requirement,
    save_model,
)
from gpuprof.estimators.learned.training_set import (
    FEATURES,
    NODE_NS,
    Array,
    ModelCase,
    OpFacts,
    OpTimes,
    TrainingSet,
    database_graphs,
    expected_ns,
    facts_of_op,
    facts_of_row,
    feature_matrix,
    group_facts,
    kind_of,
    leave_out_architecture,
    load_training_set,
    measured_groups,
    name_architectures,
    optimized_groups,
    regressor_features,
    roofline_ns,
    working_set_bytes,
)
from gpuprof.estimators.roofline import work_of
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import ModelRow, OpRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id
from tests.estimators.measured_world import convolutional, measure, true_bytes
from tests.estimators.rows import CPU, GPU, database, two_layers

NETWORKS = {"thin": (8, 8, 16), "wide": (32, 32), "deep": (8, 16, 16, 32, 32), "mixed": (16, 32, 16, 8)}
QUICK = ("lasso", "kernel_ridge", "gradient_boosting")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingSet]:
    folder = tmp_path_factory.mktemp("world")
    db = measure(folder, NETWORKS)
    return folder, load_training_set(db, CPU, database_graphs(db))


@pytest.fixture(scope="module")
def model(world: tuple[Path, TrainingSet]) -> LearnedModel:
    return fit_with_intervals(world[1], QUICK)


def test_a_row_of_the_database_and_its_node_of_the_graph_have_equal_features(world: tuple[Path, TrainingSet]) -> None:
    folder, _ = world
    from gpuprof.kernel_db.records import read_records
    from gpuprof.kernel_db.store import KernelDb

    graph = load_graph(folder / "thin.onnx", 4, name="thin")
    rows = read_records(KernelDb(folder / "db"), OpRow, {"model": "thin", "batch": 4})
    rows.sort(key=lambda row: row.position)
    of_rows = feature_matrix([facts_of_row(row) for row in rows], CPU, Share())
    of_graph = feature_matrix([facts_of_op(op, 4) for op in graph.ops], CPU, Share())
    assert of_rows.shape == (len(graph.ops), len(FEATURES))
    assert of_rows == pytest.approx(of_graph)


def test_convolutions_are_told_apart_by_window_and_groups(tmp_path: Path) -> None:
    conv = facts_of_op(load_graph(convolutional(tmp_path / "c.onnx", (8,))).ops[0], 1)
    assert kind_of(conv) == "conv"
    assert kind_of(replace(conv, attributes={"kernel_shape": [1, 1]})) == "pointwise"
    weight = conv.inputs[1]
    grouped = replace(conv, attributes={"kernel_shape": [3, 3], "group": 8})
    assert kind_of(replace(grouped, inputs=(conv.inputs[0], (weight[0], 1, 3, 3)))) == "depthwise"
    assert kind_of(replace(grouped, inputs=(conv.inputs[0], (weight[0], 4, 3, 3)))) == "grouped"
    assert kind_of(replace(conv, op_type="Nobody")) == "other"


def test_each_architecture_has_an_op_once_and_ops_without_time_are_left_out(world: tuple[Path, TrainingSet]) -> None:
    _, data = world
    assert data.architectures == ("deep", "mixed", "thin", "wide")
    # 5 + 4 + 3 + 2 convolutions, a pool, a view and a product each; the second of "wide" is not like its first.
    assert data.ops is not None
    assert len(data.ops.times_ns) == sum(len(channels) + 3 for channels in NETWORKS.values()) * 4
    rest = leave_out_architecture(data, "deep").ops
    assert rest is not None and set(rest.groups) == {"mixed", "thin", "wide"}


def test_the_hash_of_the_data_changes_with_the_data(world: tuple[Path, TrainingSet], tmp_path: Path) -> None:
    db = measure(tmp_path, {"thin": (8, 8, 16)})
    assert load_training_set(db, CPU, database_graphs(db)).data_hash != world[1].data_hash


def test_an_unseen_network_is_predicted_from_the_law_of_its_ops(world: tuple[Path, TrainingSet]) -> None:
    _, data = world
    fitted = fit(leave_out_architecture(data, "mixed"), QUICK)
    case = next(case for case in data.cases if case.graph.name == "mixed" and case.graph.batch == 8)
    assert fitted.latency_ms(case.graph, case.share) == pytest.approx(case.latency_ms, rel=0.15)
    assert fitted.memory is not None and fitted.memory.peak_bytes(case.graph) == pytest.approx(
        case.memory_bytes, rel=0.1
    )
    assert case.roofline_ms < 0.7 * case.latency_ms


def test_memory_goes_on_in_proportion_beyond_the_batches_that_were_measured(world: tuple[Path, TrainingSet]) -> None:
    folder, data = world
    fitted = fit(data, ("lasso", "kernel_ridge"))
    graph = load_graph(folder / "wide.onnx", 512, name="wide")
    assert fitted.memory is not None and fitted.memory.peak_bytes(graph) == pytest.approx(true_bytes(graph), rel=0.05)


def test_intervals_hold_what_was_measured(model: LearnedModel, world: tuple[Path, TrainingSet]) -> None:
    for case in world[1].cases:
        latency = model.latency(case.graph, case.share)
        assert latency.low is not None and latency.low <= case.latency_ms <= latency.upper()


@pytest.mark.slow
def test_evaluation_leaves_out_and_beats_the_roofline(world: tuple[Path, TrainingSet]) -> None:
    predictions = leave_one_architecture_out(world[1], QUICK)
    summary = {(row.setting, row.quantity, row.predictor): row for row in summarise_errors(predictions)}
    stack, roofline = summary[UNSEEN, "latency", "stack"], summary[UNSEEN, "latency", ROOFLINE]
    assert stack.count == roofline.count == 16
    assert stack.median_pct < 0.5 * roofline.median_pct
    assert stack.coverage_pct is not None and roofline.coverage_pct is None
    assert {row.predictor for row in predictions} == {*QUICK, "stack", "allocation", ROOFLINE, SCALED, CONSTANT}


def test_a_fine_tuned_copy_under_another_name_does_not_teach_what_its_original_takes(tmp_path: Path) -> None:
    db = measure(tmp_path, NETWORKS | {"copy_of_mixed": NETWORKS["mixed"]})
    data = load_training_set(db, CPU, database_graphs(db))
    assert data.architectures == ("copy_of_mixed", "deep", "thin", "wide")
    assert {case.graph.name for case in data.cases if case.architecture == "copy_of_mixed"} == {
        "copy_of_mixed",
        "mixed",
    }
    rest = leave_out_architecture(data, "copy_of_mixed")
    assert rest.ops is not None
    assert {case.graph.name for case in rest.cases} == set(rest.ops.groups) == {"deep", "thin", "wide"}


def test_a_new_head_makes_no_new_architecture_and_another_width_does(tmp_path: Path) -> None:
    def read_network(name: str, channels: tuple[int, ...]) -> ModelGraph:
        return load_graph(convolutional(tmp_path / f"{name}.onnx", channels), name=name)

    original = read_network("original", (8,) * 12)
    head = original.ops[-1]
    weights = tuple(replace(weight, shape=tuple(2 * size for size in weight.shape)) for weight in head.weights)
    tuned = replace(original, name="tuned", ops=(*original.ops[:-1], replace(head, weights=weights)))
    names = name_architectures([tuned, read_network("wider", (16,) * 12), original])
    assert names == {"original": "original", "tuned": "original", "wider": "wider"}


def test_new_batches_are_predicted_from_the_others(world: tuple[Path, TrainingSet]) -> None:
    predictions = predict_left_out_batches(world[1])
    assert {row.batch for row in predictions} == {2, 4}
    assert max(row.error for row in predictions if row.quantity == "latency") < 0.05


def test_coverage_is_the_part_inside_the_interval_of_the_others() -> None:
    def one(model: str, measured: float) -> Prediction:
        return Prediction(UNSEEN, "latency", "stack", model, 1, measured, 1.0)

    steady = [one(name, 1.1) for name in "abc"]
    assert coverage(steady) == 1.0
    assert coverage([*steady, one("odd", 2.0)]) == pytest.approx(0.75)
    assert coverage(steady[:2]) is None


def test_an_architecture_that_alone_has_op_times_is_left_out_with_them(world: tuple[Path, TrainingSet]) -> None:
    ops = world[1].ops
    assert ops is not None
    mask = np.array([group == "deep" for group in ops.groups])
    only = OpTimes(ops.features[mask], ops.times_ns[mask], ops.least_ns[mask], ("deep",) * int(mask.sum()))
    data = replace(world[1], ops=only)
    assert leave_out_architecture(data, "deep").ops is None
    latencies = [row for row in leave_one_architecture_out(data, ("lasso",)) if row.quantity == "latency"]
    assert {row.predictor for row in latencies if row.model == "deep"} == {ROOFLINE, SCALED}
    assert {row.predictor for row in latencies if row.model == "thin"} == {ROOFLINE, SCALED, "lasso", "stack"}
    assert "deep" not in fit_with_intervals(data, ("lasso",)).residuals["latency"]


def test_one_architecture_cannot_be_left_out(tmp_path: Path) -> None:
    db = measure(tmp_path, {"thin": (8, 8)})
    with pytest.raises(InputError, match="needs two but there is 1"):
        leave_one_architecture_out(load_training_set(db, CPU, database_graphs(db)), QUICK)


@pytest.mark.slow
def test_what_is_kept_predicts_the_same(model: LearnedModel, world: tuple[Path, TrainingSet], tmp_path: Path) -> None:
    data = world[1]
    save_model(model, tmp_path, data.data_hash, data.architectures)
    kept = load_model(tmp_path, CPU, data.data_hash)
    case = data.cases[-1]
    assert kept.latency(case.graph, case.share) == model.latency(case.graph, case.share)
    assert kept.memory_figure(case.graph) == model.memory_figure(case.graph)


@pytest.mark.parametrize(
    ("key", "value"), [("schema", "gpuprof.learned/9"), ("features", ["log_flops"]), ("device", "other")]
)
def test_other_schemas_or_features_are_refused(model: LearnedModel, tmp_path: Path, key: str, value: object) -> None:
    manifest = save_model(model, tmp_path, "hash", ()) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), key: value}))
    with pytest.raises(InputError, match=f"no longer fits: {key} changed"):
        load_model(tmp_path, CPU)


def test_other_data_other_rates_and_a_changed_file_are_refused(model: LearnedModel, tmp_path: Path) -> None:
    folder = save_model(model, tmp_path, "hash", ())
    with pytest.raises(InputError, match="no longer fits: data_hash changed"):
        load_model(tmp_path, CPU, "other hash")
    with pytest.raises(InputError, match="no longer fits: rates changed"):
        load_model(tmp_path, replace(CPU, dram_bytes_per_s=1.0))
    (folder / "regressors.skops").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="is not what was trained"):
        load_model(tmp_path, CPU)


def test_a_file_that_would_make_foreign_objects_is_refused(model: LearnedModel, tmp_path: Path) -> None:
    import hashlib

    import skops.io

    folder = save_model(model, tmp_path, "hash", ())
    content = skops.io.dumps({"stack": Foreign()})
    (folder / "regressors.skops").write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["regressors_sha256"] = hashlib.sha256(content).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"would make tests\.estimators\.learned\.test_learned\.Foreign"):
        load_model(tmp_path, CPU)


class Foreign:
    """Something that no regressor has."""

    def __init__(self) -> None:
        self.values = np.zeros(2)


def test_the_default_estimator_asks_the_regressors_for_models_that_were_not_measured(
    model: LearnedModel, world: tuple[Path, TrainingSet], tmp_path: Path
) -> None:
    path = convolutional(tmp_path / "new.onnx", (16, 16, 32))
    estimator = DatabaseEstimator(None, learned=lambda device: model if device.name == CPU.name else None)
    estimate = estimator.estimate(str(path), CPU, 4, Share())
    assert estimate.latency_ms == model.latency(load_graph(path, 4), Share())
    assert estimate.memory_bytes is not None and estimate.memory_bytes.source == "allocation"
    assert estimator.estimate(str(path), GPU, 4, Share()).latency_ms.source.startswith("cross-gpu")


def test_a_device_without_ops_cannot_be_learnt(tmp_path: Path) -> None:
    db = database(tmp_path / "db")
    with pytest.raises(InputError, match="no ops were measured on cpu-test-4c"):
        load_training_set(db, CPU, database_graphs(db))


CACHED = replace(CPU, reread_bytes_per_s=((2**20, 1e11), (2**25, 5e10), (2**27, 1e10)))
_MATRIX = 1024
DENSE = OpFacts(
    "Gemm", "float32", ((1, _MATRIX), (_MATRIX, _MATRIX)), ((1, _MATRIX),), {}, 2.0 * _MATRIX**2,
    4.0 * (_MATRIX**2 + _MATRIX), 4.0 * _MATRIX, 4.0 * _MATRIX**2, 1,
)  # fmt: skip


def _expected_ns(ops: list[OpFacts], device: Device, share_pct: float = 100.0) -> Array:
    return expected_ns(regressor_features(ops, device, Share(share_pct)))


def test_on_a_cpu_arithmetic_and_traffic_add_up() -> None:
    moved = DENSE.bytes_read + DENSE.bytes_written
    expected = NODE_NS + DENSE.flops / 1e11 * 1e9 + moved / 1e10 * 1e9
    assert _expected_ns([DENSE], CPU)[0] == pytest.approx(expected)


def test_on_a_gpu_the_longer_of_both_is_what_counts() -> None:
    assert _expected_ns([DENSE], GPU)[0] == pytest.approx(NODE_NS + roofline_ns([DENSE], GPU, Share())[0])


def test_weights_come_from_where_all_that_the_model_touches_fits() -> None:
    sizes = (2.0**20, 2.0**25, 2.0**30, float("inf"))
    times = _expected_ns([replace(DENSE, working_set=size) for size in sizes], CACHED)
    bytes_s = (DENSE.bytes_read + DENSE.bytes_written - DENSE.weight_bytes) / 1e11
    rates = (1e11, 5e10, 1e10, 1e10)
    # the op's own traffic is some 4 MiB with its weights: between the first two rates
    between = (
        bytes_s * 1e11 / np.exp(np.interp(np.log(DENSE.bytes_read + 4096), np.log([2**20, 2**25]), np.log(rates[:2])))
    )
    expected = [(DENSE.weight_bytes / rate + between) * 1e9 for rate in rates]
    assert times - NODE_NS - DENSE.flops / 1e11 * 1e9 == pytest.approx(expected)


def test_a_share_has_its_part_of_the_caches_and_of_memory_what_its_cores_can_draw() -> None:
    still = replace(DENSE, flops=0.0)
    near, far = (replace(still, working_set=size) for size in (2.0**20, 2.0**30))
    whole, half = (_expected_ns([near, far], CACHED, pct) - NODE_NS for pct in (100.0, 50.0))
    assert half[0] == pytest.approx(2.0 * whole[0])
    assert half[1] == pytest.approx(whole[1], rel=0.01)  # half of the cores draw all of the bandwidth


def test_the_optimizer_executes_a_relu_with_its_convolution(tmp_path: Path) -> None:
    graph = load_graph(convolutional(tmp_path / "net.onnx", (16, 16)))
    groups = optimized_groups(graph)
    assert groups is not None
    together = {graph.ops[anchor].name: {graph.ops[place].name for place in group} for anchor, group in groups.items()}
    assert together["conv0"] == {"conv0", "relu0"} and together["conv1"] == {"conv1", "relu1"}


def test_a_graph_that_the_runtime_refuses_or_whose_file_is_gone_is_left_to_what_was_learnt(tmp_path: Path) -> None:
    odd = load_graph(two_layers(tmp_path / "odd.onnx", middle="Nobodys"))
    assert optimized_groups(odd) is None
    assert optimized_groups(replace(odd, path=str(tmp_path / "gone.onnx"))) is None


def _row(name: str, duration_ns: int | None, note: str | None = None) -> OpRow:
    return OpRow("r", "net", "cpu", 1, 0, name, "Conv", "c", duration_p50_ns=duration_ns, note=note)


def test_what_was_measured_together_is_read_from_the_rows(tmp_path: Path) -> None:
    graph = load_graph(convolutional(tmp_path / "net.onnx", (16,)))
    rows = [_row(op.name, 5) for op in graph.ops]
    rows[1] = _row("relu0", None, "fused into conv0")
    groups = measured_groups(graph, rows)
    assert groups is not None and groups[0] == (0, 1) and 1 not in groups
    assert measured_groups(graph, rows[1:]) is None


def test_a_group_counts_functions_and_the_activations_that_it_reads_besides(tmp_path: Path) -> None:
    graph = load_graph(convolutional(tmp_path / "net.onnx", (16,)))
    conv, relu = graph.ops[:2]
    skipped = replace(relu.inputs[0], name="skipped")
    for op, functions, inputs in (
        (replace(relu, op_type="Sigmoid"), 1, 0),
        (replace(relu, op_type="Add", inputs=(relu.inputs[0], skipped)), 0, 1),
        (replace(relu, op_type="Add", inputs=(relu.inputs[0], graph.inputs[0])), 0, 0),  # the convolution reads it
    ):
        fused = replace(graph, ops=(conv, op))
        (facts,) = group_facts(fused, {0: (0, 1)})
        assert (facts.fused, facts.fused_functions, facts.fused_inputs) == (2, functions, inputs)
        assert facts.working_set == working_set_bytes(fused)


pytestmark = pytest.mark.slow

NAMES = ("lasso", "gradient_boosting")
BATCHES = (1, 8, 64)


def _creq_pct(path: Path, batch: int) -> float:
    """Return a requirement that grows with the work, as on a GPU."""
    flops = float(sum(work_of(load_graph(path, batch)).flops))
    return 100.0 * flops / (flops + 3e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of eight networks on a V100, and another network's file."""
    folder = tmp_path_factory.mktemp("creq")
    paths = [gpuprof.build_model("random_cnn", folder / f"cnn{seed}.onnx", seed=seed) for seed in range(9)]
    now = datetime.now(UTC)
    run = RunRow(run_id=new_run_id(now), started_at=now, device="v100", collector="test", model="")
    row = ModelRow("", "", "v100", 1, 100.0)
    rows = [
        replace(
            row,
            run_id=run.run_id,
            model=path.stem,
            model_path=str(path),
            batch=batch,
            latency_mean_ms=float(batch),
            wavg_occupancy_pct=_creq_pct(path, batch),
            memory_peak_bytes=path.stat().st_size + 10**6 * batch,
        )
        for path in paths[:8]
        for batch in BATCHES
    ]
    KernelDb.create(folder / "db").append(Run(run, models=rows))
    return folder


def test_the_stack_is_judged_beside_its_parts_and_the_mean_on_networks_left_out(folder: Path) -> None:
    rows = gpuprof.evaluate(regressors=NAMES, db=folder / "db").rows()
    errors = {row["predictor"]: row for row in rows if row["quantity"] == "Creq wavg_occupancy"}
    assert set(errors) == {"stack", *NAMES, "mean of the others"}
    assert all(row["count"] == 24 for row in errors.values())
    stack, mean = (errors[name]["mean_pct"] for name in ("stack", "mean of the others"))
    assert isinstance(stack, float) and isinstance(mean, float) and stack < mean
    assert {row["predictor"] for row in rows if row["quantity"] == "memory"} >= {"stack", *NAMES, "allocation"}


def test_trained_requirements_are_read_back_with_intervals(folder: Path) -> None:
    trained = gpuprof.train(regressors=(*NAMES, "lightgbm"), db=folder / "db")
    assert (trained.ops, trained.latency_factor) == (0, None)
    assert trained.creq_factor is not None and trained.creq_factor > 1.0
    path, v100 = folder / "cnn8.onnx", device("v100")
    graph = load_graph(path, 8)
    figure = load_model(folder / "db", v100).creq_figure("wavg_occupancy", graph, predict_graph(graph, v100))
    assert figure is not None and figure.interval is not None
    assert figure.interval[0] <= _creq_pct(path, 8) <= figure.interval[1] <= 100.0
    estimate = gpuprof.estimate([path], device="v100", batches=(8,), db=folder / "db").estimates[0]
    assert (creq := estimate.creq("wavg_occupancy")) is not None and creq.value == pytest.approx(figure.value)
    assert estimate.latency_ms.source != "stack"  # no op was measured


def test_a_compute_requirement_is_learned_relative_to_launches(folder: Path) -> None:
    v100, name = device("v100"), "wavg_occupancy"
    cases = [
        ModelCase(graph, Share(), 1.0, None, 1.0, graph.name, {name: launched[name] / 2.0}, launched)
        for graph in (load_graph(folder / f"cnn{seed}.onnx", 8) for seed in range(4))
        for launched in [predict_graph(graph, v100)]
    ]
    *known, new = cases
    lasso = fit_requirements(known, v100, ("lasso",))[name]["lasso"]
    assert len({case.requirements[name] for case in cases}) > 1
    value = predict_requirement(lasso, name, new.graph, v100, new.launched)
    assert value == pytest.approx(new.requirements[name], rel=1e-3)
