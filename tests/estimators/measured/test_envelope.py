from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.share import Share
from gpuprof.estimators.measured.envelope import LatencyEnvelope
from gpuprof.estimators.measured.measured import Point
from tests.estimators.rows import GPU


def point(batch: int, latency_ms: float, share: float = 100.0, processes: int = 1) -> Point:
    return Point(batch, Share(share), processes, latency_ms, 0.0, 0.0, 1.0, 0.0, {})


def test_a_larger_batch_takes_no_less_and_no_more_than_in_proportion() -> None:
    envelope = LatencyEnvelope([point(4, 10.0), point(8, 12.0)], GPU)
    assert envelope.bounds(32, Share(), 1) == pytest.approx((12.0, 48.0))
    assert envelope.bounds(2, Share(), 1) == pytest.approx((5.0, 10.0))


def test_a_smaller_share_takes_no_less_and_no_more_than_in_proportion() -> None:
    envelope = LatencyEnvelope([point(4, 10.0, share=50.0), point(4, 9.0)], GPU)
    assert envelope.bounds(4, Share(25.0), 1) == pytest.approx((10.0, 20.0))
    assert envelope.bounds(4, Share(75.0), 1) == pytest.approx((9.0, 10.0))


def test_more_processes_take_no_less_and_no_more_than_in_proportion() -> None:
    envelope = LatencyEnvelope([point(4, 10.0), point(4, 15.0, processes=2)], GPU)
    assert envelope.bounds(4, Share(), 4) == pytest.approx((15.0, 30.0))
    assert envelope.interval(4, Share(), 4) == pytest.approx((15.0 / 1.14, 30.0 * 1.14))


@given(
    fixed_ms=st.floats(0.1, 50.0),
    each_ms=st.floats(0.01, 5.0),
    batch=st.integers(1, 256),
    share=st.floats(5.0, 100.0),
    processes=st.integers(1, 5),
)
def test_a_model_of_a_fixed_part_and_one_in_proportion_is_always_inside(
    fixed_ms: float, each_ms: float, batch: int, share: float, processes: int
) -> None:
    def true_ms(batch: int, share: float, processes: int) -> float:
        return fixed_ms + each_ms * batch * processes * 100.0 / share

    measured = [(2, 40.0, 1), (16, 40.0, 1), (16, 80.0, 2)]
    envelope = LatencyEnvelope([point(b, true_ms(b, s, n), s, n) for b, s, n in measured], GPU)
    low, high = envelope.interval(batch, Share(share), processes)
    assert low <= true_ms(batch, share, processes) <= high
