from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import ASSUMED, INTERPOLATED, MEASURED, MOST_VARIATION, Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.kernel_db.schema import ModelRow
from gpuprof.kernel_db.store import KernelDb
from tests.estimators.rows import GPU, database, measured_row


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


def test_a_batch_that_is_not_full_is_as_quick_as_those_around_it_and_requires_what_the_larger_one_does(
    tmp_path: Path,
) -> None:
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


@pytest.mark.parametrize("name", ["measured", "usher"])
def test_where_everything_failed_one_line_says_so(tmp_path: Path, name: str) -> None:
    row = ModelRow("r1", "net", GPU.name, 8, 100.0, None, 1, error="out of memory")
    estimator = make_estimator(name, database(tmp_path / "db", [row]))
    with pytest.raises(InputError, match=r"every measurement of net on gpu-test failed, the last: .* out of memory"):
        estimator.estimate("net", GPU, 1, Share())
