import json
from dataclasses import replace
from pathlib import Path

import pytest
from onnx import helper

import gpuprof
from gpuprof.domain.catalogue import device
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.estimate import MEASURED, Estimate, Figure
from gpuprof.domain.share import Share
from gpuprof.errors import GpuprofError, InputError
from gpuprof.kernel_db.schema import DeviceRow, ModelRow
from gpuprof.pipeline.devices import resolve_device
from gpuprof.pipeline.estimate import describe_full_occupancy
from gpuprof.pipeline.problem import PlanningOptions
from tests.estimators.rows import database
from tests.profiling.models import write_mlp
from tests.small_models import write_model


@pytest.fixture
def mlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_mlp(tmp_path / "mlp.onnx")


def test_text_and_types_of_shares_and_neighbours_mean_the_same(mlp: Path) -> None:
    by_text = gpuprof.estimate([mlp], device="a100-80", share="50", beside=[f"{mlp}@1:50"])
    typed = gpuprof.estimate(
        [mlp], device="a100-80", share=Share(50.0), beside=[gpuprof.Workload(str(mlp), 1, Share(50.0))]
    )
    assert by_text == typed
    assert by_text.rows()[0]["beside"] == "mlp@1:50%"


def test_a_neighbour_without_a_share_gets_what_is_left(mlp: Path) -> None:
    assert gpuprof.estimate([mlp], device="a100-80", share="60", beside=[str(mlp)]).beside[0].share == Share(40.0)
    with pytest.raises(InputError, match="leave nothing of the device"):
        gpuprof.estimate([mlp], device="a100-80", beside=[str(mlp)])


def test_neighbours_in_whole_mig_instances_have_instances_of_their_own(mlp: Path) -> None:
    def estimate(share: str, beside: list[str]) -> float:
        (each,) = gpuprof.estimate([mlp], device="a100-80", batches=(64,), share=share, beside=beside).estimates
        return each.latency_ms.value

    alone = estimate("1g.10gb", [])
    assert alone <= estimate("1g.10gb", [f"{mlp}@64:1g.10gb"] * 6) <= 1.07 * alone
    assert alone <= estimate("1g.10gb", [str(mlp), f"{mlp}@64:2g.20gb"]) <= 1.07 * alone
    half = estimate("3g.40gb:50", [f"{mlp}@64:3g.40gb", f"{mlp}@64:3g.40gb:50"])
    assert half == estimate("3g.40gb:50", [f"{mlp}@64:3g.40gb:50"])
    with pytest.raises(InputError, match="cannot be cut into 8 × 1g"):
        estimate("1g.10gb", [f"{mlp}@64:1g.10gb"] * 7)
    with pytest.raises(InputError, match="instances or has none"):
        estimate("1g.10gb", [f"{mlp}@64:50"])


def test_the_frame_has_a_row_for_each_batch_and_the_notebook_shows_it(mlp: Path) -> None:
    result = gpuprof.estimate([mlp], batches=(1, 4), device="a100-80")
    assert result.to_frame()["batch"].tolist() == [1, 4]
    assert result._repr_html_().count("<tr") == 3
    with pytest.raises(InputError, match=r"batches of EstimateOptions must be"):
        gpuprof.estimate([mlp], batches=(0,), device="a100-80")


def test_by_default_a_model_is_estimated_at_the_batch_that_it_fixes(tmp_path: Path, mlp: Path) -> None:
    fixed = write_model(tmp_path / "fixed.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": [8, 64]}, {"y": None})
    estimates = gpuprof.estimate([fixed, mlp], device="a100-80").estimates
    assert [estimate.workload.batch for estimate in estimates] == [8, 1]


def test_an_empty_database_is_told_and_a_directory_of_others_refused(tmp_path: Path, mlp: Path) -> None:
    (tmp_path / "db").mkdir()
    demand = gpuprof.Demand(str(mlp), rate_rps=10.0, slo=gpuprof.Slo(50.0))
    for notes in (
        gpuprof.estimate([mlp], db=tmp_path / "db", device="l4").notes,
        gpuprof.place([demand], fleet="l4", db=tmp_path / "db").notes,
    ):
        assert any("db is empty: nothing in it was measured" in note for note in notes)
    with pytest.raises(
        InputError, match=r"unknown model 'mlp': nothing was measured, and it is no file \(give an ONNX"
    ):
        gpuprof.estimate(["mlp"], db=tmp_path / "db", device="l4")
    (tmp_path / "db" / "notes.txt").touch()
    with pytest.raises(InputError, match=r"db is no kernel database: it holds notes\.txt and no run"):
        gpuprof.estimate([mlp], db=tmp_path / "db", device="l4")


@pytest.mark.parametrize(
    ("second", "source", "is_told"), [(100.0, MEASURED, True), (60.0, MEASURED, False), (100.0, "roofline", False)]
)
def test_a_maximum_occupancy_that_is_full_everywhere_is_told(second: float, source: str, is_told: bool) -> None:
    estimates = [
        Estimate(
            gpuprof.Workload("net", batch, Share()),
            "h200",
            Figure(1.0, source),
            creq_pct=(("max_occupancy", Figure(value, source)), ("wavg_occupancy", Figure(30.0, source))),
        )
        for batch, value in ((1, 100.0), (4, second))
    ]
    notes = describe_full_occupancy(estimate.creq("max_occupancy") for estimate in estimates)
    assert bool(notes) == is_told and all("maximum occupancy is 100% for 2 of 2" in note for note in notes)


def test_a_gpu_of_this_machine_is_known_though_the_catalogue_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    board = replace(device("h100"), name="frobnicator-9000")
    monkeypatch.setattr("gpuprof.machine.gpu.local_gpus", lambda: (board,))
    assert resolve_device("frobnicator-9000", None).name == "frobnicator-9000"
    with pytest.raises(InputError, match="unknown device 'frobnicator-9001'"):
        resolve_device("frobnicator-9001", None)


def test_of_a_device_that_was_profiled_without_its_peak_rates_that_is_said(tmp_path: Path) -> None:
    measured = ModelRow("r1", "net", "frobnicator-9000", 1, latency_p50_ms=2.0)
    db = database(tmp_path / "db", [measured], [DeviceRow("r1", "frobnicator-9000", "gpu", 132)])
    with pytest.raises(InputError, match="its peak rates are not known"):
        resolve_device(None, db)


_OWN = """
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share


class Own:
    premise = "a batch takes 2 ms"

    def __init__(self, db):
        pass

    def estimate(self, model, device, batch, share, beside=(), processes=1):
        time = Figure((2.0 + batch) / device.fraction(share) * processes, "own", 1.0, 90.0)
        memory = Figure(1e9, "own", 9e8, 2e9)
        return Estimate(Workload(model, batch, share, processes), device.name, time, memory_bytes=memory)

    def batches(self, model, device, share):
        return (1, 2, 4)

    def shares(self, model, device):
        return (Share(50.0), Share())
"""


@pytest.fixture
def here(here: Path) -> Path:
    gpuprof.build_model("mlp", here / "mlp.onnx")
    return here


def _place(here: Path, estimator: str) -> DeploymentMap:
    demands = [gpuprof.Demand(str(here / "mlp.onnx"), rate_rps=100.0, slo=gpuprof.Slo(500.0))]
    return gpuprof.place(demands, fleet="v100", policy="ffd", options=PlanningOptions(estimator=estimator)).deployment


def _halve_memory(deployment: DeploymentMap) -> DeploymentMap:
    content = json.loads(deployment.to_json())
    predicted = content["nodes"][0]["gpus"][0]["partitions"][0]["replicas"][0]["predicted"]
    predicted["memory_bytes"] //= 2
    return DeploymentMap.model_validate(content)


def _change_time(deployment: DeploymentMap) -> DeploymentMap:
    content = json.loads(deployment.to_json())
    replica = content["nodes"][0]["gpus"][0]["partitions"][0]["replicas"][0]
    assert replica["batch"] > 1
    replica["batch_latency_ms"][0] *= 0.9
    return DeploymentMap.model_validate(content)


def test_the_memory_and_the_smaller_batches_of_a_map_from_files_alone_are_recomputed(here: Path) -> None:
    demands = [gpuprof.Demand(str(here / "mlp.onnx"), rate_rps=20_000.0, slo=gpuprof.Slo(20.0))]
    plan = gpuprof.place(demands, fleet="v100", policy="ffd").deployment
    assert gpuprof.check(plan).is_sound
    for change in (_halve_memory, _change_time):
        assert {violation.rule for violation in gpuprof.check(change(plan)).violations} == {"figures"}, change.__name__


def test_a_plugin_estimator_is_asked_again_or_said_to_be_gone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "own_estimator.py").write_text(_OWN)
    with monkeypatch.context() as changed:
        changed.syspath_prepend(here)
        plan = _place(here, "own_estimator:Own")
        assert gpuprof.check(plan).is_sound
        assert not gpuprof.check(_halve_memory(plan)).is_sound
    settings = plan.planned_with.model_copy(update={"estimator": "gone_estimator:Own"})
    changed_map = _halve_memory(plan.model_copy(update={"planned_with": settings}))
    result = gpuprof.check(changed_map)
    assert result.is_sound
    assert any(note.startswith("the premise is a batch takes 2 ms; 0 of 1 model") for note in result.notes)
    assert any("the estimator 'gone_estimator:Own' is not installed here" in note for note in result.notes)
    assert any(
        note.startswith("the estimator 'gone_estimator:Own' cannot be asked here")
        and note.endswith("the times and the memory written in the map are believed")
        for note in result.notes
    )
    with pytest.raises(InputError, match="cannot import the estimator 'gone_estimator:Own'"):
        gpuprof.check(changed_map, estimator="gone_estimator:Own")


def test_a_named_estimator_is_asked_or_refused_where_neither_files_nor_a_database_are_there(here: Path) -> None:
    planned = _place(here, "database")
    (here / "mlp.onnx").unlink()
    for name, message in (
        ("measured", "there is no database"),
        ("json:loads", "cannot be made from a kernel database"),
    ):
        with pytest.raises(GpuprofError, match=message):
            gpuprof.check(planned, estimator=name)
