from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.interference_table import tabulate_interference
from gpuprof.domain.share import Share
from gpuprof.estimators.builtin import FailureAwareEstimator
from gpuprof.estimators.igniter.igniter import HardwareCoefficients, WorkloadCoefficients
from gpuprof.estimators.igniter.igniter_estimator import IgniterEstimator
from gpuprof.estimators.measured.known_models import KnownModels
from gpuprof.estimators.services import ServiceEstimator
from gpuprof.kernel_db.store import KernelDb

V100 = device("v100")
HARDWARE = HardwareCoefficients(300.0, 1530.0, 53.5, 1e7, -1.025, 0.00475, -0.00902)


def coefficients(draw: random.Random) -> WorkloadCoefficients:
    active = (1e-4, draw.uniform(0.1, 2.0), draw.uniform(0.0, 0.5), draw.uniform(0.0, 0.01), draw.uniform(0.3, 3.0))
    power, l2 = (draw.uniform(20.0, 600.0), 3.0), (draw.uniform(4.0, 90.0), -1.0)
    return WorkloadCoefficients(6e5, 4e3, draw.randint(20, 90), 0.0015, active, 0.0022, power, l2)


def estimator(draw: random.Random, hardware: HardwareCoefficients = HARDWARE) -> IgniterEstimator:
    return IgniterEstimator(None, coefficients={"v100": (hardware, {f"m{n}": coefficients(draw) for n in range(4)})})


@pytest.mark.parametrize("seed", range(10))
def test_a_table_says_what_the_estimator_says_and_never_more_for_less_pressure(seed: int) -> None:
    draw = random.Random(seed)
    known = estimator(draw)
    together = [
        Workload(f"m{draw.randrange(4)}", draw.randint(1, 16), Share(2.5 * draw.randint(1, 12)))
        for _ in range(draw.randint(1, 6))
    ]
    table = tabulate_interference(known, V100, together)
    assert table is not None
    totals = table.pressures.sum(axis=0)
    latencies, occupied = table.least_times_ms(len(together), totals)
    least, _ = table.least_times_ms(max(1, len(together) - 1), totals * 0.9)
    for index, one in enumerate(together):
        beside = (*together[:index], *together[index + 1 :])
        said = known.estimate(one.model, V100, one.batch, one.share, beside)
        assert latencies[index] == pytest.approx(said.latency_ms.value, rel=1e-12)
        assert occupied[index] == pytest.approx(said.latency_ms.value - said.overlapped_ms, rel=1e-12)
        assert least[index] <= latencies[index] * (1.0 + 1e-12)


def test_what_the_model_says_nothing_of_takes_for_ever() -> None:
    known = estimator(random.Random(1))
    asked = [Workload("m0", 1, Share(50.0), processes=2), Workload("m0", 1, Share(50.0))]
    table = known.tabulate_interference(V100, asked)
    assert table is not None
    latencies, _ = table.least_times_ms(1, np.zeros(2))
    assert latencies[0] == np.inf
    assert np.isfinite(latencies[1])


@pytest.mark.parametrize("changed", [{"alpha_f": 0.5}, {"alpha_sch": -0.001}])
def test_there_is_no_table_where_neighbours_may_quicken_one_another(changed: dict[str, float]) -> None:
    known = estimator(random.Random(1), replace(HARDWARE, **changed))
    assert known.tabulate_interference(V100, [Workload("m0", 1, Share(50.0))]) is None


def test_services_have_the_table_of_their_models() -> None:
    known = estimator(random.Random(1))
    services = ServiceEstimator(known, {"W1": "m0", "W2": "m0"})
    table = services.tabulate_interference(V100, [Workload(name, 4, Share(50.0)) for name in ("W1", "W2", "m1")])
    assert table is not None
    expected = known.tabulate_interference(V100, [Workload(name, 4, Share(50.0)) for name in ("m0", "m0", "m1")])
    assert expected is not None
    assert np.array_equal(table.pressures, expected.pressures)
    assert ServiceEstimator(known, {"W1": "m0"}).tabulate_interference(V100, []) is not None


def test_who_refuses_what_failed_has_the_table_of_the_estimator_that_it_asks(tmp_path: Path) -> None:
    known, asked = estimator(random.Random(1)), [Workload("m0", 4, Share(50.0))]
    table = FailureAwareEstimator(known, KnownModels(KernelDb(tmp_path))).tabulate_interference(V100, asked)
    expected = known.tabulate_interference(V100, asked)
    assert table is not None
    assert expected is not None
    assert np.array_equal(table.pressures, expected.pressures)
