"""What the placer answers to a running server."""

import json
from pathlib import Path

import numpy as np
import pytest

from gpuprof.cli.main import main
from gpuprof.domain.arrival_process import RecordedArrivals
from gpuprof.domain.deployment import DeploymentMap, read_map
from gpuprof.errors import InputError
from gpuprof.pipeline import problem as planning
from gpuprof.pipeline import simulate as verb
from gpuprof.pipeline.report import report
from gpuprof.pipeline.serve import MapReplanner, check_adaptable
from gpuprof.pipeline.simulate import follow_load, make_scheduler
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Problem
from gpuprof.serving.change.adapt import Load
from gpuprof.simulator.cluster import Failure, SimulationOptions
from tests.command_line import CommandLine
from tests.estimators.rows import database, measured_row
from tests.profiling.models import write_mlp
from tests.simulator.maps import make_map, replica


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
def first(here: Path) -> DeploymentMap:
    """A map for one V100, which bears 100 requests/s of the model in batches of 1, and is planned for 20."""
    write_rows(here, "net", (25.0, 50.0, 75.0, 100.0))
    (here / "slo.csv").write_text("model,rate_rps,slo_ms\nnet,20,200\n")
    write_mlp(here / "net.onnx")
    assert main(["place", "--max-batch", "1"]) == 0
    return read_map(here / "map.json")


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
def test_models_that_slow_each_other_more_than_predicted_run_apart(first: DeploymentMap, cli: CommandLine) -> None:
    write_rows(Path.cwd(), "heavy", (25.0, 50.0))
    Path("slo.csv").write_text("model,rate_rps,slo_ms\nnet,8,200\nheavy,8,200\n")
    write_mlp(Path("heavy.onnx"))
    # In a worker of both, batches would not run beside one another.
    cli("place -o both.json --max-batch 1 --gpus v100:2 --isolate")
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
def test_policies_are_compared_on_the_same_load(planned_folder: Path, cli: CommandLine) -> None:
    load = "--rate 600 --arrivals diurnal:4,60 --duration 60s --reschedule 10s --policy parvagpu,optimal"
    output = planned_folder / "both.json"
    documents = cli.json("simulate", planned_folder / "map.json", load, "--db", planned_folder / "db", "-o", output)
    assert documents == json.loads(output.read_text())
    rows = {name: document["rescheduling"] for name, document in documents.items()}
    assert list(rows) == ["parvagpu", "optimal"]
    assert documents["parvagpu"]["requests"] == documents["optimal"]["requests"]
    for name, row in rows.items():
        assert row["maps"] == len(documents[name]["epochs"]) > 1
        assert row["gpu_hours"] > 0
        assert row["goodput_rps"] == pytest.approx(documents[name]["goodput_rps"])
    sections = report([output], planned_folder / "report.html").sections
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
