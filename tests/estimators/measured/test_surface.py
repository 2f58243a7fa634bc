"""Figures between and beyond measured points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.estimate import INTERPOLATED, MEASURED
from gpuprof.domain.share import Share
from gpuprof.estimators.conformal import quantile
from gpuprof.estimators.measured.measured import Point
from gpuprof.estimators.measured.surface import BatchCurve, LatencyEnvelope, Surface
from gpuprof.placement.contract import sliced_device
from tests.estimators.rows import GPU


def test_a_point_is_itself_and_outside_is_nothing() -> None:
    curve = BatchCurve({2: 5.0, 8: 11.0})
    assert curve.at(2) == (5.0, MEASURED)
    assert curve.at(5) == (8.0, INTERPOLATED)
    assert curve.at(1) is None and curve.at(9) is None


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 100.0), min_size=2, max_size=6), st.integers(1, 64))
def test_between_neighbours_lies_between_them(values: dict[int, float], batch: int) -> None:
    interpolated = BatchCurve(values).at(batch)
    if interpolated:
        assert min(values.values()) - 1e-9 <= interpolated[0] <= max(values.values()) + 1e-9


@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0))
def test_a_fixed_part_and_a_part_for_each_item_are_followed_exactly(fixed: float, each: float) -> None:
    curve = BatchCurve({n: fixed + each * n for n in (1, 2, 8, 32)})
    assert curve.left_out_errors() == pytest.approx([0.0, 0.0], abs=1e-9)
    assert curve.beyond(64) == pytest.approx(fixed + each * 64)


def test_the_conformal_quantile_needs_enough_values_for_its_level() -> None:
    assert quantile([], 0.9) is None
    assert quantile([1.0, 2.0, 3.0], 0.9) == 3.0
    assert quantile(range(1, 20), 0.9) == 18


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


_DEVICE = sliced_device(price=1.0)
_SHARES = (Share(), Share(50.0), Share(25.0), *(Share(100.0, profile.name) for profile in _DEVICE.mig_profiles))


def test_times_between_shares_are_read_at_the_sms_that_clients_got() -> None:
    """Of 108 SMs MPS grants 10% ten and 20% twenty, in pairs; a row's own count comes first."""
    points = [
        Point(1, Share(10.0), 1, 8.0, 0.0, 0.0, 1.0, 0.0, {"client_sms": 10.0}),
        Point(1, Share(50.0), 1, 2.0, 0.0, 0.0, 1.0, 0.0, {"client_sms": 40.0}),
    ]
    surface = Surface(points, _DEVICE)
    assert surface.read_latency(1, Share(20.0), lambda: None)[0] == pytest.approx(4.0)  # 20 SMs: twice 10
    assert surface.read_latency(1, Share(18.6), lambda: None)[0] == pytest.approx(4.0)  # 20 SMs as well
