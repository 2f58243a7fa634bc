"""``gpuprof trace``, ``gpuprof simulate`` and ``gpuprof report`` from the command line."""

import json
from pathlib import Path

import pytest

from gpuprof.domain.deployment import write_map
from tests.command_line import CommandLine
from tests.simulator.maps import make_map, replica


@pytest.fixture
def map_file(tmp_path: Path) -> Path:
    path = tmp_path / "map.json"
    gpus = [[replica("a", [4.0, 5.0], max_wait_ms=1.0), replica("b", [3.0])]] * 2
    write_map(make_map(gpus, slo_ms=20.0, rate_rps=50.0), path)
    return path


def test_a_map_is_simulated_at_its_own_rates(map_file: Path, cli: CommandLine) -> None:
    document = cli.json("simulate", map_file, "--duration 5s")
    assert document["schema"] == "gpuprof.simulation/1"
    assert [model["model"] for model in document["models"]] == ["a", "b"]
    assert document["models"][0]["rate_rps"] == pytest.approx(50.0, rel=0.3)


@pytest.mark.slow
def test_tables_show_models_and_stages(map_file: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # headings are broken in narrow terminals
    words = ["simulate", str(map_file), "--duration", "2s", "--fail", "node0@1s"]
    captured = cli(*words, code=1)
    assert len(captured.out.splitlines()) <= 8 and "missed" in captured.out and "lost to a failure" in captured.out
    assert "2 of 2 models missed the SLO" in captured.err.splitlines()[-1]
    out = cli(*words, "-v --no-fail").out
    for text in ("in time %", "batching p99 ms", "missed failed", "node0/1", "mean batch"):
        assert text in out


def test_what_serving_adds_is_taken_from_the_map(map_file: Path, cli: CommandLine) -> None:
    content = json.loads(map_file.read_text())
    content["planned_with"]["overhead_ms"] = 2.5
    map_file.write_text(json.dumps(content))
    stages = cli.json("simulate", map_file, "--duration 1s")["models"][0]["stage_mean_ms"]
    assert stages["network"] == pytest.approx(2.5)


def test_the_last_request_of_a_trace_is_simulated_too(map_file: Path, tmp_path: Path, cli: CommandLine) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,model\n0,a\n500,a\n", encoding="utf-8")
    captured = cli("simulate", map_file, "--trace", trace, "--json")
    assert json.loads(captured.out)["requests"] == 2
    assert "a gap of 500 s" in captured.err


def test_a_report_is_written_from_maps_and_simulations(map_file: Path, tmp_path: Path, cli: CommandLine) -> None:
    simulated, page = tmp_path / "sim.json", tmp_path / "report.html"
    cli("simulate", map_file, "--duration 2s -o", simulated)
    cli("report", map_file, simulated, "-o", page)
    assert "Map of test" in page.read_text() and page.read_text().count("<figure>") > 1
    cli("report", map_file, "-o", tmp_path / "no" / "page.html", code=3)
    cli("report", tmp_path / "none.json", code=3)
