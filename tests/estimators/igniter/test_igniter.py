"""iGniter's equations and fits: coefficients in, measurements made from them, coefficients out."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.published_pairs import fit_all, read_igniter_profile
from gpuprof.domain.catalogue import device
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.builtin import make_estimator
from gpuprof.estimators.igniter.igniter import (
    Configuration,
    HardwareCoefficients,
    HardwareProfile,
    IgniterEstimator,
    PlacedWorkload,
    WorkloadCoefficients,
    WorkloadProfile,
    added_launch_ms,
    clock_mhz,
    coefficients_path,
    fit_hardware,
    fit_published_workload,
    fit_workload,
    predict,
    profile_of,
    read_coefficients,
    write_coefficients,
)
from gpuprof.kernel_db.schema import ColocationRow, DeviceRow, ModelRow
from gpuprof.kernel_db.store import KernelDb
from tests.estimators.rows import database, measured_row
from tests.placement.published.test_igniter import HARDWARE, MODELS

#: Section 5.1: P, F, p_idle, B_pcie, α_f, α_sch, β_sch of a V100.
V100 = HardwareCoefficients(300.0, 1530.0, 53.5, 1e7, -1.025, 0.00475, -0.00902)
NET = WorkloadCoefficients(6e5, 4e3, 80, 0.001, (0.0, 0.6, 0.1, 0.01, 1.5), 0.002, (160.0, 5.0), (25.0, 1.0))
FULL = PlacedWorkload(NET, 8, 0.5)


def test_alone_there_is_no_interference() -> None:
    prediction = predict(V100, FULL, ())
    assert prediction.clock_mhz == 1530.0
    assert prediction.gpu_ms == pytest.approx(0.08 + (0.6 * 8 + 0.1) / 0.51 + 1.5)
    assert prediction.latency_ms == pytest.approx(prediction.gpu_ms + 8 * 604e3 / 1e7)
    assert prediction.throughput_rps == pytest.approx(8000.0 / (prediction.gpu_ms + 8 * 4e3 / 1e7))


def test_each_neighbour_adds_delay_to_each_kernel_and_cache_misses() -> None:
    idle = replace(NET, power=(0.0, 0.0), l2=(0.0, 10.0))
    victim, neighbour = PlacedWorkload(idle, 8, 0.5), PlacedWorkload(idle, 1, 0.1)
    alone = predict(V100, victim, ()).gpu_ms
    active = idle.active_ms(8, 0.5)
    for neighbours in (1, 2, 4):
        delay = (0.00475 * (neighbours + 1) - 0.00902) * 80
        expected = alone + delay + active * 0.002 * 10.0 * neighbours
        assert predict(V100, victim, [neighbour] * neighbours).gpu_ms == pytest.approx(expected)


def test_the_clock_falls_by_one_megahertz_for_each_watt_above_the_limit() -> None:
    assert clock_mhz(V100, 300.0) == 1530.0
    assert clock_mhz(V100, 400.0) == pytest.approx(1530.0 - 102.5)


def test_a_lower_clock_lengthens_the_execution_and_not_the_transfers() -> None:
    hungry = replace(NET, power=(0.0, 200.0), l2=(0.0, 0.0), kernels=0)
    together = predict(V100, PlacedWorkload(hungry, 8, 0.5), [PlacedWorkload(hungry, 8, 0.5)])
    alone = predict(V100, PlacedWorkload(hungry, 8, 0.5), ())
    assert together.gpu_ms == pytest.approx(alone.gpu_ms * 1530.0 / (1530.0 - 1.025 * 153.5))
    assert together.load_ms == alone.load_ms


def _hardware() -> HardwareProfile:
    """Return what a V100 with these coefficients shows with one to five copies that draw 70 W each."""
    demand = [53.5 + 70.0 * copies for copies in range(1, 6)]
    clock = [clock_mhz(V100, demand_rps) for demand_rps in demand]
    slowed = [0.0] + [0.00475 * copies - 0.00902 for copies in range(2, 6)]
    delay = [(0.0013 + more) * 1530.0 / at for more, at in zip(slowed, clock, strict=True)]
    return HardwareProfile(300.0, 1530.0, 53.5, 1e7, tuple(min(d, 300.0) for d in demand), tuple(clock), tuple(delay))


def test_the_fit_recovers_the_coefficients_of_the_hardware() -> None:
    fitted = fit_hardware(_hardware())
    assert fitted.alpha_f == pytest.approx(-1.025, rel=1e-6)
    assert fitted.alpha_sch == pytest.approx(0.00475, rel=1e-6)
    assert fitted.beta_sch == pytest.approx(-0.00902, rel=1e-6)


def test_a_gpu_that_never_throttled_has_no_fall_of_its_frequency_but_the_rest() -> None:
    fitted = fit_hardware(replace(_hardware(), clock_mhz=(1530.0,) * 5))
    assert fitted.alpha_f == 0.0 and fitted.alpha_sch > 0.0


def test_a_hardware_profile_that_throttles_from_the_second_copy_on_is_refused() -> None:
    with pytest.raises(InputError, match="two of them at full frequency"):
        fit_hardware(replace(_hardware(), clock_mhz=(1530.0, 1400.0, 1390.0, 1380.0, 1370.0)))


def _workload(truth: WorkloadCoefficients) -> WorkloadProfile:
    configurations = tuple(
        Configuration(
            batch,
            share,
            predict(V100, PlacedWorkload(truth, batch, share), ()).gpu_ms,
            53.5 + truth.power_w(batch, share),
            1530.0,
            truth.l2_pct(batch, share) if batch == 16 else None,
        )
        for batch in (1, 16, 32)
        for share in (0.1, 0.5, 1.0)
    )
    active = truth.active_ms(16, 0.5)
    return WorkloadProfile(
        6e5, 4e3, 80, 0.08, active, active * (1.0 + 0.002 * 17.0), 1530.0, 17.0, configurations
    )  # fmt: skip


def test_the_fit_predicts_configurations_that_it_has_not_seen() -> None:
    truth = replace(NET, power=(60.0, 5.0))
    fitted = fit_workload(_workload(truth), V100)
    for batch, share in ((4, 0.3), (24, 0.8), (8, 0.2)):
        assert fitted.active_ms(batch, share) == pytest.approx(truth.active_ms(batch, share), rel=0.02)
        assert fitted.power_w(batch, share) == pytest.approx(truth.power_w(batch, share), rel=0.05)
        assert fitted.l2_pct(batch, share) == pytest.approx(truth.l2_pct(batch, share), rel=0.05)
    assert fitted.cache == pytest.approx(0.002)


def test_five_coefficients_are_not_fitted_to_four_configurations() -> None:
    profile = _workload(NET)
    for fit in (fit_workload, fit_published_workload):
        with pytest.raises(InputError, match="five coefficients need as many configurations but got 4"):
            fit(replace(profile, configurations=profile.configurations[:4]), V100)


def test_coefficients_stay_physical_where_measurements_are_not() -> None:
    profile = _workload(NET)
    odd = [replace(point, gpu_ms=point.gpu_ms * (1.3 if point.batch == 1 else 0.9)) for point in profile.configurations]
    fitted = fit_workload(replace(profile, configurations=tuple(odd), active_beside_ms=0.5), V100)
    assert all(k >= 0.0 for k in fitted.active) and fitted.cache >= 0.0
    assert fitted.active_ms(8, 0.2) > fitted.active_ms(8, 0.4) > 0.0


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"schema": "gpuprof.igniter/9"}', '{"schema": "gpuprof.igniter/1"}']
)
def test_a_file_that_holds_no_coefficients_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(InputError):
        read_coefficients(tmp_path / "c.json")


def test_a_published_profile_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "config.jsonl"
    hardware = {"idlepower": 50, "power": [1, 2], "frequency": [3, 4], "idletime": [5, 6], "maxGPUfrequency": 1500,
                "maxGPUpower": 250, "unit": 5, "bandwidth": 100}  # fmt: skip
    matrix = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    net = {"inputdata": 10, "outputdata": 1, "kernel": 7, "idletime_1": 0.5, "activetime_1": 4, "activetime_2": 5,
           "frequency_2": 1400, "l2cache": 9, "gpulatency": matrix, "power": matrix, "frequency": matrix,
           "l2caches": [1, 2, 3]}  # fmt: skip
    lines = [json.dumps({"hardware": {key: value}}) for key, value in hardware.items()]
    lines += [json.dumps({"net": {key: value}}) for key, value in net.items()]
    path.write_text("\n".join(lines))
    read_hardware, models = read_igniter_profile(path)
    assert read_hardware.share_unit == 0.05 and read_hardware.power_w == (1, 2)
    assert models["net"].configurations[5] == Configuration(16, 1.0, 6.0, 6.0, 6.0, 3.0)


@pytest.mark.parametrize("content", ["nonsense", '{"hardware": {}}', '["hardware"]', '{"net": {"kernel": 3}}'])
def test_a_profile_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.jsonl").write_text(content)
    with pytest.raises(InputError):
        read_igniter_profile(tmp_path / "config.jsonl")


GPU = Device("v100-test", "gpu", 80, 1530.0, {"float32": 1e13}, 2**34, 1e12, 2**22, max_power_w=300.0)
TRUTH = HardwareCoefficients(300.0, 1530.0, 50.0, 1e7, -1.0, 0.005, -0.008)
PROFILED_NET = WorkloadCoefficients(6e5, 4e3, 50, 0.001, (0.0, 0.6, 0.1, 0.01, 1.5), 0.002, (0.0, 90.0), (0.0, 15.0))


def _model(batch: int, share: float) -> ModelRow:
    prediction = predict(TRUTH, PlacedWorkload(PROFILED_NET, batch, share / 100.0), ())
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
    placed = PlacedWorkload(PROFILED_NET, 16, 0.2)
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
    assert workloads["net"].active_ms(8, 0.3) == pytest.approx(PROFILED_NET.active_ms(8, 0.3), rel=0.02)


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


V100_DEVICE = device("v100")


@pytest.fixture
def estimator() -> IgniterEstimator:
    return IgniterEstimator(None, coefficients={"v100": (HARDWARE, MODELS)})


def test_it_says_what_the_equations_say_beside_neighbours(estimator: IgniterEstimator) -> None:
    beside = [Workload("vgg19", 6, Share(37.5))]
    estimate = estimator.estimate("resnet50", V100_DEVICE, 8, Share(30.0), beside)
    expected = predict(
        HARDWARE, PlacedWorkload(MODELS["resnet50"], 8, 0.3), [PlacedWorkload(MODELS["vgg19"], 6, 0.375)]
    )
    assert estimate.latency_ms.value == pytest.approx(expected.latency_ms)
    assert estimate.throughput_rps.value == pytest.approx(expected.throughput_rps)
    assert estimate.latency_ms.value > estimator.estimate("resnet50", V100_DEVICE, 8, Share(30.0)).latency_ms.value


def test_shares_are_multiples_of_the_unit_and_batches_end_at_the_largest_one(estimator: IgniterEstimator) -> None:
    shares = estimator.shares("vgg19", V100_DEVICE)
    assert (shares[0], shares[-1], len(shares)) == (Share(2.5), Share(), 40)
    assert estimator.batches("vgg19", V100_DEVICE, Share())[-1] == 32


@pytest.mark.parametrize(
    ("model", "share", "processes", "message"),
    [
        ("bert", Share(), 1, "unknown model with iGniter's coefficients of v100"),
        ("vgg19", Share(100.0, "1g.10gb"), 1, "one process on a share of the whole device"),
        ("vgg19", Share(), 2, "one process"),
    ],
)
def test_gaps_are_reported(estimator: IgniterEstimator, model: str, share: Share, processes: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        estimator.estimate(model, V100_DEVICE, 1, share, processes=processes)


def test_a_device_without_coefficients_is_one_clear_line(tmp_path: Path) -> None:
    db = KernelDb.create(tmp_path / "db")
    with pytest.raises(InputError, match="no model was measured on v100 with all of iGniter's metrics"):
        make_estimator("igniter", db).shares("vgg19", V100_DEVICE)


def test_calibrated_coefficients_are_read_from_beside_the_database(tmp_path: Path) -> None:
    db = KernelDb.create(tmp_path / "db")
    write_coefficients(coefficients_path(db.path, "v100"), "v100", HARDWARE, MODELS)
    estimate = make_estimator("igniter", db).estimate("vgg19", V100_DEVICE, 4, Share(50.0))
    assert estimate.latency_ms.source == "iGniter"
    assert estimate.latency_ms.value == pytest.approx(
        predict(HARDWARE, PlacedWorkload(MODELS["vgg19"], 4, 0.5), []).latency_ms
    )
