"""What the reproductions print to be typed: the lines of ``gpuprof`` that write the maps of their figures."""

from __future__ import annotations

import importlib
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import reproduce
from bench.reproduce import (
    igniter_fig14,
    igniter_fig20,
    igniter_table1,
    parvagpu_fig5,
    parvagpu_fig10,
    stand_in_db,
    thesis_cluster,
    thesis_fig6_1,
)
from bench.reproduce.reproduction import Cell
from gpuprof.cli.main import main
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.map_file import read_map
from tests.bench.published import write_igniter, write_parvagpu

NOWHERE = Path("nowhere")
#: Nothing is placed in these: tables, and measurements beside what a model says of them.
PLACE_NOTHING = {"igniter_fig4", "igniter_fig12", "parvagpu_fig3", "usher_fig6"}
#: Places anew all the time.
PLACES_OVER_TIME = {"usher_fig24"}


@pytest.fixture(autouse=True)
def work_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def type_lines(lines: Sequence[str], *only: str) -> dict[str, DeploymentMap]:
    """Run the lines, of those that place only those whose policy is named; return policy as typed → map."""
    maps = {}
    for words in map(shlex.split, lines):
        if words[:3] == ["python", "-m", "bench.reproduce.stand_in_db"]:
            assert stand_in_db.main(words[3:]) == 0
        elif words[1] == "db":
            assert main(words[1:]) == 0
        else:
            assert words[:2] == ["gpuprof", "place"]
            policy = " ".join(words[words.index("--policy") + 1 : words.index("--best-effort")])
            if not only or policy in only:
                main(words[1:])  # 0, or what says that demands are left over: the map is there in either case
                maps[policy] = read_map(Path(words[-1]))
    return maps


@pytest.mark.parametrize(
    "path", sorted(Path(next(iter(reproduce.__path__))).glob("*_*.py")), ids=lambda path: path.stem
)
def test_every_reproduction_that_places_something_prints_its_lines(path: Path) -> None:
    if "sys.exit(command.run(" not in path.read_text(encoding="utf-8"):
        return
    places = path.stem not in PLACE_NOTHING | PLACES_OVER_TIME
    assert ("commands=" in path.read_text(encoding="utf-8")) is places
    assert importlib.import_module(f"bench.reproduce.{path.stem}").compute


def test_parvagpus_scenarios_can_be_typed(tmp_path: Path) -> None:
    found = parvagpu_fig5.compute(write_parvagpu(tmp_path / "reference"), (1,))
    maps = type_lines(found.commands)
    said = {"mig-serving", "gpulet", "igniter", "ffd", "optimal"}
    assert said < set(maps) and len(maps) == 8
    for name in said:
        assert maps[name].predicted.gpus == found.row(name)[0]
    assert maps["parvagpu -O processes=5"].predicted.gpus == found.row("parvagpu")[0]
    assert maps["parvagpu -O single=true"].predicted.gpus == found.row("parvagpu-single")[0]


def test_services_of_many_tenants_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parvagpu_fig10, "_SCENARIO", 1)
    found = parvagpu_fig10.compute(write_parvagpu(tmp_path / "reference", rates=(690.0, 680.0)), (3,))
    maps = type_lines(found.commands, "parvagpu -O processes=5")
    assert [one.predicted.gpus for one in maps.values()] == [6] == [found.row("parvagpu")[0]]


@pytest.mark.slow
def test_igniters_plans_can_be_typed_but_those_that_break_slos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = write_igniter(tmp_path / "reference")
    found = igniter_fig14.compute(reference)
    maps = type_lines(found.commands, "igniter", "gpulet", "gslice")
    for name, one in maps.items():
        assert (one.predicted.gpus, one.predicted.cost_per_hour) == pytest.approx(found.row(name)[:2])
    blind = next(shlex.split(line) for line in found.commands if "aware=false" in line and "gpulet" in line)
    assert main(blind[1:]) != 0 and not Path(blind[-1]).exists()
    assert "made a map that breaks" in capsys.readouterr().err
    table = igniter_table1.compute(reference)
    for name, one in type_lines(table.commands, "igniter", "gpulet").items():
        assert one.predicted.gpus == table.row(name)[0]
        assert all(
            f"{replica.model} ({replica.sm_share_pct:g}%" in str(table.row(name)[1]) for *_, replica in one.places()
        )
    both = igniter_fig20.compute(reference)
    assert [line.split("--gpus ")[1].split()[0] for line in both.commands[1:]] == ["t4", "v100", "t4,v100"]
    assert type_lines(both.commands)["igniter"].predicted.cost_per_hour == pytest.approx(both.row("t4 or v100")[1])


@pytest.mark.slow
def test_the_thesis_plans_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thesis_cluster, "SEEDS", 1)
    monkeypatch.setattr(thesis_cluster, "_OWN_LIMIT_S", 1.0)
    experiment = thesis_fig6_1.EXPERIMENT
    plans = {policy: thesis_cluster.plan(policy, experiment, 3) for policy in thesis_cluster.POLICIES}
    maps = type_lines(thesis_cluster.list_lines(plans.values()))
    assert set(maps) == set(thesis_cluster.POLICIES.values())
    for name, typed in thesis_cluster.POLICIES.items():
        planned = plans[name].deployment
        if name == "igniter":  # plans for as many as needed, of which the first three are used
            assert planned.nodes[0].gpus == maps[typed].nodes[0].gpus[:3]
        elif name != "optimal":
            assert shapes(maps[typed]) == shapes(planned)
        near = 0.25 if name == "optimal" else 1e-6  # which searches for as long as it may, on a busy machine less
        assert math.isclose(maps[typed].predicted.goodput_rps, planned.predicted.goodput_rps, rel_tol=near)


def shapes(deployment: DeploymentMap) -> list[tuple[Cell, ...]]:
    """Return what a map has where."""
    return [
        (float(gpu.index), one.model, float(one.batch), round(one.sm_share_pct, 6), round(one.rate_rps, 6))
        for _, gpu, _, one in deployment.places()
    ]


def test_the_lines_of_a_reproduction_are_part_of_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = write_parvagpu(tmp_path / "reference")
    from bench.reproduce import command

    assert (
        command.run("", lambda path: parvagpu_fig5.compute(path, (1,)), ["--reference", str(reference), "--json"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)["commands"]
    assert printed[0].startswith("gpuprof db import ") and printed[-1].startswith("gpuprof place ")
