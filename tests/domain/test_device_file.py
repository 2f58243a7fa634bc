from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.domain.catalogue import device, read_device_file
from gpuprof.errors import InputError

BOARD = """
[rtx-2080-ti]
compute_units = 68
clock_mhz = 1545
dram_mib = 11264
dram_gb_per_s = 616
l2_mib = 5.5
compute_capability = "7.5"
tflops = { float32 = 13.4, float16 = 107.5 }
"""


def test_a_board_of_ones_own_is_read_with_the_units_of_the_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(BOARD + "max_power_w = 250\nprice_per_hour = 0.3\ndram_type = 'gddr6'\nprocess_nm = 12\n")
    board = read_device_file(path)["rtx-2080-ti"]
    assert (board.name, board.compute_units, board.clock_mhz) == ("rtx-2080-ti", 68, 1545.0)
    assert (board.dram_bytes, board.dram_bytes_per_s, board.l2_bytes) == (11264 << 20, 616e9, int(5.5 * 2**20))
    assert dict(board.flops_per_s) == {"float32": 13.4e12, "float16": 107.5e12}
    assert (board.max_power_w, board.price_per_hour, board.dram_type, board.process_nm) == (250.0, 0.3, "gddr6", 12.0)
    assert board.sm == device("t4").sm  # of the same compute capability


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "describes no device"),
        ("[a b", "is not TOML"),
        (BOARD.replace("rtx-2080-ti", "t4"), r"\[t4\]: the name is a name of gpuprof's own"),
        (BOARD.replace("[rtx-2080-ti]", '["RTX 2080"]'), "the name must be of a-z"),
        (BOARD.replace("compute_units = 68\n", ""), "compute_units: Field required"),
        (BOARD.replace("compute_units = 68", "compute_units = -1"), "compute_units: Input should be greater"),
        (BOARD.replace("clock_mhz = 1545", "clock_mhz = inf"), "clock_mhz: Input should be"),
        (BOARD + "colour = 'red'\n", "colour: Extra inputs are not permitted"),
        (BOARD.replace("float16", "float12"), "tflops: unknown type 'float12'"),
        (BOARD.replace("float32 = 13.4, ", ""), "tflops: float32 is missing"),
        ("name = 1", r"\[name\]"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        read_device_file(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.toml: No such file"):
        read_device_file(tmp_path / "none.toml")
