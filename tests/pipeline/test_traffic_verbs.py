"""`simulate`, `load` and traces as functions: settings with units in, results out, nothing printed."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import gpuprof
from gpuprof.cli.main import main
from gpuprof.domain.deployment import write_map
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.pipeline.load import LoadTraffic
from gpuprof.pipeline.recorded_problem import time_map_by
from gpuprof.pipeline.serve import ServeSettings
from gpuprof.pipeline.simulate import SimulatedTraffic
from tests.command_line import CommandLine
from tests.estimators.rows import database, measured_row
from tests.simulator.maps import make_map, replica

MAP = make_map([[replica("m", [5.0, 6.0])], [replica("n", [10.0])]], slo_ms=100.0)
SHORT = SimulatedTraffic(rates_rps={"m": 50.0, "n": 20.0}, duration_s=4.0, seed=3)


def test_simulate_gives_what_the_command_prints_and_prints_nothing(tmp_path: Path, cli: CommandLine) -> None:
    steps: list[gpuprof.Progress] = []
    simulated = gpuprof.simulate(MAP, SHORT, progress=steps.append)
    assert cli.capsys.readouterr() == ("", "")
    assert (steps[-1].done, steps[-1].total) == (100, 100)
    write_map(MAP, tmp_path / "map.json")
    words = "--rate m=50 --rate n=20 --duration 4s --seed 3 -o"
    printed = cli.json("simulate", tmp_path / "map.json", words, tmp_path / "seen.json")
    assert printed == json.loads(json.dumps(simulated.document()))
    simulated.write(tmp_path / "mine.json")
    assert (tmp_path / "mine.json").read_text() == (tmp_path / "seen.json").read_text()
    assert list(simulated.to_frame()["model"]) == ["m", "n"]
    assert not simulated.is_comparison and simulated.comparison() == ()


def test_a_trace_is_recorded_shown_and_simulated(tmp_path: Path) -> None:
    recorded = gpuprof.record_trace({"m": 50.0, "n": 20.0}, duration_s=4.0, seed=1)
    recorded.write(tmp_path / "trace.csv")
    shown = gpuprof.show_trace(tmp_path / "trace.csv")
    counts = {str(row["model"]): row["counts"] for row in shown.rows()}
    assert {model: len(requests) for model, requests in counts.items()} == {"m": 60, "n": 60}
    result = gpuprof.simulate(MAP, SimulatedTraffic(trace=tmp_path / "trace.csv"))
    assert {row["model"]: row["requests"] for row in result.rows()} == {
        m: sum(requests) for m, requests in counts.items()
    }
    with pytest.raises(InputError, match="would hold no request"):
        gpuprof.record_trace({"m": 1e-3}, duration_s=1.0)


class TwiceAsLong(DatabaseEstimator):
    """An estimator of somebody else's."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return twice the database's time."""
        estimate = super().estimate(model, device, batch, share, beside, processes)
        return replace(estimate, latency_ms=estimate.latency_ms.scale_by(2.0))


@pytest.fixture
def planned_folder(tmp_path: Path) -> Path:
    """Return the folder of a database and the map of a model that takes 5 ms at batch 1."""
    gpu = [measured_row("m", batch, 4.0 + batch, device="v100") for batch in (1, 2)]
    database(tmp_path / "db", gpu)
    demand = gpuprof.Demand("m", rate_rps=50.0, slo=gpuprof.Slo(100.0))
    options = gpuprof.PlanningOptions(max_batch=1)
    gpuprof.place([demand], fleet="v100", db=tmp_path / "db", options=options).write(tmp_path / "map.json")
    return tmp_path


def test_another_estimator_says_how_long_batches_take_in_simulate_and_load(planned_folder: Path) -> None:
    name, traffic = f"{__name__}:TwiceAsLong", SimulatedTraffic(duration_s=4.0, seed=3)
    by_map = gpuprof.simulate(planned_folder / "map.json", traffic, db=planned_folder / "db")
    slower = gpuprof.simulate(planned_folder / "map.json", traffic, db=planned_folder / "db", estimator=name)
    by_default, twice = (simulated.outcome.models[0].stage_mean_ms["service"] for simulated in (by_map, slower))
    assert by_default is not None and twice == pytest.approx(2.0 * by_default, rel=1e-3)
    timed = time_map_by(gpuprof.read_map(planned_folder / "map.json"), name, planned_folder / "db", planned_folder)
    assert timed.planned_with.estimator == name
    with gpuprof.serve(planned_folder / "map.json", ServeSettings(port=0, simulate=True)) as server:
        short = LoadTraffic(duration_s=0.5, warmup_s=0.0)
        result = gpuprof.load(
            server.url, planned_folder / "map.json", traffic=short, db=planned_folder / "db", estimator=name
        )
    predicted = result.predictions["m"].infer_ms
    assert predicted == pytest.approx(10.0, rel=1e-2)


def test_a_day_of_azure_functions_becomes_a_trace_of_named_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "day.csv").write_text("HashOwner,HashApp,HashFunction,Trigger,1,2\no,a,f,http,1,0\no,a,g,timer,5,5\n")
    trace = gpuprof.read_azure_trace(tmp_path / "day.csv", ["bert", "mlp"])
    assert {row["model"]: row["requests"] for row in trace.rows()} == {"bert": 10, "mlp": 1}
    words = ["--azure", str(tmp_path / "day.csv"), "--models", "bert,mlp", "-o", str(tmp_path / "t.csv")]
    assert main(["trace", "make", *words]) == 0
    assert gpuprof.show_trace(tmp_path / "t.csv").trace.requests == 11
    assert main(["trace", "make", "--rate", "10", *words[2:]]) == 3
    assert "--models names functions of --azure" in capsys.readouterr().err
    with pytest.raises(InputError, match="2 functions that are called but 3 names are given"):
        gpuprof.read_azure_trace(tmp_path / "day.csv", ["a", "b", "c"])
