"""Campaigns: cells measured once, skipped when known, and their keys."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.sizes import describe_sizes
from gpuprof.errors import InputError, UnavailableError
from gpuprof.kernel_db.schema import ColocationRow, ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb
from gpuprof.profiling.collector import Collected, record_variants
from gpuprof.profiling.sweep.campaign import DATA_SHA256, Campaign, Cell, CellKey, CellResult
from gpuprof.profiling.worker.job import Request
from tests.kernel_db.rows import assert_sound
from tests.profiling.models import write_mlp, write_strange
from tests.profiling.requests import CPU, QUICK, a_job
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time


class FakeCollector:
    name = "fake"
    kinds: tuple[str, ...] = ("cpu",)

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.stable = True
        self.release = "1"
        self.fails: Exception | None = None
        self.settings: dict[str, object] = {"provider": "CPU"}

    def available(self) -> str | None:
        return None

    def version(self) -> str:
        return self.release

    def runtime(self) -> tuple[str, str]:
        return "onnxruntime", "1"

    def collect(self, request: Request) -> Collected:
        self.asked.append(request)
        if self.fails:
            raise self.fails
        job, run_id = request.job, request.run_id
        if request.beside:
            everyone = (job, *request.beside)
            return Collected(
                colocations=tuple(
                    ColocationRow(run_id, CPU.name, 0, n, j.graph.name, j.graph.batch, "", latency_mean_ms=3.0)
                    for n, j in enumerate(everyone)
                )
            )
        row = ModelRow(run_id, job.graph.name, CPU.name, job.graph.batch, job.share.sm_pct, stable=self.stable)
        return Collected(models=(replace(row, latency_mean_ms=2.0),), notes=("odd",), settings=self.settings)


@pytest.fixture(autouse=True)
def _unchecked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded in the runtime beforehand, by a process, in one test only."""
    if "is_refused" not in request.node.name:
        monkeypatch.setattr(Campaign, "_check_models", lambda self, cells: None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_mlp(tmp_path / "mlp.onnx")


@pytest.fixture
def collector() -> FakeCollector:
    return FakeCollector()


def _run(tmp_path: Path, collector: FakeCollector, cells: list[Cell], force: bool = False) -> list[CellResult]:
    return list(Campaign(KernelDb.create(tmp_path / "db"), CPU, collector, force, QUICK).run(cells))


def test_each_cell_is_a_run_with_its_provenance(tmp_path: Path, collector: FakeCollector, model: Path) -> None:
    collector.settings = {"provider": "CPU", "nvidia_driver": "580.95.05", "clock_control": "none"}
    _run(tmp_path, collector, [Cell(a_job(model, 1)), Cell(a_job(model, 2, 50.0))])
    runs = KernelDb(tmp_path / "db").read_table("runs").to_pylist()
    assert [(run["batch"], run["sm_share_pct"]) for run in runs] == [(1, 100.0), (2, 50.0)]
    for run in runs:
        assert run["model_sha256"] and run["command"] and run["host"] and run["notes"] == "odd"
        assert (run["driver"], run["clocks_policy"]) == ("580.95.05", "none")
        assert (run["collector"], run["runtime_version"], run["provider"]) == ("fake", "1", "CPU")
    for row in KernelDb(tmp_path / "db").read_table("models").to_pylist():
        assert (row["runtime"], row["execution"], row["precision"]) == ("onnxruntime", "fused", "float32")
    assert_sound(KernelDb(tmp_path / "db"))


def test_what_was_measured_is_not_measured_again(tmp_path: Path, collector: FakeCollector, model: Path) -> None:
    first = _run(tmp_path, collector, [Cell(a_job(model, 1))])
    again = _run(tmp_path, collector, [Cell(a_job(model, 1)), Cell(a_job(model, 2))])
    assert [outcome.measured_now for outcome in first + again] == [True, False, True]
    assert again[0].row.latency_mean_ms == 2.0
    assert len(collector.asked) == 2
    _run(tmp_path, collector, [Cell(a_job(model, 1))], force=True)
    assert len(collector.asked) == 3


def test_another_version_share_or_file_is_measured(tmp_path: Path, collector: FakeCollector, model: Path) -> None:
    _run(tmp_path, collector, [Cell(a_job(model, 1))])
    _run(tmp_path, collector, [Cell(a_job(model, 1, 50.0))])
    collector.release = "2"
    _run(tmp_path, collector, [Cell(a_job(model, 1))])
    write_mlp(model, width=32)
    _run(tmp_path, collector, [Cell(a_job(model, 1))])
    assert len(collector.asked) == 4


def test_rows_with_other_options_of_sessions_are_measured(
    tmp_path: Path, collector: FakeCollector, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for choice, is_new in (("plain", True), ("auto", True), ("auto", False)):
        monkeypatch.setenv("GPUPROF_GPU_OPTIONS", choice)
        collector.settings = {"gpu_choice": choice}
        assert [outcome.measured_now for outcome in _run(tmp_path, collector, [Cell(a_job(model))])] == [is_new]


def test_an_unstable_run_is_kept_and_measured_again(tmp_path: Path, collector: FakeCollector, model: Path) -> None:
    collector.stable = False
    assert _run(tmp_path, collector, [Cell(a_job(model, 1))])[0].row.stable is False
    database = KernelDb.create(tmp_path / "db")
    (kept,) = Campaign(database, CPU, collector, limits=QUICK, keep_unstable=True).run([Cell(a_job(model, 1))])
    assert not kept.measured_now  # where time is short
    collector.stable = True
    assert _run(tmp_path, collector, [Cell(a_job(model, 1))])[0].measured_now
    assert database.read_table("models").num_rows == 2


def test_a_failure_is_remembered_and_the_rest_goes_on(tmp_path: Path, collector: FakeCollector, model: Path) -> None:
    collector.fails = UnavailableError("it died", "try less")
    outcomes = _run(tmp_path, collector, [Cell(a_job(model, 1)), Cell(a_job(model, 2))])
    assert [outcome.row.error for outcome in outcomes] == ["it died (try less)"] * 2
    assert outcomes[0].row.latency_mean_ms is None
    collector.fails = None
    assert all(outcome.measured_now for outcome in _run(tmp_path, collector, [Cell(a_job(model, 1))]))


def test_a_killed_campaign_goes_on_where_it_was(tmp_path: Path, collector: FakeCollector, model: Path) -> None:
    cells = [Cell(a_job(model, batch)) for batch in (1, 2, 3)]
    running = Campaign(KernelDb.create(tmp_path / "db"), CPU, collector, limits=QUICK).run(cells)
    next(running)
    next(running)
    running.close()
    assert [outcome.measured_now for outcome in _run(tmp_path, collector, cells)] == [False, False, True]


def test_company_is_kept_with_what_each_takes_alone(tmp_path: Path, collector: FakeCollector, model: Path) -> None:
    job, neighbour = a_job(model, 1, 50.0), a_job(model, 2, 50.0)
    outcome = _run(tmp_path, collector, [Cell(job), Cell(neighbour), Cell(job, (neighbour,))])[-1]
    assert [row.solo_latency_mean_ms for row in (outcome.row, *outcome.others) if isinstance(row, ColocationRow)] == [
        2.0,
        2.0,
    ]
    assert KernelDb(tmp_path / "db").read_table("runs").column("beside").to_pylist()[-1] == "mlp:2:50%"
    assert not _run(tmp_path, collector, [Cell(job, (neighbour,))])[0].measured_now


def test_a_model_that_is_refused_changes_nothing(tmp_path: Path, collector: FakeCollector, model: Path) -> None:
    odd = replace(a_job(model), path=write_strange(tmp_path / "odd.onnx"))
    with pytest.raises(InputError, match="Nonsense"):
        _run(tmp_path, collector, [Cell(a_job(model)), Cell(odd)])
    assert not (tmp_path / "db").exists()
    assert collector.asked == []


def test_neighbours_have_the_precision_of_their_model(tmp_path: Path, collector: FakeCollector, model: Path) -> None:
    job = a_job(model, 1, 50.0)
    request = Request("r", datetime.now(UTC), CPU, job, (job,))
    collected = collector.collect(request)
    rows = record_variants(replace(collected, settings={"provider": "CPU"}), (job, job), CPU).colocations
    assert [(row.runtime, row.precision) for row in rows] == [("onnxruntime", "float32")] * 2
    assert record_variants(collected, (job, job), CPU).colocations[0].runtime is None


def test_a_cell_gets_as_many_runs_as_wanted_each_after_all_others_and_minutes_apart(
    tmp_path: Path, collector: FakeCollector, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("gpuprof.profiling.sweep.campaign.time.sleep", pauses.append)
    database, cells = KernelDb.create(tmp_path / "db"), [Cell(a_job(model, batch)) for batch in (1, 2)]
    list(Campaign(database, CPU, collector, limits=QUICK).run(cells[:1]))
    again = Campaign(database, CPU, collector, limits=QUICK, repeats=3, every_s=60.0)
    results = [(result.cell.job.graph.batch, result.measured_now) for result in again.run(cells)]
    assert results == [(1, False), (2, True), (1, True), (2, True), (1, True), (2, True)]
    assert len(pauses) == 2 and all(50.0 < pause <= 60.0 for pause in pauses)
    assert database.read_table("models").num_rows == 6
    assert not any(result.measured_now for result in again.run(cells))
    assert next(iter(Campaign(database, CPU, collector).run(cells[:1]))).measured_now is False


def test_small_batches_have_two_runs_on_a_gpu(tmp_path: Path, collector: FakeCollector, model: Path) -> None:
    cells = [Cell(a_job(model, batch)) for batch in (1, 8, 16)]
    campaign = Campaign(KernelDb.create(tmp_path / "db"), device("v100"), collector, limits=QUICK)
    assert [result.cell.job.graph.batch for result in campaign.run(cells)] == [1, 8, 1, 8, 16]
    assert [request.records for request in collector.asked] == [False, False, True, True, True]


def _run_of(cell: Cell) -> RunRow:
    job = cell.job
    run = RunRow("r1", datetime(2026, 1, 1, tzinfo=UTC), CPU.name, "test", job.graph.name, job.graph.sha256)
    return replace(
        run, batch=job.graph.batch, sm_share_pct=job.share.sm_pct, processes=job.processes,
        dims=describe_sizes(job.graph.sizes), beside=cell.describe_neighbours() or None,
    )  # fmt: skip


def test_a_run_of_a_cell_has_its_key_and_another_beside_or_of_other_inputs_has_not(tmp_path: Path) -> None:
    job = a_job(write_mlp(tmp_path / "net.onnx"))
    alone, beside = Cell(job), Cell(job, (job,))
    run = _run_of(alone)
    assert CellKey.of_run(run, {}) == CellKey.of_cell(alone)
    assert CellKey.of_run(_run_of(beside), {}) == CellKey.of_cell(beside) != CellKey.of_cell(alone)
    assert CellKey.of_run(replace(run, settings=f'{{"{DATA_SHA256}": "other"}}'), {}) != CellKey.of_cell(alone)
    assert CellKey.of_run(replace(run, sm_share_pct=50.0), {}) != CellKey.of_cell(alone)


def test_a_run_without_sizes_was_at_those_that_are_assumed_for_its_file(tmp_path: Path) -> None:
    run = replace(_run_of(Cell(a_job(write_mlp(tmp_path / "net.onnx")))), dims=None)
    assert CellKey.of_run(run, {str(run.model_sha256): "seq=128"}).dims == "seq=128"
    assert CellKey.of_run(run, {"another": "seq=128"}).dims == ""
