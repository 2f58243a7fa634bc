"""The ledger: one schema for public measurements, and a gate that a worse estimate does not pass."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from bench import ledger
from bench.ledger import FOLDER, PAGE, Line, find_worse, read_measurements, read_table, write_table
from gpuprof.domain.catalogue import devices
from gpuprof.estimators.cross_gpu.features import CostModel
from gpuprof.estimators.cross_gpu.kernels import LaunchMode

LINE = Line("triton-bert: tensorrt, float16, t4, batch 1", 3, 10.0, -2.0, 100.0, 2.0)


def test_every_measurement_has_a_source_with_a_licence_a_board_and_a_runtime() -> None:
    measurements = read_measurements()
    sources = tomllib.loads((FOLDER / "sources.toml").read_text(encoding="utf-8"))["sources"]
    assert len(measurements) > 5000 and len({measurement.device for measurement in measurements}) >= 15
    assert {measurement.source for measurement in measurements} == set(sources)
    assert all(source["from"] and source["licence"] for source in sources.values())
    assert {measurement.device for measurement in measurements} <= set(devices())
    assert {measurement.runtime for measurement in measurements} <= set(LaunchMode)
    for measurement in measurements:
        assert float(measurement.latency_ms or measurement.throughput_rps) > 0.0


def test_the_table_is_read_as_it_was_written() -> None:
    page = f"text\n<!-- written by python -m bench.ledger -->\n{write_table([LINE], [])}<!-- end of ledger -->\n"
    assert read_table(page) == [LINE]


def test_the_page_has_the_table() -> None:
    lines = read_table(PAGE.read_text(encoding="utf-8"))
    assert {line.name.partition(":")[0] for line in lines} >= {"triton-bert", "optimum", "tensorrt-demo"} and len(
        lines
    ) >= 30
    assert len({line.name for line in lines}) == len(lines)


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (replace(LINE, error_pct=12.5), "error 10.0%, now 12.5%"),
        (replace(LINE, inside_pct=67.0), "100% inside the interval, now 67%"),
        (replace(LINE, measurements=2), "3 measurements, now 2"),
        (replace(LINE, name="other"), "3 measurements, now 0"),
    ],
)
def test_a_planted_fault_stops_the_gate(now: Line, told: str) -> None:
    (worse,) = find_worse([LINE], [now])
    assert told in worse


def test_small_changes_pass_the_gate() -> None:
    assert find_worse([LINE], [replace(LINE, error_pct=11.9, inside_pct=96.0)]) == []
    large = replace(LINE, error_pct=40.0)
    assert find_worse([large], [replace(LINE, error_pct=43.9)]) == []


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_estimates_are_as_good_as_the_page_says_or_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    # Image networks hold a gigabyte of weights: `python -m bench.ledger --check` judges them.
    sources = [word for name in ("neusight", "optimum", "tensorrt-demo", "triton-bert") for word in ("--source", name)]
    monkeypatch.setattr("sys.argv", ["ledger", "--check", "-o", str(tmp_path), *sources])
    assert ledger.main() == 0
    kernel_times = CostModel.kernel_times
    monkeypatch.setattr(CostModel, "kernel_times", lambda *arguments: 1.5 * kernel_times(*arguments))
    assert ledger.main() == 1
