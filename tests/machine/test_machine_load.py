from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.machine.machine_load import MachineLoad


def _stat(path: Path, *cores: str, whole: str = "") -> Path:
    lines = [*([f"cpu  {whole}"] if whole else []), *(f"cpu{number} {ticks}" for number, ticks in enumerate(cores))]
    path.write_text("\n".join([*lines, "", "intr 12\n"]))
    return path


def test_what_is_neither_idle_nor_waiting_for_a_disk_nor_stolen_is_busy(tmp_path: Path) -> None:
    stat = _stat(tmp_path / "stat", "100 0 50 800 50 0 0 0 0 0", "0 0 0 0 0 0 0 0 0 0")
    load, first, none = MachineLoad([0, 1], stat), MachineLoad([0], stat), MachineLoad([7], stat)
    _stat(stat, "200 0 50 850 50 0 0 50 0 0", "100 50 0 20 30 0 0 0 0 0")
    assert (load.busy_cores(), first.busy_cores(), none.busy_cores()) == (0.5 + 0.75, 0.5, None)


@pytest.mark.parametrize("text", ["", "cpu  1 2 3\n", "cpu0 nonsense\nand so on\n", "cpu  1 2 3 4 5 6 7 x\n", None])
def test_where_the_kernel_does_not_count_nothing_is_known(tmp_path: Path, text: str | None) -> None:
    stat = tmp_path / "stat"
    if text is not None:
        stat.write_text(text)
    load = MachineLoad([0], stat)
    assert load.busy_cores() is None and load.stolen_part() is None


def test_other_programs_disturb_a_measurement_beyond_its_own_use(tmp_path: Path) -> None:
    stat = _stat(tmp_path / "stat", "0 0 0 0 0 0 0 0 0 0", "0 0 0 0 0 0 0 0 0 0")
    load = MachineLoad([0, 1], stat)
    _stat(stat, "100 0 0 0 0 0 0 0 0 0", "60 0 0 40 0 0 0 0 0 0")
    assert load.describe_disturbance(1.6, 0.04) is None
    assert load.describe_disturbance(None, 0.04) is None  # of a GPU
    message = load.describe_disturbance(1.0, 0.04)
    assert message is not None and message.startswith("other programs kept 0.6 of the 2 cores busy")


def test_stolen_time_is_a_part_of_all_ticks_and_disturbs_too(tmp_path: Path) -> None:
    stat = _stat(tmp_path / "stat", whole="100 0 0 800 0 0 0 100 7 7")
    load = MachineLoad([0], stat)
    _stat(stat, whole="150 0 0 970 0 0 0 180 9 9")
    assert load.stolen_part() == pytest.approx(80 / 300)
    assert "27% of this machine's time" in str(load.describe_disturbance(None, 0.04))
    assert load.describe_disturbance(None, 0.3) is None
