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
    found = measure_overhead(local_cpu().name)
    assert 0.0 < found.fixed_ms < 1000.0
    assert found.ms_per_mib >= 0.0
    assert 0.0 < found.handover_ms <= found.fixed_ms
    assert 0.0 < found.host_ms < 1000.0
    assert found.host_ms_per_mib >= 0.0
    assert 0.0 < found.host_ms_busy <= found.host_ms


def test_the_echo_of_the_null_model_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {4: overhead.OverheadSample(0.5, 0.1, 0.3), 1_000_000: overhead.OverheadSample(2.5, 0.6, 1.3)}
    busy = overhead.OverheadSample(0.4, 0.1, 0.2)
    monkeypatch.setattr(overhead, "_measure_size", lambda device, size, rate_rps=0.0: busy if rate_rps else seen[size])
    found = measure_overhead("cpu")
    assert found.of(1_000_000) == pytest.approx(1.5, rel=1e-4)
    assert (found.handover_ms, found.host_ms, found.host_ms_busy) == (0.1, 0.3, 0.2)
    assert found.host_ms_per_mib == pytest.approx(0.5 * 2**20 / 1e6, rel=1e-4)
