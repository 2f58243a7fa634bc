"""Noise travels: rows marked unstable are named in estimates, maps and checks, and planned at their upper end."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

import gpuprof
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.estimate import Figure, is_unstable
from gpuprof.domain.map_sources import describe_certainty, is_observed
from gpuprof.kernel_db.schema import ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run
from tests.command_line import CommandLine

ROW = ModelRow(
    "r1",
    "calm",
    "v100",
    1,
    repeats=1000,
    latency_mean_ms=10.0,
    latency_std_ms=0.1,
    memory_peak_bytes=2**28,
    stable=True,
)


#: Plans with what was measured alone.
MEASURED = gpuprof.PlanningOptions(estimator="measured")


def write(path: Path, *rows: ModelRow) -> None:
    """Append each row as a run of its own."""
    for row in rows:
        run = RunRow(row.run_id, datetime(2026, 1, 1, tzinfo=UTC), "v100", "test", row.model)
        KernelDb.create(path).append(Run(run, models=[row]))


@pytest.fixture(autouse=True)
def here(here: Path) -> Path:
    noisy = replace(ROW, run_id="r2", model="noisy", stable=False, latency_std_ms=4.0)
    write(here / "gpuprof-db", ROW, noisy)
    return here


def latency(model: str, **options: object) -> Figure:
    return gpuprof.estimate([model], **options).estimates[0].latency_ms  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["database", "measured"])
def test_an_estimate_from_an_unstable_row_says_so_and_has_a_wide_interval(estimator: str) -> None:
    calm, noisy = latency("calm", estimator=estimator), latency("noisy", estimator=estimator)
    assert calm.source == "measured" and calm.is_observed
    assert noisy.source == "unstable, measured" and not noisy.is_observed
    assert noisy.high == pytest.approx(14.0) and calm.upper() < 10.1


def test_the_interval_of_a_measured_figure_covers_all_runs_of_the_cell(here: Path) -> None:
    write(here / "gpuprof-db", replace(ROW, run_id="r3", latency_mean_ms=14.0), replace(ROW, run_id="r4"))
    figure = latency("calm")
    assert figure.value == 10.0
    assert figure.high is not None and 14.0 < figure.high < 28.0  # and a further run as far off
    assert figure.low is not None and 5.0 < figure.low < 10.0


def test_the_interval_of_an_unstable_row_covers_the_median_that_disturbances_spare(here: Path) -> None:
    bursts = replace(ROW, model="bursts", stable=False, latency_std_ms=20.0, latency_p50_ms=2.0)
    write(here / "gpuprof-db", *(replace(bursts, run_id=f"r{number}") for number in (3, 4, 5)))
    figure = latency("bursts")
    assert figure.value == 10.0 and figure.low is not None
    assert figure.low == pytest.approx(2.0)


def test_a_figure_reaches_up_and_down_by_the_slowdown_that_the_database_saw(here: Path) -> None:
    # Half of the runs waited for a core as long as they had one.
    calm = replace(ROW, cpu_utilization_pct=99.0, cpu_wait_pct=0.0)
    busy = replace(calm, latency_mean_ms=20.0, stable=False, cpu_utilization_pct=50.0, cpu_wait_pct=50.0)
    rows = [replace(calm, run_id=f"r{n}", model=f"calm{n}") for n in range(10)]
    rows += [replace(busy, run_id=f"r{n}", model=f"busy{n}") for n in range(10, 20)]
    write(here / "busy", *rows, replace(calm, run_id="r30", model="half", sm_share_pct=50.0))
    quiet, disturbed = (latency(model, db=here / "busy") for model in ("calm1", "busy11"))
    for figure in (quiet, disturbed):  # with the spread between runs
        assert figure.low is not None and 8.0 < figure.low < 10.0
        assert figure.high is not None and 20.0 < figure.high < 25.0
    alone = latency("half", db=here / "busy", share="50")
    assert alone.upper() < 12.0  # nothing disturbed this share


def test_a_plan_takes_the_upper_end_of_unstable_times_and_counts_them(here: Path, cli: CommandLine) -> None:
    demands = [Demand(name, 5.0, Slo(200.0)) for name in ("calm", "noisy")]
    plan = gpuprof.place(demands, fleet="v100", policy="ffd", options=MEASURED).deployment
    times = {replica.model: replica.predicted for *_, replica in plan.places()}
    assert is_unstable(times["noisy"].source or "") and not is_unstable(times["calm"].source or "")
    assert not is_observed(plan)
    assert describe_certainty(plan) == (
        "1 of 2 replicas rests on unstable rows, planned at the upper ends of their intervals."
    )
    # An SLO between the mean and the upper end is kept by the stable model alone.
    tight = [Demand(name, 0.1, Slo(12.5)) for name in ("calm", "noisy")]
    left_out = {
        demand.model
        for demand in gpuprof.place(tight, fleet="v100", policy="ffd", options=MEASURED).deployment.unplaced
    }
    assert left_out == {"noisy"}
    (here / "slo.csv").write_text("model,rate_rps,slo_ms\ncalm,5,200\nnoisy,5,200\n")
    output = " ".join(cli("place --policy ffd --estimator measured").out.split())
    assert "1 of 2 replicas rests on unstable rows" in output and "proven minimum" not in output
    assert "1 of 2 replicas rest on unstable rows" in cli("check").err
