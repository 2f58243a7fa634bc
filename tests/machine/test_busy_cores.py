from __future__ import annotations

from pathlib import Path

from gpuprof.machine.busy_cores import MachineLoad, busy_cores


def _stat(path: Path, *cores: str) -> Path:
    path.write_text("\n".join(f"cpu{number} {ticks}" for number, ticks in enumerate(cores)) + "\nintr 12\n")
    return path


def test_what_is_neither_idle_nor_waiting_for_a_disk_nor_stolen_is_busy(tmp_path: Path) -> None:
    stat = _stat(tmp_path / "stat", "100 0 50 800 50 0 0 0 0 0", "0 0 0 0 0 0 0 0 0 0")
    load, first, none = MachineLoad([0, 1], stat), MachineLoad([0], stat), MachineLoad([7], stat)
    _stat(stat, "200 0 50 850 50 0 0 50 0 0", "100 50 0 20 30 0 0 0 0 0")
    assert load.busy_cores() == 0.5 + 0.75
    assert first.busy_cores() == 0.5
    assert none.busy_cores() is None


def test_where_the_kernel_does_not_count_nothing_is_known(tmp_path: Path) -> None:
    stat = _stat(tmp_path / "stat", "10 0 0 90 0 0 0 0 0 0")
    assert busy_cores(0.0, [0, 1], stat) is None  # no time has passed
    assert busy_cores(0.0, [0], tmp_path / "none") is None
    stat.write_text("cpu0 nonsense\nand\x00so on\n")
    assert busy_cores(0.0, [0], stat) is None


def test_other_programs_disturb_a_measurement_beyond_its_own_use(tmp_path: Path) -> None:
    stat = _stat(tmp_path / "stat", "0 0 0 0 0 0 0 0 0 0", "0 0 0 0 0 0 0 0 0 0")
    load = MachineLoad([0, 1], stat)
    _stat(stat, "100 0 0 0 0 0 0 0 0 0", "60 0 0 40 0 0 0 0 0 0")
    assert load.describe_disturbance(1.6, 0.04) is None
    assert load.describe_disturbance(None, 0.04) is None  # of a GPU
    message = load.describe_disturbance(1.0, 0.04)
    assert message is not None and message.startswith("other programs kept 0.6 of the 2 cores busy")


def test_stolen_time_disturbs_too(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  0 0 0 0 0 0 0 0 0 0\n")
    load = MachineLoad([0], stat)
    stat.write_text("cpu  80 0 0 0 0 0 0 20 0 0\n")
    assert "20% of this machine's time" in str(load.describe_disturbance(None, 0.04))
    assert load.describe_disturbance(None, 0.3) is None
