from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.igniter.igniter import PlacedWorkload, predict
from gpuprof.estimators.igniter.igniter_estimator import IgniterEstimator
from gpuprof.estimators.igniter.profile import coefficients_path, write_coefficients
from gpuprof.kernel_db.store import KernelDb
from tests.placement.published.test_igniter import HARDWARE, MODELS

V100 = device("v100")


@pytest.fixture
def estimator() -> IgniterEstimator:
    return IgniterEstimator(None, coefficients={"v100": (HARDWARE, MODELS)})


def test_it_says_what_the_equations_say_beside_neighbours(estimator: IgniterEstimator) -> None:
    beside = [Workload("vgg19", 6, Share(37.5))]
    estimate = estimator.estimate("resnet50", V100, 8, Share(30.0), beside)
    expected = predict(
        HARDWARE, PlacedWorkload(MODELS["resnet50"], 8, 0.3), [PlacedWorkload(MODELS["vgg19"], 6, 0.375)]
    )
    assert estimate.latency_ms.value == pytest.approx(expected.latency_ms)
    assert estimate.throughput_rps.value == pytest.approx(expected.throughput_rps)
    assert estimate.latency_ms.value > estimator.estimate("resnet50", V100, 8, Share(30.0)).latency_ms.value


def test_shares_are_the_multiples_of_the_unit_and_batches_end_at_the_largest_profiled(
    estimator: IgniterEstimator,
) -> None:
    shares = estimator.shares("vgg19", V100)
    assert (shares[0], shares[-1], len(shares)) == (Share(2.5), Share(), 40)
    assert estimator.batches("vgg19", V100, Share())[-1] == 32


@pytest.mark.parametrize(
    ("model", "share", "processes", "message"),
    [
        ("bert", Share(), 1, "unknown model with iGniter's coefficients of v100"),
        ("vgg19", Share(100.0, "1g.10gb"), 1, "one process on a share of the whole device"),
        ("vgg19", Share(), 2, "one process"),
    ],
)
def test_what_it_knows_nothing_of_is_said(
    estimator: IgniterEstimator, model: str, share: Share, processes: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        estimator.estimate(model, V100, 1, share, processes=processes)


def test_a_device_without_coefficients_is_one_clear_line(tmp_path: Path) -> None:
    db = KernelDb.create(tmp_path / "db")
    with pytest.raises(InputError, match="no model was measured on v100 with all of iGniter's metrics"):
        make_estimator("igniter", db).shares("vgg19", V100)


def test_calibrated_coefficients_are_read_from_beside_the_database(tmp_path: Path) -> None:
    db = KernelDb.create(tmp_path / "db")
    write_coefficients(coefficients_path(db.path, "v100"), "v100", HARDWARE, MODELS)
    estimate = make_estimator("igniter", db).estimate("vgg19", V100, 4, Share(50.0))
    assert estimate.latency_ms.source == "iGniter"
    assert estimate.latency_ms.value == pytest.approx(
        predict(HARDWARE, PlacedWorkload(MODELS["vgg19"], 4, 0.5), []).latency_ms
    )
