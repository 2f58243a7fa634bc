import json
from pathlib import Path

import pytest

from gpuprof.domain.share import Share
from gpuprof.kernel_db.store import KernelDb
from gpuprof.machine.cgroup import own_cores
from gpuprof.profiling.cpu import ort
from gpuprof.profiling.cpu.ort import OrtCollector, measure_ceilings
from gpuprof.profiling.sweep.campaign import Campaign
from tests.profiling.requests import CPU, QUICK
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "_SIDE", 128)
    monkeypatch.setattr(ort, "_SETS", (2**18, 2**20))


def test_ceilings_are_measured_in_plausible_sizes() -> None:
    row = measure_ceilings(CPU, Share(100.0 / len(own_cores())), "r1", QUICK)
    assert row.measured and row.source
    assert row.float32_flops_per_s is not None and 1e8 < row.float32_flops_per_s < 1e14
    assert row.dram_bytes_per_s is not None and 1e8 < row.dram_bytes_per_s < 1e13
    assert row.float16_flops_per_s is None  # not measured: null
    sizes, rates = zip(*json.loads(row.reread_bytes_per_s or "[]"), strict=True)
    assert sizes == ort._SETS and list(sizes) == sorted(sizes)
    assert all(1e8 < rate < 1e13 for rate in rates)


def test_each_share_is_measured_once(tmp_path: Path) -> None:
    database = KernelDb.create(tmp_path / "db")
    share = Share(100.0 / len(own_cores()))
    for _ in range(2):
        Campaign(database, CPU, OrtCollector(), limits=QUICK).measure_ceilings([share, share])
    (row,) = database.read_table("devices").to_pylist()
    assert row["sm_share_pct"] == share.sm_pct
    assert database.read_table("runs").column("collector").to_pylist() == ["ceilings"]
