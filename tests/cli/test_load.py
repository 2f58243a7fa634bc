import json
from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.reruns import serves_in_real_time
from tests.serving.running import map_of, replica, running

pytestmark = serves_in_real_time


def test_measured_stands_beside_predicted(tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # headings are broken in narrow terminals
    document = map_of({"a": "null:4", "b": "null:1k"}, [replica("a", batch_latency_ms=[0.2]), replica("b")])
    with running(tmp_path, document) as server:
        words = ["load", server.url, "--no-fail", "--map", str(tmp_path / "map.json"), "--warmup", "100ms"]
        words += ["--duration", "1s"]
        first, second = cli.json(*words)
        assert first["model"] == "a" and first["predicted_p50_ms"] == pytest.approx(0.2, abs=0.1)
        assert first["p50_ms_error"] == pytest.approx(first["p50_ms"] / first["predicted_p50_ms"] - 1.0)
        assert first["p50_low_ms"] <= first["p50_ms"] <= first["p50_high_ms"]
        assert (first["p99_ms"], first["p99_ms_error"]) == (None, None)  # of fifty requests
        assert first["answered"] == first["sent"] > 20
        assert second["predicted_p50_ms"] is not None  # by the predicted time of a whole batch
        assert sum(first["stages"]["batches"].values()) >= first["sent"]
        captured = cli(*words, "--rate-scale 0.5 -v")
        table = captured.out
        assert "goodput/s" in table and "network and router ms" in table and "95% from" in table
        assert "of it network" in table
        table = cli("load", server.url, "--no-fail --rate a=20 --duration 0.5 --warmup 0 --csv").out
        assert table.startswith("model,rate_rps,goodput_rps,")


def test_nothing_is_predicted_of_a_closed_loop(tmp_path: Path, cli: CommandLine) -> None:
    with running(tmp_path, map_of({"a": "null:4", "b": "null:4"}, [replica("a"), replica("b")])) as server:
        words = ["load", server.url, "--no-fail", "--concurrency", "a=2", "--warmup", "0.1", "--duration", "0.6"]
        captured = cli(*words, "--map", tmp_path / "map.json", "--json")
        (row,) = json.loads(captured.out)
        assert row["model"] == "a" and row["answered"] == row["sent"] > 20 and row["predicted_p50_ms"] is None
        assert "a 2 at a time" in captured.err and "nothing is predicted" in captured.err


def test_an_address_alone_takes_the_map_here(here: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    assert "nothing says what to send" in cli("load http://127.0.0.1:1", code=3).err
    Path("map.json").write_text(json.dumps(map_of({"a": "null:4"}, [replica("a")])))
    monkeypatch.setattr("gpuprof.cli.load.DEFAULT_URL", "http://127.0.0.1:1")
    for words in (["http://127.0.0.1:1"], ["map.json"], ["--map", "map.json"], []):
        assert "start one with gpuprof serve" in cli("load", *words, code=1).err


def test_a_trace_is_replayed_and_its_results_go_into_the_report(tmp_path: Path, cli: CommandLine) -> None:
    trace = tmp_path / "trace.csv"
    times = [(0.05 * number, "a" if number % 3 else "b") for number in range(30)]
    trace.write_text("time_s,model\n" + "".join(f"{time:.3f},{model}\n" for time, model in times))
    replicas = [replica("a", batch_latency_ms=[0.2]), replica("b", batch_latency_ms=[0.2])]
    with running(tmp_path, map_of({"a": "null:4", "b": "null:1k"}, replicas)) as server:
        words = ["load", server.url, "--no-fail", "--map", str(tmp_path / "map.json"), "--trace", str(trace)]
        words += ["--warmup", "0.2"]
        first, second = cli.json(*words, "-o", tmp_path / "load.json")
        assert [first["sent"], second["sent"]] == [20, 10]
        assert first["rate_rps"] == pytest.approx(20 / 1.45)
        assert first["predicted_goodput_rps"] == pytest.approx(20 / 1.45)  # the same requests, simulated
        assert first["predicted_p50_ms"] == pytest.approx(0.2, abs=0.1)
    assert json.loads((tmp_path / "load.json").read_text())[0]["sent"] == 20
    cli("report", tmp_path / "load.json", "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Mean latency by stage" in page
