"""The laboratory: scenarios, cells, sweeps and figures."""

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.cli.main import main
from gpuprof.domain.catalogue import datasets
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.lab.cells import (
    LabCell,
    draw_arrivals,
    make_problem,
    parse_policy,
    run_cell,
    run_cells,
    simulate_service,
    split_over_replicas,
)
from gpuprof.lab.laboratory import (
    LabSettings,
    PrintedNumber,
    _read_tables,
    figure_titles,
    make_figure,
    parse_values,
    run,
    select_figures,
    write_page,
)
from gpuprof.lab.scenarios import Traffic, find_scenario, list_scenarios
from gpuprof.placement.deploy import to_map
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.published.ffd import FirstFitDecreasing
from tests.command_line import CommandLine
from tests.lab.published import write_igniter, write_parvagpu

MS = 1_000_000
REPRODUCTIONS = (Path(__file__).parents[2] / "bench" / "reproduce" / "README.md").read_text(encoding="utf-8")


@dataclass
class OwnPolicy:
    """A policy that gpuprof does not know by name."""

    def place(self, problem: Problem) -> Placement:
        return FirstFitDecreasing().place(problem)


@dataclass
class Broken:
    """A policy that fails."""

    def place(self, problem: Problem) -> Placement:
        raise ZeroDivisionError("no reason at all")


#: Folder of published data, which the thesis's scenarios do not need.
UNUSED = Path("unused")


def settings(folder: Path, data: Path | None = None) -> LabSettings:
    return LabSettings(work=folder / "lab", data=data, jobs=1, time_limit_s=1.0)


@pytest.mark.parametrize(
    ("times_ms", "batches", "expected_ms"),
    [
        ([0, 1, 2, 3, 4, 5, 6], [2, 3], [[0, 1, 5, 6], [2, 3, 4]]),
        ([0, 99, 100, 130], [4, 4], [[0, 99], [100, 130]]),  # the first request has waited long enough
    ],
)
def test_the_router_fills_a_batch_first(times_ms: list[int], batches: list[int], expected_ms: list[list[int]]) -> None:
    parts = split_over_replicas(np.array(times_ms) * MS, batches)
    assert [part.tolist() for part in parts] == [[time * MS for time in part] for part in expected_ms]


@given(st.lists(st.integers(0, 10**9), max_size=60), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_the_router_sends_each_request_to_one_replica(times: list[int], batches: list[int]) -> None:
    parts = split_over_replicas(np.array(sorted(times), np.int64), batches)
    assert sorted(time for part in parts for time in part.tolist()) == sorted(times)


def test_usher_needs_six_gpus_for_the_vision_models_and_serves_them(tmp_path: Path) -> None:
    """Thesis §6.2.1."""
    record = run_cell(LabCell(find_scenario("thesis", "vision", UNUSED).vary(gpus="v100"), "usher"), tmp_path, UNUSED)
    assert (record["gpus"], record["batches"].get("efficientnet_b7"), record["broken_rules"]) == (6, None, 0)
    assert record["replicas"]["efficientnet_b7"] == 2
    assert record["in_time_pct"] > 95.0


def test_shares_by_weighted_occupancy_are_too_small_to_serve_the_plan(tmp_path: Path) -> None:
    """Thesis §6.2.1, observation 2."""
    record = run_cell(LabCell(find_scenario("thesis", "vision", UNUSED), "usher+creq=wao"), tmp_path, UNUSED)
    assert record["goodput_rps"] < 0.5 * record["planned_rps"]


@pytest.mark.slow
def test_a_plan_on_ushers_premise_serves_less_than_it_says_and_one_without_it_keeps_its_word(tmp_path: Path) -> None:
    scenario = find_scenario("thesis", "example3", UNUSED)
    trusting = run_cell(LabCell(scenario, "gpulet@usher-premise"), tmp_path, UNUSED)
    honest = run_cell(LabCell(scenario, "gpulet"), tmp_path, UNUSED)
    assert trusting["goodput_rps"] < 0.9 * trusting["planned_rps"]
    assert honest["goodput_rps"] >= honest["planned_rps"]


def test_clients_that_reach_less_than_the_target_send_fewer_requests() -> None:
    demand = Demand("bert", 1000.0, Slo(50.0))
    whole, part = (len(draw_arrivals(demand, 0, Traffic(10.0, arrived=arrived))) for arrived in (1.0, 0.5))
    assert part == pytest.approx(whole / 2, rel=0.1)


def test_a_scenario_varies_in_rate_slo_and_devices() -> None:
    scenario = find_scenario("thesis", "vision", UNUSED).vary(rate=2.0, slo=0.5, gpus="3")
    assert {(demand.rate_rps, demand.slo.latency_ms) for demand in scenario.demands} == {(1000.0, 100.0)}
    assert scenario.gpus == "v100:3" and scenario.vary(gpus="t4,v100").gpus == "t4,v100"


def test_suites_have_copies_single_scenarios_and_folders(tmp_path: Path) -> None:
    data = write_parvagpu(tmp_path / "data")
    assert [scenario.name for scenario in list_scenarios("thesis", UNUSED)][:3] == ["example1", "example2", "example3"]
    (copied,) = list_scenarios("parvagpu/S1x3", data)
    assert len(copied.demands) == 6
    with pytest.raises(InputError, match="unknown suite"):
        list_scenarios("parvagpo", data)
    with pytest.raises(InputError, match="holds no"):
        list_scenarios(str(tmp_path / "data"), UNUSED)


def test_a_folder_of_ones_own_is_a_suite(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    assert main(["db", "import", str(datasets() / "v100_profiles.csv"), "--db", str(folder / "gpuprof-db")]) == 0
    (folder / "slo.csv").write_text("model,rate_rps,slo_ms\nbert,50,200\n")
    (folder / "two.toml").write_text('[[gpus]]\ndevice = "v100"\ncount = 2\n')
    result = run([str(folder)], ["ffd"], vary=["rate=1,2"], settings=settings(tmp_path))
    rows = result.to_frame()
    assert rows["scenario"].tolist() == ["slo-two", "slo-two"] and rows["rate"].tolist() == ["1", "2"]
    assert (rows["in_time_pct"] > 99.0).all()


def test_results_are_kept_and_a_later_run_goes_on_from_them(tmp_path: Path) -> None:
    scenario = find_scenario("thesis", "example1", UNUSED)
    first = run_cells([LabCell(scenario, "ffd")], tmp_path, UNUSED)
    kept = tmp_path / "results.jsonl"
    changed = json.loads(kept.read_text()) | {"gpus": 77}
    kept.write_text(json.dumps(changed) + "\n" + '{"key": "cut sh')
    steps: list[tuple[int, int]] = []
    records = run_cells(
        [LabCell(scenario, "ffd"), LabCell(scenario, "usher")],
        tmp_path,
        UNUSED,
        1,
        lambda _, done, total: steps.append((done, total)),
    )
    assert first[0]["gpus"] == 4 and records[0]["gpus"] == 77 and records[1]["policy"] == "usher"
    assert steps[0] == (1, 2) and steps[-1] == (2, 2)


def test_a_plugin_that_was_edited_runs_anew(here: Path) -> None:
    source = "from gpuprof.placement.published.ffd import FirstFitDecreasing as Edited\n"
    Path("edited_policy.py").write_text(source)
    cell = LabCell(find_scenario("thesis", "example1", UNUSED), "edited_policy:Edited")
    record = run_cell(cell, here, UNUSED)
    assert record["gpus"] == 4 and record["key"] == cell.key
    Path("edited_policy.py").write_text(source + "# changed\n")
    assert record["key"] != cell.key


@dataclass(frozen=True)
class ScaledEstimator:
    """Fixed times; ``factor`` says how long they are."""

    factor: float = 1.0

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        latency_ms = self.factor * (5.0 + batch) / device.fraction(share)
        return Estimate(Workload(model, batch, share, processes), device.name, Figure(latency_ms, "assumed"))

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return (1, 4)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        return (Share(50.0), Share())


def test_objects_run_beside_names_and_are_told_apart_by_their_fields(tmp_path: Path) -> None:
    estimators = [ScaledEstimator(), ScaledEstimator(4.0)]
    result = run(
        ["thesis/example1"],
        ["ffd", OwnPolicy()],
        estimators=estimators,
        vary=["gpus=v100"],
        settings=settings(tmp_path),
    )
    rows = result.to_frame()
    assert rows["policy"].tolist() == ["ffd"] * 2 + [f"{__name__}:OwnPolicy"] * 2
    assert rows["gpus"].tolist()[:2] == rows["gpus"].tolist()[2:]
    assert rows["gpus"][0] < rows["gpus"][1]


def make_estimator(database: object) -> ScaledEstimator:
    return ScaledEstimator()


def test_the_command_names_each_failed_cell_and_each_planned_time_and_ends_with_3(
    here: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUPROF_LAB_DATA", str(write_parvagpu(here / "data")))
    plugins = ["--policy", f"{__name__}:Broken,{__name__}:OwnPolicy", "--estimator", f"{__name__}:make_estimator"]
    text = cli("lab run parvagpu/S1 parvagpu/S1x2", *plugins, "--jobs 1", code=3).err
    for scenario, models in (("S1", "a, b"), ("S1x2", "a, a#1, b, b#1")):
        scenario = f"parvagpu/{scenario}"
        assert re.search(
            rf"Broken, {scenario}: .* failed in line \d+ of test_lab.py: ZeroDivisionError: no reason", text
        )
        assert f"OwnPolicy, {scenario}: {models} simulated by the planned times: not measured" in text
    assert "a policy or estimator failed in 2 of 4 cells" in text
    broken, served = cli.json("lab run parvagpu/S1", *plugins, code=3)
    assert broken["gpus"] is None and served["goodput_rps"] > 0.0


def test_policies_take_options_behind_a_plus() -> None:
    assert parse_policy("usher+creq=wao+without=S") == parse_policy("usher+without=S+creq=wao")
    with pytest.raises(InputError, match="option"):
        parse_policy("usher+unknown=1")
    with pytest.raises(InputError, match="usher-premise"):
        find_scenario("thesis", "load", UNUSED).setup("optimal@nothing")


@pytest.mark.parametrize("text", ["rate", "rate=", "rate=a..b", "speed=1..2", "rate=0,1", "gpus=1..x"])
def test_a_sweep_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="cannot read --vary"):
        parse_values(text)


@pytest.mark.parametrize(
    ("printed", "ours", "digits", "verdict"),
    [
        ((12.5, 12.5), 12.54, 1, "as printed"),
        ((12.5, 12.5), 12.56, 1, "differs"),
        ((1.5, 1.9), 1.94, 1, "as printed"),
        ((1.5, 1.9), 1.44, 1, "differs"),
        ((2.0, float("inf")), 31.0, 0, "as printed"),
        ((3.0, 3.0), None, 0, "differs"),
    ],
)
def test_numbers_agree_as_printed(printed: tuple[float, float], ours: float | None, digits: int, verdict: str) -> None:
    assert PrintedNumber("n", "§1", printed, ours, digits).row()["verdict"] == verdict


def test_every_figure_reads_fields_and_policies_that_exist(tmp_path: Path) -> None:
    data = write_igniter(write_parvagpu(tmp_path))
    # ParvaGPU's small data have one scenario only
    for name in figure_titles():
        table: Mapping[str, object] = _read_tables()[name]
        policies = table["policies"]
        assert isinstance(policies, dict)
        for policy in policies.values():
            parse_policy(policy)
        if not name.startswith("parvagpu"):
            figure = make_figure(name, data)
            assert {cell.policy for cell in figure.cells().values()} == set(policies.values())
            labels = {label for label, _ in figure.cells()}
            facts = table["facts"]
            assert isinstance(facts, list)
            assert all(fact["of"] in labels and fact.get("over", fact["of"]) in labels for fact in facts)


def test_figures_are_selected_by_name_and_by_beginning() -> None:
    assert select_figures(["thesis-6.15"]) == ["thesis-6.15-150ms", "thesis-6.15-250ms", "thesis-6.15-350ms"]
    assert "usher-18" in select_figures(["usher"])
    with pytest.raises(InputError, match="unknown figure"):
        select_figures(["parvagpu-99"])


def test_the_command_draws_and_compares_a_figure(here: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUPROF_LAB_DATA", str(write_igniter(here / "data")))
    line = ["lab", "figure", "igniter-table1", "--policy", f"{__name__}:OwnPolicy", "--jobs", "1", "--time-limit", "1s"]
    text = cli(*line, "-o page.html").out
    assert "iGniter Table 1" in text and "printed" in text and "* gslice" in text
    assert f"{__name__}:OwnPolicy" in (here / "page.html").read_text() and (here / "lab" / "results.jsonl").exists()
    assert cli.json(*line)[0]["figure"] == "igniter-table1"


def test_the_page_of_a_papers_suite_has_its_figures_by_the_policies_that_were_run(tmp_path: Path) -> None:
    settings = LabSettings(work=tmp_path, data=write_igniter(tmp_path / "data"), jobs=1)
    result = run(["igniter"], ["igniter"], settings=settings)
    assert {figure.name for figure in result.figures} == {"igniter-table1", "igniter-14", "igniter-18"}
    assert all(len(figure.rows) == 1 for figure in result.figures)  # of the paper's policies only igniter was run
    numbers = [number for figure in result.figures for number in figure.numbers]
    assert numbers and all(number.ours is not None for number in numbers)
    assert "printed numbers" in write_page(tmp_path / "page.html", result).read_text()
    assert not run(["igniter/Table1"], ["igniter"], settings=settings).figures


def test_the_command_sweeps_and_lists(here: Path, cli: CommandLine) -> None:
    line = ["lab", "run", "thesis/example1", "--policy", "ffd,usher", "--vary", "gpus=2..3", "--jobs", "1", "--json"]
    rows = json.loads(cli(*line).out)
    assert [(row["policy"], row["gpus_varied"]) for row in rows] == [
        ("ffd", "2"), ("usher", "2"), ("ffd", "3"), ("usher", "3"),
    ]  # fmt: skip
    assert "parvagpu-8" in cli("lab list").out


def test_a_map_of_gpuprofs_own_is_served_by_the_times_that_it_was_planned_with(tmp_path: Path) -> None:
    cell = LabCell(find_scenario("thesis", "load", UNUSED), "optimal", limit_s=1.0)
    problem, judge = make_problem(cell, tmp_path, UNUSED)
    deployment = to_map(problem, parse_policy("optimal").place(problem))
    services = simulate_service(deployment, problem.demands, "stretched", judge, Traffic(8.0))
    assert sum(service.goodput_rps for service in services.values()) > 0.95 * deployment.predicted.goodput_rps


def test_the_page_of_reproductions_names_every_figure_and_commands_that_exist() -> None:
    named = set(re.findall(r"`((?:parvagpu|igniter|usher|thesis)-[\w.]+)`", REPRODUCTIONS))
    assert named - {"thesis-6.15"} == {name for name in figure_titles() if not name.startswith("thesis-6.15")}
    listed = set(re.findall(r"python -m bench\.reproduce\.([a-z0-9_]+)", REPRODUCTIONS))
    assert listed and all(importlib.util.find_spec(f"bench.reproduce.{name}") for name in listed)
