"""``gpuprof simulate --reschedule``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gpuprof.cli.main import main
from gpuprof.domain.arrival_process import RecordedArrivals
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.map_file import read_map
from gpuprof.errors import InputError
from gpuprof.pipeline import problem as planning
from gpuprof.pipeline import simulate as verb
from gpuprof.pipeline.report import report
from gpuprof.pipeline.simulate import follow_load, make_scheduler
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Problem
from gpuprof.simulator.cluster import Failure, SimulationOptions
from tests.simulator.maps import make_map, replica

ONE = make_map([[replica("m", [10.0])]], slo_ms=100.0)
LOAD = {"m": RecordedArrivals(np.arange(0, 30_000_000_000, 50_000_000), 30.0)}


@pytest.mark.parametrize(
    ("options", "period_s", "message"),
    [
        (
            SimulationOptions(30.0, failures=(Failure("node0", None, 1.0),)),
            10.0,
            "--reschedule and --fail exclude each other",
        ),
        (SimulationOptions(30.0), 30.0, "--reschedule must be shorter than the duration of 30 s"),
    ],
)
def test_what_cannot_be_rescheduled_is_refused(options: SimulationOptions, period_s: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        follow_load(ONE, LOAD, options, period_s, None, None)


@pytest.fixture
def planned_folder(tmp_path: Path) -> Path:
    """A database of one model in three sizes of instance, and a map for 200 requests/s of it."""
    measured = {1: 60, 2: 130, 7: 500}  # slices: requests/s of one process
    rows = [f"{size},{batch},1,{rate},{batch / rate:.3f}" for size, rate in measured.items() for batch in (1, 2)]
    content = ["Mig instance,Batch size,Workload Number,Throughput,Latency", *rows]
    (tmp_path / "m.csv").write_text("\n".join(content) + "\n")
    (tmp_path / "slo.csv").write_text("model,rate_rps,slo_ms\nm,200,100\n")
    db, a100 = ["--db", str(tmp_path / "db")], ["--gpus", "a100-80"]
    assert main(["db", "import", "parvagpu", str(tmp_path / "m.csv"), *db]) == 0
    place = ["place", "--slo-file", str(tmp_path / "slo.csv"), "-o", str(tmp_path / "map.json")]
    assert main([*place, *a100, "--latency-budget", "0.5", *db]) == 0
    return tmp_path


@pytest.mark.slow
def test_policies_are_compared_on_the_same_load(planned_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    load = [
        "--rate",
        "600",
        "--arrivals",
        "diurnal:4,60",
        "--duration",
        "60s",
        "--reschedule",
        "10s",
    ]
    words = [
        *load,
        "--policy",
        "parvagpu,optimal",
        "--db",
        str(planned_folder / "db"),
        "-o",
        str(planned_folder / "both.json"),
    ]
    assert main(["simulate", str(planned_folder / "map.json"), *words, "--json"]) == 0
    documents = json.loads((planned_folder / "both.json").read_text())
    assert json.loads(capsys.readouterr().out) == documents
    rows = {name: document["rescheduling"] for name, document in documents.items()}
    assert list(rows) == ["parvagpu", "optimal"]
    assert documents["parvagpu"]["requests"] == documents["optimal"]["requests"]
    for name, row in rows.items():
        assert row["maps"] == len(documents[name]["epochs"]) > 1
        assert row["gpu_hours"] > 0
        assert row["goodput_rps"] == pytest.approx(documents[name]["goodput_rps"])
    sections = report([planned_folder / "both.json"], planned_folder / "report.html").sections
    together, *others = sections
    devices, in_time = together.charts
    assert [line.name for line in devices.lines] == [line.name for line in in_time.lines] == ["parvagpu", "optimal"]
    assert max(devices.lines[0].y) == rows["parvagpu"]["most_gpus"]
    assert [section.title for section in others if "Simulation" in section.title] == [
        "Simulation: parvagpu", "Simulation: optimal",
    ]  # fmt: skip


def test_each_map_is_planned_from_the_one_before(planned_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    previous: list[DeploymentMap | None] = []
    plan = planning.plan_map

    def spy(problem: Problem, policy: Policy) -> DeploymentMap:
        previous.append(problem.previous)
        return plan(problem, policy)

    monkeypatch.setattr(verb, "plan_map", spy)
    first = read_map(planned_folder / "map.json")
    scheduler = make_scheduler(first, "ffd", planned_folder / "db")
    second = scheduler({"m": 600.0})
    scheduler({"m": 100.0})
    assert previous == [first, second]
