"""Rates that were measured on a device, from its rows in the database."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gpuprof.domain.share import Share
from gpuprof.estimators.roofline.ceilings import with_ceilings
from gpuprof.estimators.roofline.roofline import CEILINGS, reread_bandwidth
from gpuprof.kernel_db.schema import DeviceRow
from tests.estimators.rows import CPU, database

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


def test_between_measured_sizes_the_rate_goes_evenly_by_powers(tmp_path: Path) -> None:
    device = with_ceilings(CPU, database(tmp_path / "db", devices=[_row(100.0, 7e10)]))
    between = reread_bandwidth(device, Share(), np.array([(2**20 * 2**27) ** 0.5]))
    assert between[0] == pytest.approx((4e10 * 6e9) ** 0.5)
