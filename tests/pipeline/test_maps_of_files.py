"""A map that was planned from files alone, with no database anywhere, in every verb."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpuprof
from gpuprof.cli.main import main
from gpuprof.domain.deployment import read_map
from gpuprof.errors import InputError
from gpuprof.pipeline.arguments import locate_files
from gpuprof.pipeline.serve import MapReplanner, check_adaptable
from gpuprof.serving.change.adapt import Load
from tests.small_models import write_text_model


@pytest.fixture
def map_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A map in a folder beside that of its model, planned from the folder above both; then work goes on elsewhere."""
    for name in ("models", "maps", "elsewhere"):
        (tmp_path / name).mkdir()
    write_text_model(tmp_path / "models/text.onnx", 64)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUPROF_DB", raising=False)
    (tmp_path / "slo.csv").write_text("model,rate_rps,slo_ms,dims\nmodels/text.onnx,200,50,seq=32\n")
    gpuprof.place("slo.csv", fleet="v100:2").write("maps/map.json")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "maps/map.json"


def test_paths_count_from_the_map(map_file: Path) -> None:
    deployment = read_map(map_file)
    assert deployment.models["text"].path == "../models/text.onnx"
    located = locate_files(deployment, map_file.parent).models["text"].path
    assert located is not None and Path(located).is_absolute() and Path(located).is_file()


def test_it_is_explained_checked_simulated_and_followed(map_file: Path) -> None:
    assert gpuprof.explain(map_file).to_frame()["chosen"].any()
    assert gpuprof.check(map_file).is_sound
    traffic = gpuprof.SimulatedTraffic(duration_s=4.0, seed=1)
    simulated = gpuprof.simulate(map_file, traffic)
    assert simulated.to_frame()["in_time_pct"].min() > 90.0
    followed = gpuprof.simulate(map_file, traffic, rescheduling=gpuprof.Rescheduling(period_s=1.0))
    assert followed.runs[0].timetable is not None


def test_it_is_planned_anew_while_it_is_served(map_file: Path) -> None:
    deployment = read_map(map_file)
    check_adaptable(locate_files(deployment, map_file.parent), None, None)
    wanted = MapReplanner(map_file.parent, None, False, deployment)(deployment, Load({"text": 400.0}, {}))
    assert wanted is not None
    assert sum(replica.rate_rps for *_, replica in wanted.places()) == pytest.approx(400.0)
    assert wanted.models["text"].dims == "seq=32"


def test_another_network_behind_the_name_is_refused_unless_that_is_allowed(
    map_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text_model(map_file.parent.parent / "models/text.onnx", 512)
    result = gpuprof.check(map_file)
    assert [(violation.rule, violation.where) for violation in result.violations] == [("file", "text")]
    assert "not the file that the map was planned with: its sha256 is" in result.violations[0].message
    allowed = gpuprof.check(map_file, allow_changed=True)
    assert not any(violation.rule == "file" for violation in allowed.violations)
    assert any("not the file" in note for note in allowed.notes)
    assert main(["check", str(map_file)]) == 1
    assert "not the file" in capsys.readouterr().out
    traffic = gpuprof.LoadTraffic(duration_s=0.2, warmup_s=0.0)
    with pytest.raises(InputError, match=r"not the file that the map was planned with.*--allow-changed"):
        gpuprof.load("http://127.0.0.1:9", map_file, traffic=traffic)
