"""Bounds of an op's time: what a GPU holds of its peaks, the L2 cache, blocks of attention, preparation."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import lightgbm
import numpy as np
import pytest

from bench.published_ops import attention_table, product_table
from bench.tree_export import export_trees
from gpuprof.domain.catalogue import device
from gpuprof.domain.device import MigProfile
from gpuprof.domain.estimate import ROOFLINE, UNCALIBRATED
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, UnavailableError
from gpuprof.estimators.ceilings import with_ceilings
from gpuprof.estimators.cross_gpu.cross_gpu import shipped_model
from gpuprof.estimators.cross_gpu.features import (
    Array,
    Forest,
    OpTable,
    block_seconds,
    bound_times,
    rates_of,
    resolve_precision,
    sustained_part,
    table_of,
    weight_seconds,
)
from gpuprof.estimators.roofline import (
    CEILINGS,
    GraphWork,
    WorkByBatch,
    bandwidth,
    op_times_s,
    reread_bandwidth,
    roofline_ms,
    source_of,
    work_of,
)
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import DeviceRow
from tests.estimators.rows import CPU, GPU, database, two_layers

L40S = rates_of(device("l40s"), "bfloat16")


def _product(columns: float, depth: float) -> OpTable:
    return _multiply(16.0, columns, depth)


def _multiply(rows: float, columns: float, depth: float) -> OpTable:
    b, m, n, k = (np.full(1, size) for size in (1.0, rows, columns, depth))
    return product_table(b, m, n, k, 2.0, 2.0, 0.0)


def _expected_seconds(ops: OpTable, sets: float | None = None) -> Array:
    return bound_times(ops, L40S, **({} if sets is None else {"weight_sets": sets})).expected_s


def test_weights_come_from_the_cache_only_where_all_that_are_used_in_turn_fit_into_it() -> None:
    small, middle = _product(2048, 2048), _product(4096, 4096)  # 8 and 32 MiB of 96
    from_memory = small.bytes_moved[0] / (L40S.bytes_per_s * L40S.drawn)
    assert _expected_seconds(small, 5.0)[0] < 0.5 * from_memory
    assert _expected_seconds(middle, 1.0)[0] < 0.5 * _expected_seconds(middle, 5.0)[0]


def test_a_model_reads_its_weights_from_memory_and_its_activations_from_the_cache() -> None:
    weights = _product(2048, 2048)
    activations = _multiply(2048.0, 16.0, 2048.0)
    assert weights.bytes_moved == pytest.approx(activations.bytes_moved)
    assert weight_seconds(activations, L40S)[0] < 0.5 * weight_seconds(weights, L40S)[0]
    seconds = shipped_model().kernel_times(weights, L40S)
    assert seconds >= weights.bytes_moved / (L40S.bytes_per_s * L40S.drawn)
    hot = shipped_model().costs.kernel_times(weights, L40S, bound_times(weights, L40S))
    assert hot[0] < 0.8 * seconds[0]


def test_weights_from_memory_do_not_slow_a_product_that_takes_longer_anyway() -> None:
    deep = _multiply(8192.0, 4096.0, 4096.0)
    hot = shipped_model().costs.kernel_times(deep, L40S, bound_times(deep, L40S))
    assert shipped_model().kernel_times(deep, L40S) == pytest.approx(hot)


def test_attention_takes_as_long_as_the_block_of_a_head_however_few_heads_there_are() -> None:
    few, many = (table_of([("attention", _attend(heads))]) for heads in (12.0, 96.0))
    assert block_seconds(few, L40S)[0] == block_seconds(many, L40S)[0] == pytest.approx(0.4 * 384**2 / 2.52e9)
    times = {heads: shipped_model().kernel_times(table, L40S)[0] for heads, table in ((12, few), (96, many))}
    assert times[12] == pytest.approx(block_seconds(few, L40S)[0])
    assert times[96] >= times[12]
    assert block_seconds(replace(few, row=np.ones(1)), L40S) == 0.0


def _attend(heads: float) -> dict[str, float]:
    sizes = {"b": heads, "m": 384.0, "n": 384.0, "k": 64.0, "width": 2.0, "row": 384.0, "extra": 1.0}
    bytes_moved = 2.0 * 384 * 64 * heads
    return {**sizes, "flops": 4.0 * heads * 64 * 384**2, "read_bytes": 3 * bytes_moved, "written_bytes": bytes_moved}


def test_other_kernels_of_a_board_at_its_power_limit_run_faster_than_its_products_in_half_precision() -> None:
    half, full = (rates_of(device("t4"), precision) for precision in ("float16", "float32"))
    assert half.sustained < half.sustained_others < 1.0
    assert full.sustained == full.sustained_others
    assert rates_of(device("t4"), "int8").sustained_others == half.sustained_others


def test_no_traffic_takes_less_time_than_a_part_of_it() -> None:
    times = [_expected_seconds(_product(columns, 4096.0), 5.0)[0] for columns in np.arange(16.0, 16384.0, 16.0)]
    assert (np.diff(times) > 0).all()


def test_many_short_sequences_take_longer_than_one_long_one_of_as_much_traffic() -> None:
    def attend(sequences: float, length: float) -> OpTable:
        every = [np.full(1, size) for size in (sequences, 8.0, 8.0, length, length, 64.0)]
        return attention_table(*every, causal=False, key_bytes=2.0)

    many, few = attend(1024.0, 4.0), attend(16.0, 256.0)
    assert many.bytes_moved == pytest.approx(few.bytes_moved)
    assert many.flops[0] < few.flops[0]
    assert _expected_seconds(many)[0] > 3.0 * _expected_seconds(few)[0]


def test_small_boards_never_hold_their_boost_clock() -> None:
    held = {name: sustained_part(device(name), "float32") for name in ("t4", "l4", "a100-pcie-40", "a100-80")}
    assert held["l4"] < held["t4"] < 0.6 < held["a100-pcie-40"] < held["a100-80"] == 1.0


def test_a_higher_power_limit_never_slows_a_board() -> None:
    l4 = device("l4")
    held = [sustained_part(replace(l4, max_power_w=watts), "float32") for watts in (40.0, 72.0, 150.0, 400.0)]
    assert held == sorted(held)
    assert held[-1] <= 1.0


def test_the_power_limit_slows_the_first_tensor_cores_more_than_the_same_board_with_later_ones() -> None:
    for name in ("v100", "t4"):
        board = device(name)
        later = replace(board, compute_capability="8.0")
        assert sustained_part(board, "float16") < 0.85 * sustained_part(later, "float16")
        assert sustained_part(board, "float32") == sustained_part(later, "float32")


def test_an_unknown_process_or_limit_is_no_reason_to_slow_down() -> None:
    assert sustained_part(replace(device("t4"), process_nm=None), "float32") == 1.0
    assert sustained_part(replace(device("t4"), max_power_w=None), "float32") == 1.0


def test_a_share_has_its_sms_and_an_instance_its_slices_of_memory() -> None:
    a100 = device("a100-80")
    whole, half = rates_of(a100, "float32"), rates_of(a100, "float32", Share(50.0))
    assert half.units == whole.units / 2
    assert half.matrix_per_s == whole.matrix_per_s / 2
    slice_ = rates_of(a100, "float32", Share(100.0, "1g.10gb"))
    assert slice_.bytes_per_s == a100.dram_bytes_per_s / 8
    assert slice_.units == 14


def test_a_precision_that_a_gpu_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(InputError, match=r"t4 has no float8 arithmetic \(it has float16, float32, float64, int8\)"):
        rates_of(device("t4"), "float8")


@pytest.mark.parametrize(
    ("name", "asked", "found"),
    [("v100", "tfloat32", "float32"), ("h100", "tfloat32", "tfloat32"), ("t4", "bfloat16", "float16")],
)
def test_a_type_is_computed_in_what_the_gpu_has(name: str, asked: str, found: str) -> None:
    assert resolve_precision(device(name), asked) == found


def test_the_v100_draws_half_as_much_again_as_the_p100() -> None:
    drawn = {name: device(name).dram_bytes_per_s * rates_of(device(name), "float32").drawn for name in ("v100", "p100")}
    assert drawn["v100"] / drawn["p100"] == pytest.approx(1.5, rel=0.1)


def test_the_power_limit_counts_at_the_clock_that_the_tensor_cores_peak_is_told_at() -> None:
    h100 = device("h100")
    slower = replace(h100, clock_mhz=1830.0)
    assert sustained_part(h100, "bfloat16") == pytest.approx(sustained_part(slower, "bfloat16"), rel=1e-3)
    assert sustained_part(h100, "bfloat16") < sustained_part(replace(h100, clock_mhz=1500.0), "bfloat16")


RNG = np.random.default_rng(3)
ROWS = RNG.normal(size=(500, 4))
TARGET = np.where(ROWS[:, 0] > 0.2, ROWS[:, 1] ** 2, -1.0) + 0.1 * ROWS[:, 3]


def _train_booster(rounds: int) -> lightgbm.Booster:
    data = lightgbm.Dataset(ROWS, TARGET, params={"verbose": -1})
    return lightgbm.train(
        {"objective": "l1", "num_leaves": 9, "verbose": -1, "num_threads": 1}, data, num_boost_round=rounds
    )


@pytest.mark.parametrize("rounds", [1, 40])
def test_the_sum_of_the_trees_is_lightgbms(rounds: int) -> None:
    booster, inputs = _train_booster(rounds), RNG.normal(size=(300, 4)) * 2
    forest = Forest(export_trees(booster), "test")
    assert forest.predict(inputs) == pytest.approx(booster.predict(inputs), rel=1e-6, abs=1e-6)


def test_rows_on_a_threshold_go_left_in_double_precision() -> None:
    booster = _train_booster(40)
    edges = np.array(list(booster.trees_to_dataframe()["threshold"].dropna()))[:, None] + np.zeros(4)
    for rows in (edges, np.nextafter(edges, np.inf), np.nextafter(edges, -np.inf)):
        assert Forest(export_trees(booster), "test").predict(rows) == pytest.approx(booster.predict(rows), abs=1e-6)


def test_without_onnx_runtime_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UnavailableError, match=r"need ONNX Runtime, .*\[cpu\]"):
        Forest(export_trees(_train_booster(1)), "test")


def _work(flops: float, moved: float, op: str = "Conv") -> GraphWork:
    return GraphWork((op,), ("float32",), np.array([flops]), np.array([moved]), (), 0.0, 0)


def test_an_op_takes_the_longer_of_its_arithmetic_and_its_traffic() -> None:
    assert op_times_s(_work(1e11, 1.0), CPU, Share())[0] == pytest.approx(1.0)
    assert op_times_s(_work(1.0, 1e10), CPU, Share())[0] == pytest.approx(1.0)


def test_half_of_the_cores_do_half_of_the_arithmetic() -> None:
    assert roofline_ms(_work(1e11, 1.0), CPU, Share(50.0)) == pytest.approx(2000.0)


def test_half_of_the_units_still_draw_all_of_the_bandwidth_and_a_quarter_half() -> None:
    assert bandwidth(GPU, Share(50.0)) == GPU.dram_bytes_per_s
    assert bandwidth(GPU, Share(25.0)) == GPU.dram_bytes_per_s / 2


def test_a_mig_instance_has_the_bandwidth_of_its_memory_slices() -> None:
    profile = MigProfile("3g.40gb", 42, 2**34, 4, 3, (0, 4), 2)
    assert bandwidth(replace(GPU, mig_slices=8, mig_profiles=(profile,)), Share(100.0, "3g.40gb")) == 0.5e12


def test_a_small_op_cannot_use_all_units_of_a_gpu() -> None:
    tiny = _work(2.0 * 64**3, 1.0)
    assert op_times_s(tiny, GPU, Share())[0] == pytest.approx(2.0 * 64**3 / 1e13 * 80 + 1.37 * 1e-6)


def test_matrices_in_float32_run_in_tf32_where_the_device_has_it() -> None:
    ampere = replace(GPU, flops_per_s={"float32": 1e13, "tfloat32": 8e13})
    assert op_times_s(_work(1e13, 1.0), ampere, Share())[0] == pytest.approx(1 / 8 + 1.37 * 1e-6)
    assert op_times_s(_work(1e13, 1.0, "Softmax"), ampere, Share())[0] == pytest.approx(1.0 + 1.37 * 1e-6)


def test_only_measured_rates_make_a_roofline_calibrated() -> None:
    assert source_of(CPU) == UNCALIBRATED
    assert source_of(replace(CPU, sources={"ceilings": "measured"})) == ROOFLINE


def test_the_work_at_any_batch_is_that_of_the_graph_at_that_batch(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "two.onnx")
    work, true = WorkByBatch(lambda batch: load_graph(path, batch)).at(11), work_of(load_graph(path, 11))
    assert work.flops == pytest.approx(true.flops)
    assert work.bytes_moved == pytest.approx(true.bytes_moved)
    assert work.activation_bytes == true.activation_bytes


CURVE = [[2**20, 4e10], [2**27, 6e9]]


def _row(share: float, flops: float, *, measured: bool = True, run_id: str = "r1") -> DeviceRow:
    return DeviceRow(
        run_id, CPU.name, "cpu", 4, share, float32_flops_per_s=flops, dram_bytes_per_s=6e9,
        reread_bytes_per_s=json.dumps(CURVE), measured=measured,
    )  # fmt: skip


def test_rates_measured_under_a_share_speak_for_the_whole(tmp_path: Path) -> None:
    db = database(tmp_path / "db", devices=[_row(25.0, 2e10), _row(100.0, 9e10, measured=False)])
    device = with_ceilings(CPU, db)
    assert device.flops_per_s["float32"] == pytest.approx(8e10)
    assert device.dram_bytes_per_s == pytest.approx(1.2e10)  # a quarter of the cores draws half of it
    assert [size for size, _ in device.reread_bytes_per_s] == [2**20, 2**27]
    assert [rate for _, rate in device.reread_bytes_per_s] == pytest.approx([1.6e11, 1.2e10])
    assert "25%" in device.sources[CEILINGS]
    sizes, between = np.array([2.0**20, 2.0**27]), np.array([(2**20 * 2**27) ** 0.5])
    assert reread_bandwidth(device, Share(25.0), sizes) == pytest.approx([4e10, 6e9])  # as it was measured
    assert reread_bandwidth(device, Share(25.0), between) == pytest.approx([(4e10 * 6e9) ** 0.5])


def test_rates_of_the_whole_win_over_those_of_a_share(tmp_path: Path) -> None:
    db = database(tmp_path / "db", devices=[_row(100.0, 7e10)])
    database(tmp_path / "db", devices=[_row(25.0, 2e10, run_id="r2")], run_id="r2")
    assert with_ceilings(CPU, db).flops_per_s["float32"] == 7e10


def test_a_device_without_measured_caches_has_its_memorys_rate_everywhere() -> None:
    assert reread_bandwidth(CPU, Share(), np.array([1.0, 1e12])).tolist() == [CPU.dram_bytes_per_s] * 2
