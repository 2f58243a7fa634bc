import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import gpuprof
from gpuprof.domain.arrival_process import BatchPoissonArrivals, RecordedArrivals
from gpuprof.domain.deployment import DeploymentMap, PlannedWith, read_map
from gpuprof.domain.host_work import HostWork
from gpuprof.domain.map_sources import describe_basis
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer, ShapedQueue, queue_of
from gpuprof.errors import InputError
from gpuprof.estimators.builtin import IntervalEndEstimator
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.pipeline.arguments import locate_files
from gpuprof.pipeline.place import add_interval_ends, describe_routers
from gpuprof.pipeline.problem import make_queueing, plan_map
from gpuprof.pipeline.result import Progress
from gpuprof.pipeline.serve import MapReplanner, check_adaptable
from gpuprof.placement.contract import LinearEstimator, demand, evidence, plain_device, problem, solve_and_check
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.limit import Limit, interruptible, is_interrupted
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import Placement
from gpuprof.placement.planned_workloads import find_alike
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.serving.change.adapt import Load
from tests.command_line import CommandLine
from tests.small_models import write_text_model

#: A batch of 8 takes 10 ms, which serves 800 requests/s; 5 ms at the lower, 15 ms at the upper end.
UNSURE = LinearEstimator(interval=0.5, source="roofline")


def make_problem(time_limit_s: float | None = None) -> Problem:
    options = Options(latency_budget=1.0, time_limit_s=time_limit_s)
    return problem([demand("m", 1500.0, 100.0)], estimator=UNSURE, options=options)


@pytest.mark.slow
def test_a_plan_on_estimates_says_what_it_comes_to_at_both_of_their_ends() -> None:
    planned = plan_map(make_problem(), Optimal())
    predicted = add_interval_ends(make_problem(), Optimal(), planned, Limit()).predicted
    assert predicted.gpus == 3  # 533 requests/s each at the upper end
    assert predicted.at_lower_ends is not None and predicted.at_upper_ends is not None
    assert (predicted.at_lower_ends.gpus, predicted.at_lower_ends.lower_bound_gpus) == (1, 1)
    assert (predicted.at_upper_ends.gpus, predicted.at_upper_ends.lower_bound_gpus) == (3, 3)
    assert predicted.at_upper_ends.served_rps == pytest.approx(1500.0)
    on_means = replace(make_problem(), options=Options(latency_budget=1.0, confidence=0.0))
    assert plan_map(on_means, Optimal()).predicted.gpus == 2


@pytest.mark.parametrize("source", ["measured", "interpolated"])
def test_nothing_is_planned_again_where_everything_was_observed(source: str) -> None:
    class CountingOptimal(Optimal):
        def place(self, problem: Problem) -> Placement:
            raise AssertionError("planned again")

    sure = replace(make_problem(), estimator=LinearEstimator(interval=0.5, source=source))
    planned = plan_map(sure, Optimal())
    assert add_interval_ends(sure, CountingOptimal(), planned, Limit()) == planned


def test_with_the_time_used_up_a_plan_on_upper_ends_still_says_what_it_is_there() -> None:
    planned = plan_map(make_problem(), Optimal())
    predicted = add_interval_ends(make_problem(), Optimal(), planned, Limit(0.0)).predicted
    assert predicted.at_lower_ends is None
    assert predicted.at_upper_ends is not None
    assert (predicted.at_upper_ends.gpus, predicted.at_upper_ends.lower_bound_gpus) == (3, 3)
    assert predicted.at_upper_ends.served_rps == pytest.approx(1500.0)
    assert "at the lower ends of the estimates not computed, at the upper ends 3 devices" in describe_basis(
        add_interval_ends(make_problem(), Optimal(), planned, Limit(0.0))
    )


def test_with_the_time_used_up_a_plan_on_means_knows_no_end() -> None:
    on_means = replace(make_problem(), options=Options(latency_budget=1.0, confidence=0.0))
    planned = plan_map(on_means, Optimal())
    predicted = add_interval_ends(on_means, Optimal(), planned, Limit(0.0)).predicted
    assert (predicted.at_lower_ends, predicted.at_upper_ends) == (None, None)


def test_an_end_of_the_intervals_is_a_figure_without_an_interval() -> None:
    for end, time in (("lower", 5.0), ("upper", 15.0)):
        estimate = IntervalEndEstimator(UNSURE, end).estimate("m", plain_device(), 8, Share())  # type: ignore[arg-type]
        assert estimate.latency_ms.value == pytest.approx(time)
        assert (estimate.latency_ms.low, estimate.latency_ms.high) == (None, None)


def make_map(rate_rps: float) -> DeploymentMap:
    given = problem([demand("a", rate_rps)], [(plain_device(), None)])
    return to_map(given, FirstFitDecreasing().place(given))


@pytest.mark.parametrize(("rate_rps", "routers"), [(2400.0, None), (2401.0, "2 routers"), (27_500.0, "12 routers")])
def test_a_plan_says_how_many_routers_its_requests_need(rate_rps: float, routers: str | None) -> None:
    text = describe_routers(make_map(rate_rps))
    assert text is None if routers is None else text is not None and routers in text and "assumed" in text


def test_what_profile_measured_comes_before_the_assumption() -> None:
    measured = PlannedWith(host=HostWork(host_ms=0.5, host_ms_busy=0.25, host_cores=2))
    deployment = make_map(4001.0).model_copy(update={"planned_with": measured})
    text = describe_routers(deployment)
    assert text is not None and "2 routers: one carries about 4,000 (as profile measured)" in text


def test_place_and_check_say_so(tmp_path: Path) -> None:
    file = gpuprof.build_model("mlp", tmp_path / "mlp.onnx")
    plan = gpuprof.place([gpuprof.Demand(str(file), rate_rps=27_500.0, slo=gpuprof.Slo(20.0))], fleet="a100-40")
    for notes in (plan.notes, gpuprof.check(plan.deployment).notes):
        assert any("27,500 requests/s need 12 routers" in note for note in notes)


SERVER = BatchServer((4.0, 5.0, 6.0, 7.0), 4, 0.0)


def test_a_shape_by_name_is_planned_for() -> None:
    queueing = make_queueing("batch:8", ["a"])
    assert isinstance(queueing, ShapedQueue)
    assert queueing.shape == BatchPoissonArrivals(1.0, 8)
    calm = BatchQueue().pool(Arrivals(300.0), (SERVER, SERVER)).whole.percentile(99.0)
    assert queueing.pool(Arrivals(300.0), (SERVER, SERVER)).whole.percentile(99.0) > 1.2 * calm
    assert queueing.sojourn(Arrivals(150.0), SERVER) == queueing.pool(Arrivals(150.0), (SERVER,)).whole


def test_a_trace_is_planned_for_at_the_rate_that_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time_s\n" + "".join(f"{i}\n{i}.001\n{i}.002\n" for i in range(2000)))
    queueing = make_queueing(str(path), ["a"])
    assert isinstance(queueing, ShapedQueue)
    assert isinstance(queueing.shape, RecordedArrivals)
    # Three at once, then nothing: the second and the third wait for the first.
    times = queueing.pool(Arrivals(3.0), (SERVER,)).whole
    assert times.percentile(20.0) == pytest.approx(4.0, rel=0.05)
    assert times.percentile(99.0) > 7.0


def write_two_models(path: Path) -> Path:
    """Six requests of ``a`` at once every second, and one of ``b`` every sixth of it."""
    times = [(float(second), "a") for second in range(600) for _ in range(6)]
    times += [(second + part / 6.0, "b") for second in range(600) for part in range(6)]
    path.write_text("time_s,model\n" + "".join(f"{time:.6f},{model}\n" for time, model in sorted(times)))
    return path


def test_a_trace_says_of_each_model_how_its_requests_arrive(tmp_path: Path) -> None:
    trace = str(write_two_models(tmp_path / "two.csv"))
    queueing = make_queueing(trace, ["a", "b"])
    both = [queue_of(queueing, model).pool(Arrivals(60.0), (SERVER,)).whole.percentile(99.0) for model in "ab"]
    assert both[0] > 10.0  # the last of six waits for a batch of one and one of four
    assert both[1] == pytest.approx(4.0, rel=0.05)
    demands = [demand("a", 60.0, 9.0), demand("b", 60.0, 9.0)]
    given = replace(problem(demands, [(plain_device(), None)], LinearEstimator(3.0, 1.0)), queueing=queueing)
    assert find_alike(given) == {"a": "a", "b": "b"}
    placement, deployment = solve_and_check(make_policy("optimal"), given)
    counts = Counter(replica.model for *_, replica in deployment.places())
    assert not placement.unplaced
    assert counts["a"] > counts["b"] == 1
    even = deployment.models["b"].predicted
    assert even is not None
    assert even.p99_ms == pytest.approx(even.p50_ms or 0.0, rel=0.05)
    assert check(deployment, replace(evidence(given), queueing=BatchQueue())), "b's times are those of its own law"


def test_a_trace_that_is_not_there_or_lacks_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no trace"):
        make_queueing(str(tmp_path / "missing.csv"), ["a"])
    path = tmp_path / "two.csv"
    path.write_text("time_s,model\n0.1,a\n0.2,b\n")
    with pytest.raises(InputError, match="nothing is known of how requests of c arrive"):
        make_queueing(str(path), ["a", "c"])
    path.write_text("time_s,model\n")
    with pytest.raises(InputError, match="holds no requests"):
        make_queueing(str(path), ["a"])
    with pytest.raises(InputError, match="unknown arrival process"):
        make_queueing("gama:4", ["a"])


@pytest.fixture
def map_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A map in a folder beside that of its model, planned from the folder above both; then work goes on elsewhere."""
    for name in ("models", "maps", "elsewhere"):
        (here / name).mkdir()
    write_text_model(here / "models/text.onnx", 64)
    (here / "slo.csv").write_text("model,rate_rps,slo_ms,dims\nmodels/text.onnx,200,50,seq=32\n")
    gpuprof.place("slo.csv", fleet="v100:2").write("maps/map.json")
    monkeypatch.chdir(here / "elsewhere")
    return here / "maps/map.json"


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


def test_another_network_behind_the_name_is_refused_unless_that_is_allowed(map_file: Path, cli: CommandLine) -> None:
    write_text_model(map_file.parent.parent / "models/text.onnx", 512)
    result = gpuprof.check(map_file)
    assert [(violation.rule, violation.where) for violation in result.violations] == [("file", "text")]
    assert "not the file that the map was planned with: its sha256 is" in result.violations[0].message
    allowed = gpuprof.check(map_file, allow_changed=True)
    assert not any(violation.rule == "file" for violation in allowed.violations)
    assert any("not the file" in note for note in allowed.notes)
    assert "not the file" in cli("check", map_file, code=1).out
    traffic = gpuprof.LoadTraffic(duration_s=0.2, warmup_s=0.0)
    with pytest.raises(InputError, match=r"not the file that the map was planned with.*--allow-changed"):
        gpuprof.load("http://127.0.0.1:9", map_file, traffic=traffic)


@pytest.fixture
def demands(tmp_path: Path) -> list[gpuprof.Demand]:
    """Two unprofiled models that take several devices, which nothing proves to be the least."""
    files = [gpuprof.build_model("random_mlp", tmp_path / f"m{seed}.onnx", seed=seed) for seed in (1, 2)]
    rates_rps = (30_000.0, 40_000.0)
    return [
        gpuprof.Demand(str(file), rate_rps=rate, slo=gpuprof.Slo(3.0))
        for file, rate in zip(files, rates_rps, strict=True)
    ]


@pytest.fixture(autouse=True)
def default_interrupt() -> Iterator[None]:
    """Handle Ctrl-C as in a terminal; background jobs of a shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_search_without_time_still_meets_every_demand(tmp_path: Path) -> None:
    # The replicas of the first fit are together too slow here: it takes a second one at a higher rate.
    file = gpuprof.build_model("squeezenet", tmp_path / "squeezenet.onnx")
    demand = gpuprof.Demand(str(file), rate_rps=2000.0, slo=gpuprof.Slo(8.0))
    plan = gpuprof.place([demand], fleet="t4", options=gpuprof.PlanningOptions(time_limit_s=0.001))
    assert plan.is_complete and plan.deployment.predicted.gpus > 1


def test_ctrl_c_keeps_the_best_map(demands: list[gpuprof.Demand]) -> None:
    steps: list[str] = []

    def interrupt(progress: Progress) -> None:
        steps.append(progress.step)
        if "demands: " in progress.step and sum("demands: " in step for step in steps) == 1:
            signal.raise_signal(signal.SIGINT)

    plan = gpuprof.place(demands, fleet="t4", progress=interrupt)
    assert plan.is_complete
    assert any("planning 2 demands: " in step and "devices" in step for step in steps)
    if plan.deployment.planned_with.stopped_by is not None:
        assert plan.deployment.planned_with.stopped_by == "interrupt"
        assert any("the interrupt ended the search early" in note for note in plan.notes)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not is_interrupted()


def test_a_second_ctrl_c_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGINT)
        assert is_interrupted()
        assert Limit(600.0).is_over and not Limit().is_over  # what has no limit runs to its end
        signal.raise_signal(signal.SIGINT)
    assert not is_interrupted()
