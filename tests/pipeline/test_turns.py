"""Models that take turns on one GPU, by the command line: planned, checked, and simulated as predicted."""

import json
from pathlib import Path

import pytest

from gpuprof.domain.catalogue import datasets
from tests.command_line import CommandLine

_ASKED = """model,rate_rps,slo_ms
alexnet,100,100
resnet50,20,200
mobilenet_v2,50,150
densenet121,10,300
"""


@pytest.mark.slow
def test_turns_are_simulated_as_predicted(here: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no cell of a table is cut into lines
    Path("slo.csv").write_text(_ASKED)
    cli("db import", datasets() / "v100_profiles.csv", "--db db")
    place = "place --db db --gpus v100 --policy gpulet"
    cli(place, "-o apart.json")
    assert "take turns in" in cli(place, "-O temporal=true -o turns.json").out
    assert [json.loads(Path(name).read_text())["predicted"]["gpus"] for name in ("apart.json", "turns.json")] == [2, 1]
    cli("check turns.json --db db")
    cli("check turns.json")
    assert "in the same share, by turns" in cli("explain turns.json alexnet --db db").out
    models = json.loads(Path("turns.json").read_text())["models"]
    for row in cli.json("simulate turns.json --duration 300s")["models"]:
        assert row["in_time"] >= 0.99 * row["requests"]
        predicted_ms = models[row["model"]]["predicted"]["p99_ms"]
        assert 0.8 * row["p99_ms"] <= predicted_ms <= 1.3 * row["p99_ms"]
