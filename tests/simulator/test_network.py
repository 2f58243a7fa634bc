"""The network delay that the thesis fits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpuprof.errors import InputError
from gpuprof.simulator.network import LOCAL, THESIS, fit_delay, read_measurements


def test_the_one_value_that_the_thesis_prints_comes_out() -> None:
    assert THESIS.ms(4 * 16 * 3 * 224 * 224) == pytest.approx(8.7)


def test_without_a_network_nothing_takes_time() -> None:
    assert LOCAL.ms(1e9) == 0.0


def test_a_fit_finds_the_function_of_each_interval() -> None:
    small, large = np.linspace(1e3, 1e6, 40), np.linspace(1.1e6, 1e8, 40)
    times = np.concatenate([2e-4 * small**0.6 + 0.3, 9e-7 * large + 1.0])
    delay = fit_delay(np.concatenate([small, large]).tolist(), times.tolist())
    assert len(delay.pieces) == 2
    assert delay.pieces[0].b == pytest.approx(0.6, abs=0.02)
    assert delay.pieces[1].b == pytest.approx(1.0, abs=0.02)
    assert delay.ms(5e5) == pytest.approx(2e-4 * 5e5**0.6 + 0.3, rel=0.01)
    assert delay.ms(5e7) == pytest.approx(46.0, rel=0.01)
    assert delay.ms(5e8) == pytest.approx(451.0, rel=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bytes,ms\n", ":1: the header must be payload_bytes,latency_ms"),
        ("payload_bytes,latency_ms\n1,2\nx,2\n", ":3: expected two numbers but got 'x,2'"),
        ("payload_bytes,latency_ms\n1,2,3\n", ":2: expected two numbers"),
        ("payload_bytes,latency_ms\n-1,2\n", ":2: a size must be above 0"),
        ("payload_bytes,latency_ms\n1,2\n5,2\n", "needs at least 3 message sizes"),
    ],
)
def test_bad_measurements_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "net.csv").write_text(text)
    with pytest.raises(InputError) as error:
        read_measurements(tmp_path / "net.csv")
    assert message in str(error.value)


def test_measurements_are_read_and_fitted(tmp_path: Path) -> None:
    rows = "".join(f"{size},{1e-6 * size + 0.2}\n" for size in range(10_000, 1_000_000, 50_000))
    (tmp_path / "net.csv").write_text("payload_bytes,latency_ms\n" + rows)
    assert read_measurements(tmp_path / "net.csv").ms(500_000) == pytest.approx(0.7, rel=0.01)
