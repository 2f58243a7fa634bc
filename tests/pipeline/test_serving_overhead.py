from __future__ import annotations

import pytest

from gpuprof.machine.cpu import local_cpu
from gpuprof.pipeline import serving_cost as overhead
from gpuprof.pipeline.serving_cost import RequestOverhead, measure_overhead
from tests.reruns import serves_in_real_time

pytestmark = serves_in_real_time


def test_the_overhead_grows_with_the_request_in_a_straight_line() -> None:
    assert RequestOverhead(0.3, 1.0).of(0) == 0.3
    assert RequestOverhead(0.3, 1.0).of(2 * 2**20) == pytest.approx(2.3)


@pytest.mark.slow
def test_a_real_server_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_DURATION_S", 0.4)
    monkeypatch.setattr(overhead, "_REPEATS", 1)
    measured = measure_overhead(local_cpu().name)
    assert 0.0 < measured.fixed_ms < 10_000.0  # seconds where other programs occupy the processors
    assert measured.ms_per_mib >= 0.0
    assert 0.0 < measured.handover_ms <= measured.fixed_ms
    assert 0.0 < measured.host_ms < 1000.0
    assert measured.host_ms_per_mib >= 0.0
    assert 0.0 < measured.host_ms_busy <= measured.host_ms
