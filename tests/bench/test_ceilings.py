from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import ceilings
from gpuprof.kernel_db.store import KernelDb


@pytest.mark.slow
def test_what_was_measured_on_a_cpu_is_kept_where_the_roofline_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(ceilings, "REPEATS", 4)
    arguments = ["ceilings", "--device", "cpu", "--size", "64", "--mib", "1", "--db", str(tmp_path / "db")]
    monkeypatch.setattr("sys.argv", arguments)
    assert ceilings.main() == 0
    (row,) = KernelDb(tmp_path / "db").read_table("devices").to_pylist()
    assert row["measured"] and row["float32_flops_per_s"] > 0 and row["dram_bytes_per_s"] > 0
    assert row["pcie_bytes_per_s"] is None and row["float16_flops_per_s"] is None
    assert "float32_flops_per_s" in capsys.readouterr().out


class _Cuda:
    """A GPU on which everything takes 2 ms by its own clock, whatever the host's says."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802 - PyTorch's name
        assert enable_timing
        return SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 2.0)


def test_a_gpus_work_is_timed_between_its_events_and_waited_for() -> None:
    cuda, calls = _Cuda(), []
    assert ceilings.least(SimpleNamespace(cuda=cuda), "cuda", lambda: calls.append(1)) == 0.002
    assert len(calls) == ceilings.REPEATS and cuda.waited == 2 * ceilings.REPEATS
