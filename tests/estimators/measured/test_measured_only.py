"""What was measured: alone, beside others, between and beyond points, and at sizes of free dimensions."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuprof
from gpuprof.domain.catalogue import device
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import (
    ASSUMED,
    EXTRAPOLATED,
    INTERPOLATED,
    MEASURED,
    MOST_VARIATION,
    Estimate,
    Figure,
    Workload,
)
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.conformal import quantile
from gpuprof.estimators.database import DatabaseEstimator
from gpuprof.estimators.measured.measured import BatchCurve, LatencyEnvelope, Point, Surface
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import ColocationRow, ModelRow, workload_label
from gpuprof.kernel_db.store import KernelDb
from gpuprof.placement.contract import sliced_device
from tests.estimators.rows import CPU, GPU, database, measured_row, two_layers
from tests.small_models import write_text_model


@pytest.fixture
def db(tmp_path: Path) -> KernelDb:
    rows = [measured_row("net", batch, 2.0 + batch, device=GPU.name, memory=1000 * batch) for batch in (1, 4)]
    rows = [replace(row, max_occupancy_pct=40.0, wavg_sm_util_pct=30.0) for row in rows]
    rows.append(measured_row("net", 4, 9.0, device=GPU.name, share=20.0))
    rows.append(ModelRow("r1", "net", GPU.name, 8, 100.0, None, 1, error="out of memory"))
    return database(tmp_path / "db", rows)


def test_what_was_measured_is_said_and_nothing_between(db: KernelDb) -> None:
    estimator = make_estimator("measured", db)
    estimate = estimator.estimate("net", GPU, 4, Share())
    assert (estimate.latency_ms.value, estimate.latency_ms.source) == (6.0, MEASURED)
    assert estimate.memory_bytes is not None and estimate.memory_bytes.value == 4000.0
    for batch, share in ((2, Share()), (4, Share(50.0))):
        with pytest.raises(InputError, match="was not measured on gpu-test"):
            estimator.estimate("net", GPU, batch, share)
    assert estimator.shares("net", GPU) == (Share(20.0), Share())
    assert estimator.batches("net", GPU, Share(20.0)) == (4,)


def test_one_pause_among_microseconds_makes_no_time_vary_beyond_what_a_map_may_say(tmp_path: Path) -> None:
    row = replace(measured_row("net", 1, 0.01, device=GPU.name), latency_std_ms=0.5)
    paused = replace(row, batch=2, latency_paused_mean_ms=0.02, latency_paused_std_ms=0.9)
    estimator = make_estimator("measured", database(tmp_path / "db", [row, paused]))
    assert estimator.estimate("net", GPU, 1, Share()).latency_cv == MOST_VARIATION
    assert estimator.estimate("net", GPU, 2, Share()).pause_cv == MOST_VARIATION


def test_it_says_nothing_of_neighbours(db: KernelDb) -> None:
    with pytest.raises(InputError, match="alone and not beside net"):
        make_estimator("measured", db).estimate("net", GPU, 4, Share(20.0), [Workload("net", 1, Share(20.0))])


def test_by_ushers_premise_a_share_of_what_is_required_costs_nothing(db: KernelDb) -> None:
    estimator = make_estimator("usher", db)
    fits = estimator.estimate("net", GPU, 4, Share(30.0), [Workload("net", 1, Share(40.0))])
    assert (fits.latency_ms.value, fits.latency_ms.source) == (6.0, ASSUMED)
    assert estimator.estimate("net", GPU, 4, Share(20.0)).latency_ms.value == 9.0  # measured, so it is known
    with pytest.raises(InputError, match="not known to require 29%"):
        estimator.estimate("net", GPU, 4, Share(29.0))


def test_a_part_of_a_batch_is_as_quick_as_those_around_it_and_requires_the_larger_one(tmp_path: Path) -> None:
    rows = [measured_row("net", batch, 2.0 + batch, device=GPU.name, memory=1000) for batch in (2, 4)]
    rows = [replace(row, max_occupancy_pct=20.0 * row.batch, wavg_sm_util_pct=None) for row in rows]
    estimator = make_estimator("usher", database(tmp_path / "db", rows))
    times = {batch: estimator.estimate("net", GPU, batch, Share(80.0)).latency_ms for batch in (1, 2, 3, 4)}
    assert {batch: figure.value for batch, figure in times.items()} == {1: 4.0, 2: 4.0, 3: 5.0, 4: 6.0}
    assert {figure.source for figure in times.values()} == {ASSUMED}
    for batch, share in ((3, Share(60.0)), (5, Share(80.0))):
        with pytest.raises(InputError, match="not known to require"):
            estimator.estimate("net", GPU, batch, share)
    assert estimator.batches("net", GPU, Share()) == (2, 4)


def test_under_a_share_that_was_measured_a_batch_that_is_not_full_needs_no_known_requirement(db: KernelDb) -> None:
    row = measured_row("other", 2, 5.0, device=GPU.name, share=20.0)
    estimator = make_estimator(
        "usher", database(db.path.parent / "more", [row, replace(row, batch=4, latency_mean_ms=9.0)])
    )
    times = {batch: estimator.estimate("other", GPU, batch, Share(20.0)).latency_ms for batch in (1, 2, 3, 4)}
    assert {batch: figure.value for batch, figure in times.items()} == {1: 5.0, 2: 5.0, 3: 7.0, 4: 9.0}
    assert [times[batch].source for batch in (2, 3)] == [MEASURED, INTERPOLATED]
    for batch, share in ((5, Share(20.0)), (3, Share(30.0))):
        with pytest.raises(InputError, match="not known to require"):
            estimator.estimate("other", GPU, batch, share)


class Boundless:
    """Knows everything."""

    def __init__(self, db: KernelDb | None) -> None:
        self._database = make_estimator("database", db)

    def __getattr__(self, name: str) -> object:
        return getattr(self._database, name)

    def estimate(self, model: str, device: Device, batch: int, share: Share, *_: object, **__: object) -> Estimate:
        return Estimate(Workload(model, batch, share), device.name, Figure(float(batch), MEASURED))


@pytest.mark.parametrize("name", ["database", "measured", "usher", f"{__name__}:Boundless"])
def test_no_estimator_answers_for_what_failed(db: KernelDb, name: str) -> None:
    estimator = make_estimator(name, db)
    assert estimator.estimate("net", GPU, 4, Share())
    for batch, share in ((8, Share()), (16, Share(30.0))):
        with pytest.raises(InputError):
            estimator.estimate("net", GPU, batch, share)


def test_without_a_database_it_says_so() -> None:
    with pytest.raises(InputError, match="there is no database"):
        make_estimator("measured", None)


@pytest.mark.parametrize("name", ["database", "measured", "usher"])
def test_where_everything_failed_one_line_says_so(tmp_path: Path, name: str) -> None:
    row = ModelRow("r1", "net", GPU.name, 8, 100.0, None, 1, error="out of memory")
    estimator = make_estimator(name, database(tmp_path / "db", [row]))
    with pytest.raises(InputError, match=r"every measurement of net on gpu-test failed, the last: .* out of memory"):
        estimator.estimate("net", GPU, 1, Share())


V100 = device("v100")
HALF = Share(50.0)
MEMORY, OUTPUTS = "out of memory", "wrong outputs under its share"


def make_group(error: str | None = MEMORY, run_id: str = "r1") -> ColocationRow:
    """Return what ``profile a --batch 4 --share 50 --beside b@2:50`` writes."""
    row = ColocationRow(run_id, V100.name, 0, 0, "a", 4, "b:2:50%", sm_share_pct=50.0, error=error)
    return replace(row, latency_mean_ms=9.0, solo_latency_mean_ms=8.0) if error is None else row


def make_rows() -> list[ModelRow]:
    return [
        measured_row(model, batch, (2.0 + batch) * 100.0 / share, device=V100.name, share=share, memory=2**30)
        for model in "ab"
        for batch in (1, 2, 4, 8)
        for share in (25.0, 50.0, 100.0)
    ]


def write(folder: Path, *groups: ColocationRow) -> KernelDb:
    return database(folder, make_rows(), colocations=groups)


@pytest.mark.parametrize("name", ["database", "usher"])
@pytest.mark.parametrize(
    ("asked", "beside", "reason", "is_refused"),
    [
        (Workload("a", 4, HALF), [Workload("b", 2, HALF)], MEMORY, True),
        (Workload("b", 2, HALF), [Workload("a", 4, HALF)], MEMORY, True),
        (Workload("a", 8, HALF), [Workload("b", 8, Share(25.0))], MEMORY, True),
        (Workload("a", 4, HALF), [Workload("a", 1, Share(25.0)), Workload("b", 2, Share(25.0))], MEMORY, True),
        (Workload("a", 2, HALF), [Workload("b", 2, HALF)], MEMORY, False),
        (Workload("a", 4, HALF), [Workload("b", 1, HALF)], MEMORY, False),
        (Workload("a", 4, HALF), [Workload("a", 4, HALF)], MEMORY, False),
        (Workload("a", 4, HALF), [], MEMORY, False),
        (Workload("a", 4, Share()), [Workload("b", 2, HALF)], MEMORY, True),
        (Workload("a", 4, Share()), [Workload("b", 2, HALF)], OUTPUTS, False),
        (Workload("a", 4, Share(25.0)), [Workload("b", 2, HALF)], OUTPUTS, True),
    ],
)
def test_whatever_holds_what_failed_together_is_refused(
    tmp_path: Path, name: str, asked: Workload, beside: list[Workload], reason: str, is_refused: bool
) -> None:
    estimator = make_estimator(name, write(tmp_path / "db", make_group(reason)))
    try:
        estimator.estimate(asked.model, V100, asked.batch, asked.share, beside)
        message = ""
    except InputError as error:
        message = str(error)
    assert ("failed on v100" in message) == is_refused, message


def test_what_ran_together_afterwards_does_not_count_as_failed(tmp_path: Path) -> None:
    db = write(tmp_path / "db", make_group())
    database(tmp_path / "db", colocations=[make_group(None, "r2")], run_id="r2")
    estimate = DatabaseEstimator(db).estimate("a", V100, 4, HALF, [Workload("b", 2, HALF)])
    assert estimate.latency_ms.value == pytest.approx(12.0 * 9.0 / 8.0)


@pytest.mark.parametrize("policy", ["optimal", "ffd", "igniter", "gpulet", "gslice"])
def test_no_policy_puts_beside_one_another_what_failed_together(tmp_path: Path, policy: str) -> None:
    demands = [Demand("a", 150.0, Slo(100.0)), Demand("twin", 150.0, Slo(100.0), source_model="b")]
    small = replace(make_group(), batch=1, beside="b:1:50%")
    apart = gpuprof.place(demands, fleet="v100", db=write(tmp_path / "failed", small).path, policy=policy)
    together = gpuprof.place(demands, fleet="v100", db=write(tmp_path / "ran").path, policy=policy)
    assert together.deployment.predicted.gpus == 1
    assert apart.deployment.predicted.gpus == 2
    assert not apart.deployment.unplaced
    assert gpuprof.check(apart.deployment, db=tmp_path / "failed").is_sound


def test_the_check_refuses_a_map_whose_neighbours_failed_together(tmp_path: Path) -> None:
    demands = [Demand("a", 150.0, Slo(100.0)), Demand("twin", 150.0, Slo(100.0), source_model="b")]
    deployment = gpuprof.place(demands, fleet="v100", db=write(tmp_path / "ran").path).deployment
    assert gpuprof.check(deployment, db=tmp_path / "ran").is_sound
    small = replace(make_group(), batch=1, beside="b:1:50%")
    violations = gpuprof.check(deployment, db=write(tmp_path / "failed", small).path).violations
    assert [violation.message for violation in violations if violation.rule == "failed"] == [
        "a at batch 1 under 50% beside twin at batch 1 under 50% failed on v100: out of memory"
    ]


def test_what_failed_under_another_name_counts_for_the_same_file(tmp_path: Path) -> None:
    file = two_layers(tmp_path / "renamed.onnx")
    failed = replace(_failed_row(), model_sha256=load_graph(file, 1).sha256)
    rows = [replace(row, model_sha256=failed.model_sha256) for row in make_rows() if row.model == "a"]
    whole = [replace(row, max_occupancy_pct=10.0) for row in rows if row.sm_share_pct == 100.0]
    db = database(tmp_path / "db", [*whole, failed])
    estimator = make_estimator("usher", db, {"renamed": file})
    assert estimator.estimate("renamed", V100, 2, HALF).latency_ms.value > 0.0
    with pytest.raises(InputError, match=r"renamed at batch 8 .* is ruled out: a at batch 4 under 50%"):
        estimator.estimate("renamed", V100, 8, HALF)


def _failed_row() -> ModelRow:
    return replace(measured_row("a", 4, 1.0, device=V100.name, share=50.0), latency_mean_ms=None, error=MEMORY)


def test_a_point_is_itself_and_outside_is_nothing() -> None:
    curve = BatchCurve({2: 5.0, 8: 11.0})
    assert curve.at(2) == (5.0, MEASURED)
    assert curve.at(5) == (8.0, INTERPOLATED)
    assert curve.at(1) is None and curve.at(9) is None


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 100.0), min_size=2, max_size=6), st.integers(1, 64))
def test_between_neighbours_lies_between_them(values: dict[int, float], batch: int) -> None:
    interpolated = BatchCurve(values).at(batch)
    if interpolated:
        assert min(values.values()) - 1e-9 <= interpolated[0] <= max(values.values()) + 1e-9


@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0))
def test_a_fixed_part_and_a_part_for_each_item_are_followed_exactly(fixed: float, each: float) -> None:
    curve = BatchCurve({n: fixed + each * n for n in (1, 2, 8, 32)})
    assert curve.left_out_errors() == pytest.approx([0.0, 0.0], abs=1e-9)
    assert curve.beyond(64) == pytest.approx(fixed + each * 64)


def test_the_conformal_quantile_needs_enough_values_for_its_level() -> None:
    assert quantile([], 0.9) is None
    assert quantile([1.0, 2.0, 3.0], 0.9) == 3.0
    assert quantile(range(1, 20), 0.9) == 18


def point(batch: int, latency_ms: float, share: float = 100.0, processes: int = 1) -> Point:
    return Point(batch, Share(share), processes, latency_ms, 0.0, 0.0, 1.0, 0.0, {})


def bounds(envelope: LatencyEnvelope, batch: int, share: Share, processes: int) -> tuple[float, float]:
    least, most = envelope.bounds([batch], share, processes)
    return float(least[0]), float(most[0])


def test_a_larger_batch_takes_no_less_and_no_more_than_in_proportion() -> None:
    envelope = LatencyEnvelope([point(4, 10.0), point(8, 12.0)], GPU)
    assert bounds(envelope, 32, Share(), 1) == pytest.approx((12.0, 48.0))
    assert bounds(envelope, 2, Share(), 1) == pytest.approx((5.0, 10.0))


def test_a_smaller_share_takes_no_less_and_no_more_than_in_proportion() -> None:
    envelope = LatencyEnvelope([point(4, 10.0, share=50.0), point(4, 9.0)], GPU)
    assert bounds(envelope, 4, Share(25.0), 1) == pytest.approx((10.0, 20.0))
    assert bounds(envelope, 4, Share(75.0), 1) == pytest.approx((9.0, 10.0))


def test_more_processes_take_no_less_and_no_more_than_in_proportion() -> None:
    envelope = LatencyEnvelope([point(4, 10.0), point(4, 15.0, processes=2)], GPU)
    assert bounds(envelope, 4, Share(), 4) == pytest.approx((15.0, 30.0))
    assert envelope.intervals([4], Share(), 4)[0] == pytest.approx((15.0 / 1.14, 30.0 * 1.14))


@given(
    fixed_ms=st.floats(0.1, 50.0),
    each_ms=st.floats(0.01, 5.0),
    batch=st.integers(1, 256),
    share=st.floats(5.0, 100.0),
    processes=st.integers(1, 5),
)
def test_a_model_of_a_fixed_part_and_one_in_proportion_is_always_inside(
    fixed_ms: float, each_ms: float, batch: int, share: float, processes: int
) -> None:
    def true_ms(batch: int, share: float, processes: int) -> float:
        return fixed_ms + each_ms * batch * processes * 100.0 / share

    measured = [(2, 40.0, 1), (16, 40.0, 1), (16, 80.0, 2)]
    envelope = LatencyEnvelope([point(b, true_ms(b, s, n), s, n) for b, s, n in measured], GPU)
    low, high = envelope.intervals([batch], Share(share), processes)[0]
    assert low <= true_ms(batch, share, processes) <= high


def test_batches_of_one_query_have_the_times_of_queries_of_their_own(db: KernelDb) -> None:
    """Measured, interpolated and extrapolated times; batch 8 failed with the whole GPU."""
    for share in (Share(), Share(50.0), Share(20.0), Share(5.0)):
        for processes in (1, 2):
            single = DatabaseEstimator(db)
            each = [single.estimate("net", GPU, batch, share, (), processes).latency_ms for batch in (1, 3, 4, 7)]
            assert list(DatabaseEstimator(db).batch_times("net", GPU, (1, 3, 4, 7), share, processes)) == each
            with pytest.raises(InputError, match=r"batch 9 .*is ruled out: net at batch 8 under 100% failed"):
                DatabaseEstimator(db).batch_times("net", GPU, (1, 9), share, processes)


_DEVICE = sliced_device(price=1.0)
_SHARES = (Share(), Share(50.0), Share(25.0), *(Share(100.0, profile.name) for profile in _DEVICE.mig_profiles))


def test_times_between_shares_are_read_at_the_sms_that_clients_got() -> None:
    """Of 108 SMs MPS grants 10% ten and 20% twenty, in pairs; a row's own count comes first."""
    points = [
        Point(1, Share(10.0), 1, 8.0, 0.0, 0.0, 1.0, 0.0, {"client_sms": 10.0}),
        Point(1, Share(50.0), 1, 2.0, 0.0, 0.0, 1.0, 0.0, {"client_sms": 40.0}),
    ]
    surface = Surface(points, _DEVICE)
    assert surface.read_latencies([1], Share(20.0), lambda: None)[0][0] == pytest.approx(4.0)  # 20 SMs: twice 10
    assert surface.read_latencies([1], Share(18.6), lambda: None)[0][0] == pytest.approx(4.0)  # 20 SMs as well


WHOLE = Share()


def at(seq: int, batch: int, latency_ms: float, **more: object) -> ModelRow:
    return replace(measured_row("text", batch, latency_ms, **more), dims=f"seq={seq}")  # type: ignore[arg-type]


@pytest.fixture
def rows(tmp_path: Path) -> list[ModelRow]:
    path = write_text_model(tmp_path / "text.onnx")
    file = {"path": str(path), "sha256": load_graph(path).sha256}
    return [
        at(seq, batch, 1.0 + 0.01 * seq * batch, memory=1000 * seq, std_ms=0.1, repeats=25, **file)
        for seq in (64, 256)
        for batch in (1, 4)
    ]


@pytest.fixture
def estimator(tmp_path: Path, rows: list[ModelRow]) -> DatabaseEstimator:
    return DatabaseEstimator(database(tmp_path / "db", rows))


def test_a_run_that_was_only_timed_widens_the_interval_and_keeps_the_figures_of_the_other(tmp_path: Path) -> None:
    recorded = replace(measured_row("net", 1, 2.0, device=GPU.name), max_occupancy_pct=40.0)
    timed = measured_row("net", 1, 2.8, device=GPU.name, run_id="r2")
    database(tmp_path / "db", [recorded])
    estimator = DatabaseEstimator(database(tmp_path / "db", [timed], run_id="r2"))
    estimate = estimator.estimate("net", GPU, 1, WHOLE)
    occupancy = estimate.creq("max_occupancy")
    assert estimate.latency_ms.value == 2.8 and estimate.latency_ms.low is not None and estimate.latency_ms.low < 2.0
    assert occupancy is not None and occupancy.value == 40.0


def test_each_size_has_what_was_measured_of_it(estimator: DatabaseEstimator) -> None:
    assert estimator.models == ("text[seq=256]", "text[seq=64]")
    estimate = estimator.estimate("text[seq=64]", CPU, 4, WHOLE)
    assert (estimate.latency_ms.value, estimate.latency_ms.source) == (3.56, MEASURED)
    assert estimate.memory_bytes is not None and estimate.memory_bytes.value == 64_000


def test_between_measured_sizes_stands_the_line_as_over_the_batch(estimator: DatabaseEstimator) -> None:
    estimate = estimator.estimate("text[seq=160]", CPU, 4, WHOLE)
    assert estimate.latency_ms.value == pytest.approx(7.4)
    assert estimate.latency_ms.source == INTERPOLATED
    assert estimate.latency_ms.low is not None and estimate.latency_ms.low < 7.4 < estimate.latency_ms.upper()
    assert estimate.memory_bytes is not None and estimate.memory_bytes.value == pytest.approx(160_000)
    both = estimator.estimate("text[seq=160]", CPU, 2, WHOLE).latency_ms
    assert both.value == pytest.approx(1.0 + 0.01 * 160 * 2)
    assert both.source == INTERPOLATED
    assert estimator.batches("text[seq=160]", CPU, WHOLE) == (1, 4)


def test_beyond_measured_sizes_the_op_costs_extend_the_nearest_widely(estimator: DatabaseEstimator) -> None:
    estimate = estimator.estimate("text[seq=1024]", CPU, 1, WHOLE)
    nearest = estimator.estimate("text[seq=256]", CPU, 1, WHOLE)
    assert estimate.latency_ms.source == EXTRAPOLATED
    assert estimate.latency_ms.value > 3.0 * nearest.latency_ms.value
    assert estimate.latency_ms.low is not None and estimate.latency_ms.upper() / estimate.latency_ms.low > 2.0
    assert estimate.memory_bytes is not None and estimate.memory_bytes.value > 256_000


def test_without_the_file_nothing_is_said_beyond_measured_sizes(tmp_path: Path, rows: list[ModelRow]) -> None:
    lost = DatabaseEstimator(database(tmp_path / "lost", [replace(row, model_path="gone.onnx") for row in rows]))
    assert lost.estimate("text[seq=128]", CPU, 1, WHOLE).latency_ms.source == INTERPOLATED
    with pytest.raises(InputError, match=r"measured on cpu-test-4c at seq=256 and seq=64, .*--dim seq=1024"):
        lost.estimate("text[seq=1024]", CPU, 1, WHOLE)
    with pytest.raises(InputError, match=r"measured at seq=64 and at seq=256: say which"):
        lost.estimate("text[width=3]", CPU, 1, WHOLE)


def test_where_several_sizes_were_measured_none_is_guessed(estimator: DatabaseEstimator) -> None:
    with pytest.raises(InputError, match=r"text was measured at seq=64 and at seq=256: say which .*--dim seq=SIZE"):
        estimator.estimate("text", CPU, 1, WHOLE)


def test_where_one_size_was_measured_it_is_taken_and_said(tmp_path: Path, rows: list[ModelRow]) -> None:
    estimator = DatabaseEstimator(database(tmp_path / "one", [row for row in rows if row.dims == "seq=64"]))
    assert estimator.estimate("text", CPU, 1, WHOLE).latency_ms.value == pytest.approx(1.64)
    assert estimator.known.describe_sizes("text") == "text: seq=64 as it was measured; another size: --dim seq=SIZE"
    assert estimator.known.describe_sizes("text[seq=64]") is None
    assert estimator.known.find_model("text").sizes == (("seq", 64),)


def test_rows_of_older_databases_are_of_the_usual_size(tmp_path: Path, rows: list[ModelRow]) -> None:
    old = [replace(row, dims=None) for row in rows if row.dims == "seq=64"]
    estimator = DatabaseEstimator(database(tmp_path / "old", old))
    assert estimator.estimate("text", CPU, 1, WHOLE).latency_ms.value == pytest.approx(1.64)
    assert estimator.estimate("text[seq=128]", CPU, 1, WHOLE).latency_ms.source == MEASURED
    assert estimator.estimate("text[seq=64]", CPU, 1, WHOLE).latency_ms.source == EXTRAPOLATED


def test_a_file_is_known_by_its_content_at_its_sizes(tmp_path: Path, rows: list[ModelRow]) -> None:
    copy = tmp_path / "copy.onnx"
    copy.write_bytes((tmp_path / "text.onnx").read_bytes())
    estimator = DatabaseEstimator(database(tmp_path / "db", rows), {"mine": copy})
    assert estimator.estimate("mine[seq=64]", CPU, 1, WHOLE).latency_ms.source == MEASURED
    assert estimator.estimate("mine[seq=128]", CPU, 1, WHOLE).latency_ms.source == INTERPOLATED
    assert estimator.known.list_dims("mine") == ("seq",)
    with pytest.raises(InputError, match="no free dimension 'width'"):
        estimator.estimate("mine[width=64]", CPU, 1, WHOLE)


def test_what_failed_at_a_size_is_ruled_out_at_larger_ones(tmp_path: Path, rows: list[ModelRow]) -> None:
    failed = replace(rows[-1], latency_mean_ms=None, error="out of memory", dims="seq=512", memory_peak_bytes=None)
    estimator = DatabaseEstimator(database(tmp_path / "db", [*rows, failed]))
    with pytest.raises(InputError, match="out of memory"):
        estimator.estimate("text[seq=1024]", CPU, 4, WHOLE)
    assert estimator.estimate("text[seq=256]", CPU, 4, WHOLE).latency_ms.source == MEASURED
    assert (
        estimator.known.find_model("text[seq=1024]").tried_runs("text[seq=1024]").failed[0].workload.model
        == "text[seq=1024]"
    )


def test_what_ran_beside_a_size_is_found_by_it(tmp_path: Path, rows: list[ModelRow]) -> None:
    label = workload_label("text[seq=64]", 1, 50.0, None, 1)
    row = ColocationRow(
        "r1", CPU.name, 0, 0, "text", 1, label, 50.0, latency_mean_ms=3.0, solo_latency_mean_ms=2.0, dims="seq=64"
    )
    half = [replace(whole, sm_share_pct=50.0) for whole in rows]
    estimator = DatabaseEstimator(database(tmp_path / "db", half, colocations=[row]))
    neighbour = Workload("text[seq=64]", 1, Share(50.0))
    beside = estimator.estimate("text[seq=64]", CPU, 1, Share(50.0), [neighbour]).latency_ms
    assert beside.value == pytest.approx(1.5 * 1.64)
