"""Comparison of two databases: false alarms at the stated rate, planted changes found, and the ops they come from."""

import math
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuprof.errors import InputError
from gpuprof.kernel_db.comparison import (
    CellRun,
    ChangeVerdict,
    ComparedCell,
    RunSelection,
    compare_cells,
    compare_ops,
    pool_variances,
    predict_next_run,
    read_cells,
)
from gpuprof.kernel_db.schema import ModelRow, OpRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run

Side = dict[ComparedCell, list[CellRun]]


def draw(rng: random.Random, slowdown: float = 0.0, cells: int = 8, runs: int = 4) -> tuple[Side, Side]:
    """Return two sides whose cells have spreads of their own between runs, the first slower on the second side."""
    before: Side = {}
    after: Side = {}
    for cell in range(cells):
        key = ComparedCell(f"m{cell}", "v100", "100%", 1)
        spread, latency_ms = rng.choice((0.003, 0.006, 0.009)), rng.uniform(1.0, 50.0)
        factor = 1.0 + slowdown if cell == 0 else 1.0
        before[key] = [CellRun(latency_ms * math.exp(rng.gauss(0.0, spread))) for _ in range(runs)]
        after[key] = [CellRun(factor * latency_ms * math.exp(rng.gauss(0.0, spread))) for _ in range(runs)]
    return before, after


def test_at_most_one_percent_of_a_thousand_equal_pairs_is_reported_as_different() -> None:
    rng = random.Random(7)
    alarms = sum(any(c.verdict is not ChangeVerdict.NONE for c in compare_cells(*draw(rng))) for _ in range(1000))
    assert alarms <= 10


def test_a_planted_slowdown_of_five_percent_is_found_in_95_of_100_pairs() -> None:
    rng = random.Random(8)
    compared = [compare_cells(*draw(rng, slowdown=0.05))[0] for _ in range(300)]
    assert sum(change.verdict is ChangeVerdict.SLOWER for change in compared) >= 285
    assert all(change.smallest is not None and change.smallest > 0.0 for change in compared)


@pytest.mark.parametrize(("cells", "runs"), [(2, 3), (40, 2), (40, 3), (40, 8)])
def test_a_further_run_is_within_its_interval_nine_times_of_ten(cells: int, runs: int) -> None:
    rng = random.Random(10)
    inside = total = 0
    for _ in range(1600 // cells):
        drawn = [[50.0 * math.exp(rng.gauss(0.0, 0.2)) for _ in range(runs + 1)] for _ in range(cells)]
        variance = pool_variances([cell[:runs] for cell in drawn])
        for *measured, further in drawn:
            low, high = predict_next_run(measured, variance)
            inside, total = inside + (low <= further <= high), total + 1
    assert 0.87 <= inside / total <= 0.98


def test_the_smallest_change_reported_is_found_as_often_as_stated() -> None:
    rng = random.Random(9)
    (base,) = compare_cells(*draw(rng, cells=1, runs=6))
    assert base.smallest is not None
    detected = 0
    for _ in range(200):
        before = [CellRun(10.0 * math.exp(rng.gauss(0.0, 0.01))) for _ in range(6)]
        after = [CellRun(10.0 * math.exp(rng.gauss(0.0, 0.01))) for _ in range(6)]
        key = ComparedCell("m", "v100", "100%", 1)
        smallest = compare_cells({key: before}, {key: after})[0].smallest or 0.0
        slowed = [CellRun(run.latency_ms * (1.0 + smallest)) for run in after]
        detected += compare_cells({key: before}, {key: slowed})[0].verdict is ChangeVerdict.SLOWER
    assert detected >= 180


def test_a_cell_that_was_measured_once_a_side_is_not_judged() -> None:
    key = ComparedCell("m", "v100", "100%", 1)
    (change,) = compare_cells({key: [CellRun(10.0)]}, {key: [CellRun(20.0)]})
    assert change.verdict is ChangeVerdict.UNKNOWN
    assert change.change == pytest.approx(1.0)
    assert change.smallest is None and change.p_value is None


def test_noise_within_a_run_bounds_what_can_be_told_from_few_runs() -> None:
    key = ComparedCell("m", "v100", "100%", 1)
    before, after = [CellRun(10.0, 0.2), CellRun(10.0, 0.2)], [CellRun(11.0, 0.2), CellRun(11.0, 0.2)]
    assert compare_cells({key: before}, {key: after})[0].verdict is ChangeVerdict.NONE


@pytest.fixture
def database(tmp_path: Path) -> KernelDb:
    """Return a database with three runs of two nights, the second with a slower convolution."""
    written = KernelDb.create(tmp_path / "db")
    for night, ms in ((1, 4.0), (2, 4.4)):
        for repeat in range(3):
            run_id = f"r{night}{repeat}"
            run = RunRow(
                run_id, datetime(2026, 1, night, 3, repeat, tzinfo=UTC), "v100", "test", "m", driver=f"550.{night}"
            )
            latency_ms = ms * (1.0 + 0.001 * repeat)
            row = ModelRow(run_id, "m", "v100", 1, latency_p50_ms=latency_ms, stable=repeat > 0)
            times = {"conv": int(1e6 * (latency_ms - 1.0)), "relu": 1_000_000}
            ops = [
                OpRow(run_id, "m", "v100", 1, position, name, "Op", name, duration_p50_ns=ns)
                for position, (name, ns) in enumerate(times.items())
            ]
            written.append(Run(run, models=[row], ops=ops))
    return written


@pytest.mark.parametrize("selector", ["2026-01-02", "2026-01-02..2026-01-05", "driver=550.2", "run_id=r2"])
def test_runs_are_selected_by_day_or_by_column(database: KernelDb, selector: str) -> None:
    selection = RunSelection.parse(f"@{selector}", database.path)
    assert selection.find_runs(database) == {"r20", "r21", "r22"}


def test_a_selection_that_cannot_be_made_names_what_there_is(database: KernelDb, tmp_path: Path) -> None:
    (tmp_path / "db@home").mkdir()  # a path
    assert RunSelection.parse(str(tmp_path / "db@home"), tmp_path) == RunSelection(tmp_path / "db@home")
    with pytest.raises(InputError, match=r"selects no run: it holds runs of 2026-01-01 to 2026-01-02"):
        RunSelection.parse("@2026-02-01", database.path).find_runs(database)
    with pytest.raises(InputError, match="unknown column of runs 'drivers'"):
        RunSelection.parse("@drivers=1", database.path).find_runs(database)
    with pytest.raises(InputError, match="cannot read the date 'yesterday'"):
        RunSelection.parse("@yesterday", database.path).find_runs(database)


def test_the_difference_belongs_to_the_op_that_became_slower(database: KernelDb) -> None:
    nights = [RunSelection.parse(f"@2026-01-0{night}", database.path).find_runs(database) for night in (1, 2)]
    before, after = (read_cells(database, runs) for runs in nights)
    other = {ComparedCell("other", "v100", "100%", 1): [CellRun(1.0)]}  # of one side alone
    (change,) = compare_cells(before | other, after)
    assert change.verdict is ChangeVerdict.SLOWER
    assert change.change == pytest.approx(0.1)
    assert change.runs == (3, 3) and change.unstable == 2
    first, *_ = compare_ops((database, nights[0]), (database, nights[1]))
    assert first.name == "conv (Op)"
    assert first.after_ms - first.before_ms == pytest.approx(0.4, rel=0.01)
