from __future__ import annotations

from pathlib import Path

from gpuprof.machine.busy_cores import _read_times, busy_between, busy_cores

STAT = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 0 50 800 50 0 0 0 0 0\ncpu1 {busy} 0 0 {idle} 0 0 0 0 0 0\nintr 12\n"


def test_what_is_neither_idle_nor_waiting_for_a_disk_is_busy(tmp_path: Path) -> None:
    before = {0: (150, 1000), 1: (0, 1000)}
    after = {0: (250, 1200), 1: (150, 1200), 2: (7, 9)}
    assert busy_between(before, after, [0, 1, 2]) == 0.5 + 0.75
    assert busy_between(before, after, [1]) == 0.75
    assert busy_between(before, after, [7]) is None


def test_the_kernel_s_file_is_read_and_where_there_is_none_nothing_is_known(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(STAT.format(busy=10, idle=90))
    assert busy_cores(0.0, [0, 1], stat) is None  # no time has passed
    assert busy_cores(0.0, [0], tmp_path / "none") is None
    stat.write_text("cpu0 nonsense\nand\x00so on\n")
    assert busy_cores(0.0, [0], stat) is None


def test_what_the_hypervisor_gives_to_others_is_not_called_busy(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu0 100 0 0 800 0 0 0 100 0 0\n")
    assert _read_times(stat) == {0: (100, 1000)}
