"""The network delay."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.errors import InputError
from gpuprof.simulator.network import LOCAL, THESIS, NetworkDelay, read_measurements


def test_the_one_value_that_the_thesis_prints_comes_out() -> None:
    assert THESIS.ms(4 * 16 * 3 * 224 * 224) == pytest.approx(8.7)


def test_without_a_network_nothing_takes_time() -> None:
    assert LOCAL.ms(1e9) == 0.0


def test_times_are_interpolated_between_sizes_and_extended_beyond() -> None:
    delay = NetworkDelay((1e3, 1e6, 1e8), (0.3, 1.3, 91.3))
    assert delay.ms(500_500) == pytest.approx(0.8)
    assert delay.ms(50.5e6) == pytest.approx(46.3)
    assert delay.ms(2e8) == pytest.approx(91.3 + 1e8 * 90 / 99e6)
    assert delay.ms(1.0) == pytest.approx(0.299)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bytes,ms\n", ":1: the header must be payload_bytes,latency_ms"),
        ("payload_bytes,latency_ms\n1,2\nx,2\n", ":3: expected two numbers but got 'x,2'"),
        ("payload_bytes,latency_ms\n1,2,3\n", ":2: expected two numbers"),
        ("payload_bytes,latency_ms\n-1,2\n", ":2: a size must be above 0"),
        ("payload_bytes,latency_ms\n5,1\n5,2\n", "needs two message sizes"),
    ],
)
def test_bad_measurements_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "net.csv").write_text(text)
    with pytest.raises(InputError) as error:
        read_measurements(tmp_path / "net.csv")
    assert message in str(error.value)


def test_measurements_are_read(tmp_path: Path) -> None:
    rows = "".join(f"{size},{1e-6 * size + 0.2}\n" for size in range(10_000, 1_000_000, 50_000))
    (tmp_path / "net.csv").write_text("payload_bytes,latency_ms\n" + rows)
    assert read_measurements(tmp_path / "net.csv").ms(500_000) == pytest.approx(0.7, rel=0.01)
