"""iGniter's equations and fits: coefficients in, measurements made from them, coefficients out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprof.errors import InputError
from gpuprof.estimators.igniter.igniter import (
    Configuration,
    HardwareCoefficients,
    HardwareProfile,
    PlacedWorkload,
    WorkloadCoefficients,
    WorkloadProfile,
    clock_mhz,
    fit_hardware,
    fit_published_workload,
    fit_workload,
    predict,
)
from gpuprof.estimators.igniter.igniter_estimator import read_coefficients, read_igniter_profile, write_coefficients

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


def test_coefficients_survive_the_file(tmp_path: Path) -> None:
    write_coefficients(tmp_path / "c.json", "v100", V100, {"net": NET})
    assert read_coefficients(tmp_path / "c.json") == ("v100", V100, {"net": NET})


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
