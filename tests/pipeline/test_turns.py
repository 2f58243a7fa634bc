"""Models that take turns on one GPU, by the command line: planned, checked, and simulated as predicted."""

import json
from pathlib import Path

import pytest

from gpuprof.cli.main import main
from gpuprof.domain.catalogue import datasets

_ASKED = """model,rate_rps,slo_ms
alexnet,100,100
resnet50,20,200
mobilenet_v2,50,150
densenet121,10,300
"""


@pytest.mark.slow
def test_turns_are_simulated_no_later_than_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # no cell of a table is cut into lines
    Path("slo.csv").write_text(_ASKED)
    assert main(["db", "import", str(datasets() / "v100_profiles.csv"), "--db", "db"]) == 0
    gpus = {}
    for name, options in {"apart": [], "turns": ["-O", "temporal=true"]}.items():
        words = ["place", "--db", "db", "--gpus", "v100", "--policy", "gpulet", *options, "-o", f"{name}.json"]
        assert main(words) == 0
        gpus[name] = json.loads(Path(f"{name}.json").read_text())["predicted"]["gpus"]
    assert gpus == {"apart": 2, "turns": 1}
    assert "take turns in" in capsys.readouterr().out
    assert main(["check", "turns.json", "--db", "db"]) == 0
    assert main(["check", "turns.json"]) == 0
    assert main(["explain", "turns.json", "alexnet", "--db", "db"]) == 0
    assert "in the same share, by turns" in capsys.readouterr().out
    assert main(["export", "turns.json", "--to", "triton", "-o", "triton"]) == 0
    options = [path.read_text() for path in Path("triton").glob("*/server.options")]
    assert "--rate-limit=execution_count\n" in options
    models = json.loads(Path("turns.json").read_text())["models"]
    capsys.readouterr()
    assert main(["simulate", "turns.json", "--duration", "300s", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["models"]:
        assert row["in_time"] >= 0.99 * row["requests"]
        predicted_ms = models[row["model"]]["predicted"]["p99_ms"]
        assert 0.8 * row["p99_ms"] <= predicted_ms <= 1.3 * row["p99_ms"]
