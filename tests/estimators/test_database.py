"""The default estimator: measured, interpolated, extrapolated, roofline, and which is which."""

import json
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.helper import make_node as node

from gpuprof.domain.catalogue import devices
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import EXTRAPOLATED, INTERPOLATED, MEASURED, UNCALIBRATED, Estimate, Figure, Workload
from gpuprof.domain.runtime_variant import Padding
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.kernels import Execution, LaunchMode
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.estimators.held_out import estimate_held_out
from gpuprof.estimators.measured.measured_only import MeasuredEstimator
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import ColocationRow, ModelRow
from gpuprof.kernel_db.store import KernelDb
from gpuprof.pipeline.devices import describe_choice
from tests.command_line import CommandLine
from tests.estimators.rows import CPU, GPU, database, measured_row, two_layers
from tests.small_models import write_model

WHOLE = Share()


@pytest.fixture
def estimator(tmp_path: Path) -> DatabaseEstimator:
    rows = [
        measured_row("net", batch, 2.0 + 3.0 * batch, memory=1000 * batch, std_ms=0.5, repeats=25)
        for batch in (1, 4, 8)
    ]
    rows += [measured_row("net", batch, 4.0 + 6.0 * batch, share=50.0) for batch in (1, 4, 8)]
    return DatabaseEstimator(database(tmp_path / "db", rows))


def test_what_was_measured_is_said_as_it_was_measured(estimator: DatabaseEstimator) -> None:
    estimate = estimator.estimate("net", CPU, 4, WHOLE)
    assert (estimate.latency_ms.value, estimate.latency_ms.source) == (14.0, MEASURED)
    assert estimate.latency_cv == pytest.approx(0.5 / 14.0)
    assert estimate.memory_bytes is not None and (estimate.memory_bytes.value, estimate.memory_bytes.source) == (
        4000.0,
        MEASURED,
    )
    assert estimate.latency_ms.upper() == pytest.approx(14.0 + 1.645 * 0.5 / 5.0)


def test_between_measured_batches_stands_the_line_and_an_interval_around_it(estimator: DatabaseEstimator) -> None:
    estimate = estimator.estimate("net", CPU, 6, WHOLE)
    assert estimate.latency_ms.value == pytest.approx(20.0)
    assert estimate.latency_ms.source == INTERPOLATED
    assert estimate.latency_ms.low is not None and estimate.latency_ms.low < 20.0 < estimate.latency_ms.upper()
    assert estimate.memory_bytes is not None and estimate.memory_bytes.value == pytest.approx(6000.0)


def test_between_measured_shares_time_is_a_power_of_the_share(estimator: DatabaseEstimator) -> None:
    estimate = estimator.estimate("net", CPU, 4, Share(50.0 * 2**0.5))
    assert estimate.latency_ms.value == pytest.approx(14.0 * 2**0.5)
    assert estimate.latency_ms.source == INTERPOLATED


@pytest.mark.parametrize(("batch", "share", "expected_ms"), [(16, 100.0, 50.0), (4, 25.0, 56.0)])
def test_extrapolation_is_marked(estimator: DatabaseEstimator, batch: int, share: float, expected_ms: float) -> None:
    latency = estimator.estimate("net", CPU, batch, Share(share)).latency_ms
    assert latency.value == pytest.approx(expected_ms) and latency.source == EXTRAPOLATED
    assert latency.low is not None and latency.high is not None and latency.high / latency.low > 1.4


def test_processes_that_were_not_measured_have_their_part_of_the_share(estimator: DatabaseEstimator) -> None:
    estimate = estimator.estimate("net", CPU, 4, WHOLE, processes=2)
    assert estimate.latency_ms.value == pytest.approx(28.0)
    assert estimate.throughput_rps.value == pytest.approx(2 * 4 * 1000.0 / 28.0)


def test_measured_processes_win(tmp_path: Path) -> None:
    rows = [measured_row("net", 1, 5.0), measured_row("net", 1, 7.0, processes=2)]
    estimate = DatabaseEstimator(database(tmp_path / "db", rows)).estimate("net", CPU, 1, WHOLE, processes=2)
    assert (estimate.latency_ms.value, estimate.latency_ms.source) == (7.0, MEASURED)


def test_an_unmeasured_model_gets_the_roofline_op_by_op(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "two.onnx", width=64)
    estimate = DatabaseEstimator(None).estimate(str(path), CPU, 10, WHOLE)
    assert estimate.latency_ms.source == UNCALIBRATED
    assert estimate.latency_ms.low is not None and estimate.latency_ms.upper() > 5.0 * estimate.latency_ms.low
    ops = load_graph(path, 10).ops
    least = sum(max((op.flops or 0) / 1e11, (op.bytes_read + op.bytes_written) / 1e10) for op in ops)
    assert estimate.latency_ms.value == pytest.approx(least * 1e3, rel=1e-6)


def test_an_op_that_nothing_is_known_of_is_named_and_widens_the_interval_to_many_times(tmp_path: Path) -> None:
    counted, unknown = two_layers(tmp_path / "two.onnx"), two_layers(tmp_path / "odd.onnx", middle="NonMaxSuppressed")
    plain, odd = (DatabaseEstimator(None).estimate(str(path), GPU, 8, WHOLE) for path in (counted, unknown))
    assert plain.unknown_ops == () and odd.unknown_ops == ("NonMaxSuppressed",)
    reach, usual_reach = (estimate.latency_ms.upper() / estimate.latency_ms.value for estimate in (odd, plain))
    assert reach > 3.0 and reach > 1.5 * usual_reach
    assert odd.latency_ms.low is not None and odd.latency_ms.low < odd.latency_ms.value


def test_every_kernel_of_a_gpu_takes_a_launch_at_least(tmp_path: Path) -> None:
    estimate = DatabaseEstimator(None).estimate(str(two_layers(tmp_path / "tiny.onnx", width=1)), GPU, 1, WHOLE)
    assert estimate.latency_ms.value >= 3 * 0.00137


def test_a_tiny_model_may_take_a_cpu_what_going_from_op_to_op_takes(tmp_path: Path) -> None:
    estimate = DatabaseEstimator(None).estimate(str(two_layers(tmp_path / "tiny.onnx", width=1)), CPU, 1, WHOLE)
    assert estimate.latency_ms.value < 0.001
    assert estimate.latency_ms.upper() >= 3 * 4e-3


def test_memory_of_an_unmeasured_model_is_its_weights_and_what_is_alive_at_once(tmp_path: Path) -> None:
    estimate = DatabaseEstimator(None).estimate(str(two_layers(tmp_path / "two.onnx", width=64)), CPU, 10, WHOLE)
    assert estimate.memory_bytes is not None
    assert estimate.memory_bytes.value == 2 * 64 * 64 * 4 + 2 * 10 * 64 * 4


def test_a_roofline_is_scaled_by_what_others_took_on_the_device(tmp_path: Path) -> None:
    calibrated, path = two_layers(tmp_path / "a.onnx", 32), two_layers(tmp_path / "b.onnx", 64)
    plain = DatabaseEstimator(None)
    least = plain.estimate(str(calibrated), CPU, 1, WHOLE).latency_ms.value
    db = database(
        tmp_path / "db", [measured_row("a", 1, 3.0 * least, path=str(calibrated), sha256=load_graph(calibrated).sha256)]
    )
    latency = DatabaseEstimator(db).estimate(str(path), CPU, 1, WHOLE).latency_ms
    assert latency.value == pytest.approx(3.0 * plain.estimate(str(path), CPU, 1, WHOLE).latency_ms.value)


def test_a_file_is_recognised_by_its_content(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "copy.onnx")
    db = database(tmp_path / "db", [measured_row("net", 1, 5.0, path="/gone.onnx", sha256=load_graph(path).sha256)])
    latency = DatabaseEstimator(db).estimate(str(path), CPU, 1, WHOLE).latency_ms
    assert (latency.value, latency.source) == (5.0, MEASURED)


def test_rows_of_an_older_file_under_the_same_name_do_not_count(tmp_path: Path) -> None:
    database(tmp_path / "db", [measured_row("net", 1, 5.0, sha256="old"), measured_row("net", 2, 6.0, sha256="old")])
    db = database(tmp_path / "db", [measured_row("net", 1, 50.0, sha256="new", run_id="r2")], run_id="r2")
    estimator = DatabaseEstimator(db)
    assert estimator.batches("net", CPU, WHOLE) == (1,)
    assert estimator.estimate("net", CPU, 1, WHOLE).latency_ms.value == 50.0
    assert estimator.known.find_model("net").superseded == 1


@pytest.mark.parametrize(
    ("nodes", "is_estimated"),
    [
        ("y = own.Odd (x)", False),
        ("y = Loop (most, yes, x) <body: graph = b (int64 i, bool c, float[N,4] s) => (bool c2, float[N,4] t) "
         "{ t = Add (s, s) m = ReduceMax <keepdims = 0> (t) c2 = Less (m, end) }>", True),
    ],
    ids=["op of another domain", "loop of unknown turns"],
)  # fmt: skip
def test_unknown_ops_are_no_estimate_by_themselves(tmp_path: Path, nodes: str, is_estimated: bool) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17, "own" : 1]> g (float[N,4] x) => (float[N,4] y)
    <int64 most = {{9223372036854775807}}, bool yes = {{1}}, float end = {{9}}> {{ {nodes} }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    expected = nullcontext() if is_estimated else pytest.raises(InputError, match="none of its ops takes a time")
    with expected:
        estimate = DatabaseEstimator(None).estimate(str(tmp_path / "m.onnx"), GPU, 1, WHOLE)
        assert estimate.unknown_ops == ("Loop",) and estimate.latency_ms.value > 0


def test_without_a_database_a_file_that_mixes_its_items_is_planned_with_batches_of_one(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.onnx", [node("Softmax", ["x"], ["y"], axis=0)], {"x": ["N", 4]}, {"y": ["N", 4]})
    estimator = DatabaseEstimator(None, {"m": path})
    assert estimator.batches("m", GPU, WHOLE)[-1] > 1
    assert estimator.verdicts.judge(path, load_graph(path).sha256) == "y"
    assert estimator.batches("m", GPU, WHOLE) == (1,)


def test_co_locations_of_an_older_file_under_the_same_name_do_not_count_either(tmp_path: Path) -> None:
    def beside(run: str, sha256: str, took_ms: float) -> ColocationRow:
        label, at = "other:1:50%", {"latency_mean_ms": took_ms, "solo_latency_mean_ms": 10.0, "model_sha256": sha256}
        return ColocationRow(run, CPU.name, 0, 0, "net", 1, label, 50.0, **at)  # type: ignore[arg-type]

    alone = [
        measured_row(name, 1, 10.0, share=50.0, sha256="new" if name == "net" else None) for name in ("net", "other")
    ]
    db = database(tmp_path / "db", alone, colocations=[beside("r1", "old", 40.0), beside("r1", "new", 20.0)])
    half = Share(50.0)
    together = DatabaseEstimator(db).estimate("net", CPU, 1, half, [Workload("other", 1, half)])
    assert together.latency_ms.value == pytest.approx(20.0)


def test_a_share_under_which_the_outputs_were_wrong_is_ruled_out(tmp_path: Path) -> None:
    wrong = replace(measured_row("net", 1, 5.0, share=50.0), error="output y differs under the share by 2")
    estimator = DatabaseEstimator(database(tmp_path / "db", [measured_row("net", 1, 4.0), wrong]))
    with pytest.raises(InputError, match="differs under the share"):
        estimator.estimate("net", CPU, 1, Share(50.0))


def test_the_last_stable_measurement_counts(tmp_path: Path) -> None:
    database(tmp_path / "db", [measured_row("net", 1, 5.0)])
    db = database(tmp_path / "db", [measured_row("net", 1, 9.0, stable=False, run_id="r2")], run_id="r2")
    assert DatabaseEstimator(db).estimate("net", CPU, 1, WHOLE).latency_ms.value == 5.0


def test_a_measured_colocation_is_used_as_measured(tmp_path: Path) -> None:
    row = ColocationRow(
        "r1", CPU.name, 0, 0, "net", 1, "other:4:50%", 50.0, latency_mean_ms=6.0, solo_latency_mean_ms=5.0
    )
    db = database(tmp_path / "db", [measured_row("net", 1, 10.0, share=50.0)], colocations=[row])
    estimate = DatabaseEstimator(db).estimate("net", CPU, 1, Share(50.0), beside=[Workload("other", 4, Share(50.0))])
    assert estimate.latency_ms.value == pytest.approx(12.0)


def test_without_colocations_a_neighbour_only_widens_the_interval(estimator: DatabaseEstimator) -> None:
    alone = estimator.estimate("net", CPU, 4, Share(50.0))
    beside = estimator.estimate("net", CPU, 4, Share(50.0), beside=[Workload("net", 4, Share(50.0))])
    assert beside.latency_ms.value == alone.latency_ms.value and beside.latency_ms.upper() > alone.latency_ms.upper()
    assert replace(beside, latency_ms=alone.latency_ms) == alone


def test_an_unknown_model_is_answered_with_the_nearest_known(estimator: DatabaseEstimator) -> None:
    with pytest.raises(InputError, match=r"unknown model 'nett' \(did you mean net\?\)"):
        estimator.estimate("nett", CPU, 1, WHOLE)


def test_a_device_without_data_and_without_the_file_cannot_be_answered(estimator: DatabaseEstimator) -> None:
    with pytest.raises(InputError, match="net was not measured on gpu-test and its ONNX file is not there"):
        estimator.estimate("net", GPU, 1, WHOLE)


def test_shares_worth_considering_end_with_the_whole(estimator: DatabaseEstimator) -> None:
    assert estimator.shares("net", CPU) == (Share(50.0), WHOLE)


def test_batches_of_an_unmeasured_model_are_powers_of_two_that_fit(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "two.onnx", width=64)
    small = replace(CPU, dram_bytes=2 * 64 * 64 * 4 + 2 * 4 * 64 * 4)
    assert DatabaseEstimator(None).batches(str(path), small, WHOLE) == (1, 2, 4)


def test_a_model_with_nothing_to_count_has_no_roofline(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.onnx", [node("Flatten", ["x"], ["y"])], {"x": ["n", 3, 4]}, {"y": ["n", 12]})
    with pytest.raises(InputError, match="can only be measured"):
        DatabaseEstimator(database(tmp_path / "db", [])).estimate(str(path), GPU, 4, WHOLE)


def test_a_fixed_batch_is_refused_by_the_batch_that_was_asked(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], {"x": [1, 4]}, {"y": [1, 4]})
    with pytest.raises(InputError, match="but 7 is asked"):
        DatabaseEstimator(database(tmp_path / "db", [])).estimate(str(path), GPU, 7, WHOLE)


def test_a_model_that_fixes_its_batch_is_estimated_at_that_batch(tmp_path: Path) -> None:
    op = node("Relu", ["x"], ["y"])
    side = 2**20  # what takes long: of two estimates for tiny ops the larger batch may take the time of the smaller
    free = write_model(tmp_path / "free.onnx", [op], {"x": ["n", side]}, {"y": ["n", side]})
    fixed = write_model(tmp_path / "fixed.onnx", [op], {"x": [8, side]}, {"y": [8, side]})
    estimator = DatabaseEstimator(None)
    estimate, same = (estimator.estimate(str(path), GPU, 8, WHOLE) for path in (fixed, free))
    assert estimate.latency_ms == same.latency_ms and estimate.memory_bytes == same.memory_bytes
    assert estimator.batches(str(fixed), GPU, WHOLE) == (8,)


def failed_row(
    model: str, batch: int, error: str = "out of memory", run_id: str = "r1", share: float = 100.0, processes: int = 1
) -> ModelRow:
    return ModelRow(run_id, model, GPU.name, batch, share, None, processes, error=error)


def with_failures(path: Path, *rows: ModelRow) -> DatabaseEstimator:
    profiled = [measured_row("net", batch, 2.0 + batch, device=GPU.name) for batch in (1, 2, 4, 8)]
    return DatabaseEstimator(database(path / "db", [*profiled, *rows]))


@pytest.mark.parametrize(
    ("batch", "share", "processes", "is_ruled_out"),
    [(8, 100.0, 1, False), (16, 100.0, 1, True), (17, 20.0, 1, True), (16, 100.0, 3, True), (12, 100.0, 1, False)],
)
def test_what_did_not_fit_the_memory_rules_out_all_that_needs_no_less(
    tmp_path: Path, batch: int, share: float, processes: int, is_ruled_out: bool
) -> None:
    estimator = with_failures(tmp_path, failed_row("net", 16))
    if is_ruled_out:
        with pytest.raises(InputError, match="failed on gpu-test: out of memory"):
            estimator.estimate("net", GPU, batch, Share(share), processes=processes)
    else:
        assert estimator.estimate("net", GPU, batch, Share(share), processes=processes).latency_ms.value > 0.0


def test_a_failure_under_a_share_says_nothing_of_larger_shares_unless_memory_was_short(tmp_path: Path) -> None:
    wrong = with_failures(tmp_path / "wrong", failed_row("net", 2, "wrong outputs under its share", share=20.0))
    short = with_failures(tmp_path / "short", failed_row("net", 2, "out of memory", share=20.0))
    for estimator, raises in ((wrong, False), (short, True)):
        with pytest.raises(InputError, match="ruled out") if raises else nullcontext():
            estimator.estimate("net", GPU, 3, Share(30.0))
        with pytest.raises(InputError, match="ruled out"):
            estimator.estimate("net", GPU, 2, Share(10.0))


def test_what_ran_is_never_ruled_out_by_a_failure_elsewhere(tmp_path: Path) -> None:
    estimator = with_failures(tmp_path, failed_row("net", 3, "killed"))
    assert estimator.estimate("net", GPU, 8, WHOLE).latency_ms.value == 10.0
    with pytest.raises(InputError, match="killed"):
        estimator.estimate("net", GPU, 6, WHOLE)


def test_a_measurement_made_later_takes_a_failure_back(tmp_path: Path) -> None:
    database(tmp_path / "db", [failed_row("net", 4)], run_id="r0")
    assert with_failures(tmp_path).estimate("net", GPU, 5, WHOLE).latency_ms.value == 7.0
    database(tmp_path / "db", [failed_row("net", 4, run_id="r2")], run_id="r2")
    with pytest.raises(InputError, match="out of memory"):
        with_failures(tmp_path / "later", failed_row("net", 4, run_id="r2")).estimate("net", GPU, 4, WHOLE)


def test_a_model_whose_ops_have_nothing_to_count_is_carried_over_by_what_was_measured(tmp_path: Path) -> None:
    path = write_model(tmp_path / "none.onnx", [node("Relu", ["x"], ["y"])], {"x": ["N", 0]}, {"y": ["N", 0]})
    sha256 = load_graph(path).sha256
    rows = [measured_row("none", batch, 1.0, path=str(path), sha256=sha256) for batch in (1, 2)]
    neighbour = two_layers(tmp_path / "other.onnx")
    rows += [measured_row("other", 1, 1.0, path=str(neighbour), sha256=load_graph(neighbour).sha256)]
    estimator = DatabaseEstimator(database(tmp_path / "db", rows))
    latency = estimator.estimate("none", CPU, 8, Share(50.0)).latency_ms
    assert latency.source == EXTRAPOLATED and latency.value > 0.0
    assert estimator.estimate(str(two_layers(tmp_path / "new.onnx", 32)), CPU, 1, WHOLE).latency_ms.value > 0.0


def _write_convolution(path: Path) -> Path:
    weights = {"w": np.ones((3, 2, 3, 3), np.float32)}
    return write_model(path, [node("Conv", ["x", "w"], ["y"])], {"x": ["N", 2, 8, 8]}, {"y": ["N", 3, 6, 6]}, weights)


def test_partial_batches_of_convolutions_are_padded_on_gpus_alone(tmp_path: Path) -> None:
    path, dense = _write_convolution(tmp_path / "c.onnx"), two_layers(tmp_path / "two.onnx")
    estimator = DatabaseEstimator(None)
    assert estimator.estimate(str(path), GPU, 4, WHOLE).padding is Padding.FULL
    assert estimator.estimate(str(path), GPU, 4, WHOLE, [Workload(str(dense), 1, WHOLE)]).padding is Padding.FULL
    assert estimator.estimate(str(path), CPU, 4, WHOLE).padding is Padding.NONE
    assert estimator.estimate(str(dense), GPU, 4, WHOLE).padding is Padding.NONE
    eager = DatabaseEstimator(None, execution=Execution(runtime=LaunchMode.EAGER))
    assert eager.estimate(str(path), GPU, 4, WHOLE).padding is Padding.NONE


@pytest.mark.parametrize(
    ("runtime", "execution", "padding"),
    [
        ("onnxruntime", "fused", Padding.FULL),
        ("onnxruntime", "fused+channels-last+pinned+graphs", Padding.POWERS_OF_TWO),
        ("onnxruntime", "fused+pinned+sessions", Padding.POWERS_OF_TWO),
        ("pytorch", "eager", Padding.NONE),
        (None, None, Padding.NONE),
    ],
)
def test_measured_models_are_padded_as_the_measured_runtime_pads_them(
    tmp_path: Path, runtime: str | None, execution: str | None, padding: Padding
) -> None:
    path = _write_convolution(tmp_path / "c.onnx")
    row = measured_row("c", 4, 2.0, device=GPU.name, path=str(path))
    db = database(tmp_path / "db", [replace(row, runtime=runtime, execution=execution)])
    for estimator in (DatabaseEstimator(db), MeasuredEstimator(db)):
        assert estimator.estimate("c", GPU, 4, WHOLE).padding is padding
    path.unlink()  # what is not there cannot be served
    assert DatabaseEstimator(db).estimate("c", GPU, 4, WHOLE).padding is Padding.NONE


ORT: dict[str, Any] = {"runtime": "onnxruntime", "execution": "fused", "precision": "tf32"}
TORCH: dict[str, Any] = {"runtime": "pytorch", "execution": "eager", "precision": "tf32"}
FLOAT32: dict[str, Any] = {**ORT, "precision": "float32"}


def _row(batch: int, latency_ms: float, variant: dict[str, Any], model: str = "net", **more: Any) -> ModelRow:
    row = measured_row(model, batch, latency_ms, device=GPU.name, **more)
    return replace(row, runtime=variant["runtime"], execution=variant["execution"], precision=variant["precision"])


@pytest.mark.parametrize("other", [TORCH, FLOAT32])
def test_no_estimate_lies_between_two_runtimes_or_precisions(tmp_path: Path, other: dict[str, Any]) -> None:
    # Of the other way twice as many rows would be preferred were they of the same runtime.
    rows = [_row(1, 1.0, ORT), _row(8, 8.0, ORT), _row(2, 50.0, other), _row(4, 100.0, other)]
    rows += [_row(16, 16.0, ORT)]
    estimator = DatabaseEstimator(database(tmp_path / "db", rows))
    estimate = estimator.estimate("net", GPU, 4, Share())
    assert estimate.latency_ms.source == INTERPOLATED and estimate.latency_ms.value == pytest.approx(4.0)
    assert estimate.variant == "onnxruntime fused tf32"
    assert estimator.batches("net", GPU, Share()) == (1, 8, 16)


def test_one_is_named_and_two_are_said(tmp_path: Path) -> None:
    rows = [_row(1, 1.0, ORT), _row(1, 3.0, TORCH), _row(1, 2.0, ORT, model="single")]
    estimator = DatabaseEstimator(database(tmp_path / "db", rows))
    (note,) = describe_choice(estimator, ["net", "single"], [GPU.name])
    assert note == (
        "net was measured on gpu-test by onnxruntime fused tf32 and by pytorch eager tf32: "
        "figures are of onnxruntime fused tf32 alone"
    )


def test_a_model_that_only_another_runtime_measured_is_estimated_by_its_own_rows(tmp_path: Path) -> None:
    rows = [_row(1, 1.0, ORT), _row(1, 3.0, TORCH, model="other")]
    estimate = DatabaseEstimator(database(tmp_path / "db", rows)).estimate("other", GPU, 1, Share())
    assert (estimate.latency_ms.value, estimate.latency_ms.source, estimate.variant) == (
        3.0,
        MEASURED,
        "pytorch eager tf32",
    )


def test_a_slowdown_of_another_runtime_does_not_count(tmp_path: Path) -> None:
    def beside(variant: dict[str, Any], latency_ms: float) -> ColocationRow:
        return ColocationRow(
            "r1", GPU.name, 0, 0, "net", 1, "net:1:50%", 50.0, latency_mean_ms=latency_ms, solo_latency_mean_ms=2.0,
            **variant,
        )  # fmt: skip

    rows = [_row(1, 2.0, ORT, share=50.0), _row(1, 6.0, TORCH, share=50.0)]
    db = database(tmp_path / "db", rows, colocations=[beside(ORT, 2.2), beside(TORCH, 20.0)])
    estimate = DatabaseEstimator(db).estimate("net", GPU, 1, Share(50.0), (Workload("net", 1, Share(50.0)),))
    assert estimate.latency_ms.value == pytest.approx(2.2)


class MeanOfOthers:
    """Estimates the mean of all latencies in the database."""

    def __init__(self, db: KernelDb) -> None:
        self.models = set(db.read_table("models", ["model"])["model"].to_pylist())
        self.mean_ms = statistics.fmean(db.read_table("models", ["latency_mean_ms"])["latency_mean_ms"].to_pylist())

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        if model == "refused":
            raise InputError("refused is refused")
        figure = Figure(self.mean_ms, "mean", 0.5 * self.mean_ms, 1.5 * self.mean_ms)
        return Estimate(workload=Workload(model, batch, share, processes), device=device.name, latency_ms=figure)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return (1,)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        return (Share(),)


@pytest.fixture
def db(tmp_path: Path) -> KernelDb:
    times_ms = {"a": 1.0, "b": 2.0, "refused": 6.0}
    return database(tmp_path / "db", [measured_row(name, 1, ms, device="v100") for name, ms in times_ms.items()])


def test_each_model_is_estimated_from_the_others(db: KernelDb) -> None:
    latencies = estimate_held_out(f"{__name__}:MeanOfOthers", db, "models", devices().__getitem__)
    errors = {latency.model: (latency.measured_ms, latency.predicted_ms, latency.is_inside) for latency in latencies}
    assert errors == {"a": (1.0, 4.0, False), "b": (2.0, 3.5, True), "refused": (6.0, None, None)}


def test_the_command_prints_errors_coverage_and_what_has_no_estimate(db: KernelDb, cli: CommandLine) -> None:
    words = ["evaluate", "--estimator", f"{__name__}:MeanOfOthers", "--db", str(db.path), "--json"]
    captured = cli(*words)
    (row,) = json.loads(captured.out)
    assert (row["count"], row["mean_pct"], row["coverage_pct"]) == (2, pytest.approx(187.5), 50.0)
    assert "no estimate for 1 of 3 latencies" in captured.err


def test_one_device_cannot_be_left_out(db: KernelDb, cli: CommandLine) -> None:
    words = ["evaluate", "--estimator", "database", "--db", str(db.path), "--leave-out", "devices"]
    assert "holds 1 device, but holding out devices takes at least 2" in cli(*words, code=3).err
