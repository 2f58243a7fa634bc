"""iGniter's profile, read from the kernel database, and its estimator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.igniter.igniter import (
    HardwareCoefficients,
    HardwareProfile,
    PlacedWorkload,
    WorkloadCoefficients,
    added_launch_ms,
    fit_all,
    fit_hardware,
    predict,
)
from gpuprof.estimators.igniter.igniter_estimator import (
    IgniterEstimator,
    coefficients_path,
    profile_of,
    write_coefficients,
)
from gpuprof.kernel_db.schema import ColocationRow, DeviceRow, ModelRow
from gpuprof.kernel_db.store import KernelDb
from tests.estimators.rows import database, measured_row
from tests.placement.published.test_igniter import HARDWARE, MODELS

GPU = Device("v100-test", "gpu", 80, 1530.0, {"float32": 1e13}, 2**34, 1e12, 2**22, max_power_w=300.0)
TRUTH = HardwareCoefficients(300.0, 1530.0, 50.0, 1e7, -1.0, 0.005, -0.008)
NET = WorkloadCoefficients(6e5, 4e3, 50, 0.001, (0.0, 0.6, 0.1, 0.01, 1.5), 0.002, (0.0, 90.0), (0.0, 15.0))


def _model(batch: int, share: float) -> ModelRow:
    prediction = predict(TRUTH, PlacedWorkload(NET, batch, share / 100.0), ())
    return replace(
        measured_row("net", batch, prediction.latency_ms, device=GPU.name, share=share),
        power_w=140.0,
        idle_power_w=50.0,
        clock_mhz=1530.0,
        l2_pct=15.0,
        dispatch_ms=0.05,
        kernel_count=50,
        h2d_bytes=int(6e5 * batch),
        d2h_bytes=int(4e3 * batch),
    )


def _beside(copies: int) -> ColocationRow:
    placed = PlacedWorkload(NET, 16, 0.2)
    prediction = predict(TRUTH, placed, [placed] * (copies - 1))
    delay = (0.001 + added_launch_ms(TRUTH, copies)) * 50 * 1530.0 / prediction.clock_mhz
    label = " + ".join(["net:16:20%"] * (copies - 1))
    return ColocationRow(
        "r1", GPU.name, copies, 0, "net", 16, label, 20.0, latency_mean_ms=prediction.latency_ms, dispatch_ms=delay,
        power_w=min(50.0 + 90.0 * copies, 300.0), clock_mhz=prediction.clock_mhz,
    )  # fmt: skip


ROWS = [_model(batch, share) for batch in (1, 16, 32) for share in (20.0, 50.0, 100.0)]
COPIES = [_beside(count) for count in range(2, 6)]
LINK = DeviceRow("r1", GPU.name, "gpu", pcie_bytes_per_s=1e10)


def _write(path: Path, models: Sequence[ModelRow], beside: Sequence[ColocationRow]) -> KernelDb:
    return database(path, models, [LINK], beside)


def test_coefficients_are_recovered_from_the_rows_of_the_database(tmp_path: Path) -> None:
    hardware, workloads = fit_all(*profile_of(_write(tmp_path / "db", ROWS, COPIES), GPU))
    assert hardware.alpha_f == pytest.approx(-1.0)
    assert hardware.alpha_sch == pytest.approx(0.005)
    assert hardware.beta_sch == pytest.approx(-0.008)
    assert workloads["net"].load_bytes == pytest.approx(6e5)
    assert workloads["net"].active_ms(8, 0.3) == pytest.approx(NET.active_ms(8, 0.3), rel=0.02)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    db = database(tmp_path / "db", [measured_row("net", 1, 5.0, device=GPU.name)])
    with pytest.raises(InputError, match="power_w, clock_mhz, dispatch_ms, kernel_count, h2d_bytes, d2h_bytes missing"):
        profile_of(db, GPU)


def test_too_few_copies_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="need one to five copies"):
        profile_of(_write(tmp_path / "db", ROWS, COPIES[:1]), GPU)


def _profile(path: Path, *rows: DeviceRow, clock_mhz: float = 1530.0) -> HardwareProfile:
    models = [replace(row, clock_mhz=clock_mhz) for row in ROWS]
    beside = [replace(row, clock_mhz=clock_mhz * (1.0 - 0.002 * count)) for count, row in enumerate(COPIES, 2)]
    return profile_of(database(path, models, rows, beside), GPU)[0]


def test_the_link_as_models_used_it_wins_over_a_benchmark_of_it(tmp_path: Path) -> None:
    benchmark = DeviceRow("r9", GPU.name, "gpu", pcie_bytes_per_s=5e10, dram_bytes_per_s=1e12)
    timelines = [DeviceRow(f"r{i}", GPU.name, "gpu", pcie_bytes_per_s=rate) for i, rate in enumerate((1e10, 8e9, 9e9))]
    assert _profile(tmp_path / "a", benchmark, *timelines).pcie_bytes_per_ms == pytest.approx(9e6)
    assert _profile(tmp_path / "b", benchmark).pcie_bytes_per_ms == pytest.approx(5e7)


def test_a_gpu_that_stays_below_its_data_sheets_clock_is_not_taken_for_throttled(tmp_path: Path) -> None:
    profile = _profile(tmp_path / "db", LINK, clock_mhz=1410.0)
    assert profile.max_clock_mhz == 1410.0 and set(profile.clock_mhz) == {1410.0}
    assert fit_hardware(profile).alpha_f == 0.0


def test_rows_that_failed_or_lack_a_figure_are_left_out(tmp_path: Path) -> None:
    wrong = replace(ROWS[0], error="output y differs under the share", clock_mhz=9000.0)
    lacking = replace(_beside(5), dispatch_ms=None)
    profile, _ = profile_of(_write(tmp_path / "db", [*ROWS, wrong], [*COPIES, lacking]), GPU)
    assert profile.max_clock_mhz == 1530.0 and len(profile.clock_mhz) == 5


def test_a_number_of_copies_whose_gap_is_not_known_costs_the_others_nothing(tmp_path: Path) -> None:
    beside = [*COPIES[:2], replace(COPIES[2], dispatch_ms=None), COPIES[3]]
    hardware, workloads = fit_all(*profile_of(_write(tmp_path / "db", ROWS, beside), GPU))
    assert hardware.alpha_sch == pytest.approx(0.005)
    assert hardware.beta_sch == pytest.approx(-0.008)
    assert "net" in workloads


def test_too_few_gaps_are_refused_with_what_there_is(tmp_path: Path) -> None:
    beside = [COPIES[0], *(replace(row, dispatch_ms=None) for row in COPIES[1:])]
    with pytest.raises(InputError, match="there are 1, 2, 3, 4, 5 copies, with a gap between launches 1, 2 copies"):
        profile_of(_write(tmp_path / "db", ROWS, beside), GPU)


def test_use_of_l2_is_taken_from_the_most_alike_row_that_was_counted(tmp_path: Path) -> None:
    timed = [replace(row, l2_pct=None) for row in ROWS]
    counted = [replace(_model(1, 100.0), l2_pct=3.0), replace(_model(16, 20.0), l2_pct=18.0)]
    _, workloads = profile_of(_write(tmp_path / "db", [*timed, *counted], COPIES), GPU)
    assert workloads["net"].l2_beside_pct == 18.0


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
