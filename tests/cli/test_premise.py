"""Plans on a premise or on computed rows name it, and never call such figures measured."""

import json
from pathlib import Path

import pytest

from gpuprof.cli.main import main
from gpuprof.lab.scenarios import build_database


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with three services of BERT on the thesis's V100, in rows that a program computed."""
    monkeypatch.chdir(tmp_path)
    services = "".join(f"bert,20,400,{name}\n" for name in "abc")
    (tmp_path / "slo.csv").write_text(f"model,rate_rps,slo_ms,service\n{services}")
    build_database("thesis-shares", tmp_path, None).rename(tmp_path / "gpuprof-db")
    return tmp_path


def test_a_plan_by_ushers_premise_names_it_and_check_refuses_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["place", "--gpus", "v100", "--estimator", "usher"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 × v100 ($3.06/h), minimum by a premise." in text
    assert "USHER's: models that fit by their compute requirement do not slow each other down" in text
    assert "measured" not in text and "interpolated" not in text and "proven" not in text
    replicas = [
        replica
        for gpu in json.loads((folder / "map.json").read_text())["nodes"][0]["gpus"]
        for part in gpu["partitions"]
        for replica in part["replicas"]
    ]
    assert {replica["predicted"]["source"] for replica in replicas} == {"computed, assumed"}
    assert main(["check", "map.json", "--estimator", "database"]) == 1


def test_computed_rows_are_called_computed_by_every_estimator(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for estimator in ("measured", "database", "usher"):
        assert main(["estimate", "bert", "--batch", "8", "--estimator", estimator, "--device", "v100", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert {row["latency_source"] for row in rows} == {"computed"}
