from __future__ import annotations

import pytest

from gpuprof.domain.demand import Slo
from gpuprof.domain.sojourn import BatchServer
from gpuprof.placement.sustained_loads import SustainedLoads


def server(time_ms: float, overhead_ms: float = 0.0) -> BatchServer:
    return BatchServer((time_ms / 2.0, time_ms), 2, 0.0, overhead_ms=overhead_ms)


def test_between_two_that_are_alike_the_load_is_interpolated_whatever_their_unit_of_time() -> None:
    loads = SustainedLoads()
    loads.add(server(10.0), Slo(30.0), 0.4)
    loads.add(server(1.0, overhead_ms=2.0), Slo(7.0), 0.8)
    assert loads.load(server(100.0), Slo(400.0)) == pytest.approx(0.6)


def test_nothing_is_guessed_from_one_side_or_from_those_that_differ() -> None:
    loads = SustainedLoads()
    assert loads.load(server(10.0), Slo(30.0)) == 0.0
    loads.add(server(10.0), Slo(30.0), 0.4)
    loads.add(server(10.0), Slo(50.0), 0.8)
    assert loads.load(server(10.0), Slo(60.0)) == 0.0
    assert loads.load(BatchServer((9.0, 10.0), 2, 0.0), Slo(40.0)) == 0.0
    assert loads.load(server(10.0), Slo(40.0, 95.0)) == 0.0
