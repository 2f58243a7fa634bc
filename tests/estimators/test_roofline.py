"""The roofline, and rates that were measured on a device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpuprof.domain.device import MigProfile
from gpuprof.domain.estimate import ROOFLINE, UNCALIBRATED
from gpuprof.domain.share import Share
from gpuprof.estimators.ceilings import with_ceilings
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


def test_launches_cost_what_the_device_says() -> None:
    slow = replace(GPU, launch_overhead_us=5.0)
    assert op_times_s(_work(1.0, 1.0), slow, Share())[0] >= 5e-6
    assert op_times_s(_work(0.0, 0.0, "Reshape"), slow, Share())[0] == 0.0


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
