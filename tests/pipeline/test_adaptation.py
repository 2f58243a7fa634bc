"""What the placer answers to a running server."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.cli.main import main
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.map_file import read_map
from gpuprof.pipeline.serve import MapReplanner, check_adaptable
from gpuprof.serving.change.adapt import Load
from tests.estimators.rows import database, measured_row
from tests.profiling.models import write_mlp


def write_rows(folder: Path, model: str, shares: tuple[float, ...]) -> None:
    """Add a model to the database of a folder, with a batch of 1 in 10 ms on a whole V100."""
    rows = [
        measured_row(
            model, 1, 1000.0 / share, device="v100", share=share, path=f"{model}.onnx", repeats=100, std_ms=0.0,
            sha256=model[0] * 64, memory=2**28, run_id=model,
        )
        for share in shares
    ]  # fmt: skip
    database(folder / "gpuprof-db", rows, run_id=model)


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeploymentMap:
    """A map for one V100, which bears 100 requests/s of the model in batches of 1, and is planned for 20."""
    write_rows(tmp_path, "net", (25.0, 50.0, 75.0, 100.0))
    (tmp_path / "slo.csv").write_text("model,rate_rps,slo_ms\nnet,20,200\n")
    write_mlp(tmp_path / "net.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUPROF_DB", raising=False)
    assert main(["place", "--max-batch", "1"]) == 0
    return read_map(tmp_path / "map.json")


def plan_again(first: DeploymentMap, load: Load, *, more_devices: bool = False) -> DeploymentMap | None:
    return MapReplanner(Path.cwd(), Path("gpuprof-db"), more_devices, first)(first, load)


def share(deployment: DeploymentMap) -> float:
    return sum(replica.sm_share_pct for _, _, _, replica in deployment.places())


def test_more_requests_get_more_of_the_device(first: DeploymentMap) -> None:
    wanted = plan_again(first, Load({"net": 70.0}, {}))
    assert wanted is not None
    assert wanted.models["net"].rate_rps == 70.0
    assert share(wanted) > 75.0  # 75% of it bears 75/s, but not within the SLO
    assert wanted.models["net"].path == str(Path.cwd() / "net.onnx")  # it is found from wherever the new map stands
    unlike = {"found_by": None}  # by whose map it came to be
    assert wanted.planned_with.model_copy(update=unlike) == first.planned_with.model_copy(update=unlike)


@pytest.mark.slow
def test_models_that_slow_each_other_more_than_predicted_never_run_at_the_same_time(
    first: DeploymentMap, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path.cwd(), "heavy", (25.0, 50.0))
    Path("slo.csv").write_text("model,rate_rps,slo_ms\nnet,8,200\nheavy,8,200\n")
    write_mlp(Path("heavy.onnx"))
    # In a worker of both, batches would not run beside one another.
    assert main(["place", "-o", "both.json", "--max-batch", "1", "--gpus", "v100:2", "--isolate"]) == 0
    both = read_map(Path("both.json"))
    assert both.predicted.gpus == 1
    replan, rates = MapReplanner(Path.cwd(), Path("gpuprof-db"), False, both), {"net": 8.0, "heavy": 8.0}
    together = replan(both, Load(rates, {}))
    assert together is not None and together.predicted.gpus == 1
    apart = replan(both, Load(rates, {}, {("net", "heavy"): 30.0}))
    assert apart is not None  # taking turns, they do not slow each other
    assert apart.predicted.gpus == 2 or all(replica.turns for *_, replica in apart.places())
    slower = replan(both, Load(rates, {}, {("net", "heavy"): 1.5}))
    assert slower is not None and slower.predicted.gpus == 1
    net = next(replica for *_, replica in slower.places() if replica.model == "net")
    assert net.predicted.latency_ms >= 1.5 * 1000.0 / net.sm_share_pct * 0.99
    assert "corrected by serving" in net.predicted.source


@pytest.mark.slow
def test_of_too_much_as_much_as_fits_is_planned_on_the_devices_that_are_there(first: DeploymentMap) -> None:
    wanted = plan_again(first, Load({"net": 110.0}, {}))
    assert wanted is not None
    assert wanted.predicted.gpus == 1
    assert 60.0 <= wanted.models["net"].rate_rps < 100.0
    grown = plan_again(first, Load({"net": 110.0}, {}), more_devices=True)
    assert grown is not None and grown.predicted.gpus == 2 and grown.models["net"].rate_rps == 110.0


def test_a_map_that_shrank_grows_again_onto_the_machines_that_it_had(first: DeploymentMap) -> None:
    (node,) = first.nodes
    two = first.model_copy(update={"nodes": tuple(node.model_copy(update={"name": name}) for name in ("one", "two"))})
    replan = MapReplanner(Path.cwd(), Path("gpuprof-db"), False, two)
    small = replan(two, Load({"net": 20.0}, {}))
    assert small is not None and small.predicted.gpus == 1
    large = replan(small, Load({"net": 110.0}, {}))
    assert large is not None and {machine.name for machine in large.nodes} == {"one", "two"}


def test_services_of_one_model_stay_services(first: DeploymentMap) -> None:
    Path("slo.csv").write_text("service,model,rate_rps,slo_ms\none,net,10,200\ntwo,net,5,300\n")
    assert main(["place", "-o", "services.json", "--max-batch", "1"]) == 0
    services = read_map(Path("services.json"))
    check_adaptable(services, Path("gpuprof-db"), None)
    wanted = MapReplanner(Path.cwd(), Path("gpuprof-db"), True, services)(
        services, Load({"one": 40.0, "two": 5.0}, {"two": 1.5}, {("one", "two"): 1.2})
    )
    assert wanted is not None and set(wanted.models) == {"one", "two"}
    assert {model.source_model for model in wanted.models.values()} == {"net"}
    assert (wanted.models["one"].rate_rps, wanted.models["two"].slo_ms) == (40.0, 300.0)
    sources = {replica.model: replica.predicted.source for *_, replica in wanted.places()}
    assert "corrected by serving" in sources["two"]
