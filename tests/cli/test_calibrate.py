from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.cli.main import main
from tests.estimators.rows import database, measured


def test_a_database_without_the_metrics_is_told_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database(tmp_path / "db", [measured("net", 1, 5.0, device="v100")])
    assert main(["calibrate", "--db", str(tmp_path / "db"), "-o", str(tmp_path / "c.json")]) == 3
    assert "iGniter's metrics: power_w" in capsys.readouterr().err
    assert not (tmp_path / "c.json").exists()


def test_a_profile_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text("nonsense")
    assert main(["calibrate", "--profile", str(tmp_path / "p.jsonl")]) == 3
    assert "not a line of an iGniter profile" in capsys.readouterr().err
