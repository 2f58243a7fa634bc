from __future__ import annotations

import pytest

from gpuprof.local_device import local_cpu
from gpuprof.serving import overhead
from gpuprof.serving.overhead import RequestOverhead, measure_overhead


def test_the_overhead_grows_with_the_request_in_a_straight_line() -> None:
    assert RequestOverhead(0.3, 1.0).of(0) == 0.3
    assert RequestOverhead(0.3, 1.0).of(2 * 2**20) == pytest.approx(2.3)


def test_a_real_server_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_DURATION_S", 0.4)
    found = measure_overhead(local_cpu().name)
    assert 0.0 < found.fixed_ms < 1000.0
    assert found.ms_per_mib >= 0.0


def test_the_echo_of_the_null_model_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    medians = {4: 0.5, 1_000_000: 2.5}
    monkeypatch.setattr(overhead, "_median_ms", lambda device, size: medians[size])
    assert measure_overhead("cpu").of(1_000_000) == pytest.approx(1.5, rel=1e-4)
