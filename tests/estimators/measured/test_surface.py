from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.share import Share
from gpuprof.estimators.measured.measured import Point
from gpuprof.estimators.measured.surface import Surface
from gpuprof.placement.contract import sliced_device

_DEVICE = sliced_device(price=1.0)
_SHARES = (Share(), Share(50.0), Share(25.0), *(Share(100.0, profile.name) for profile in _DEVICE.mig_profiles))
_CELLS = st.tuples(st.integers(1, 40), st.sampled_from(_SHARES))


@given(
    measured=st.lists(_CELLS, min_size=1, max_size=25, unique=True),
    batch=st.integers(1, 80),
    share=st.sampled_from(_SHARES),
)
def test_the_nearest_point_is_that_of_a_look_at_all(
    measured: list[tuple[int, Share]], batch: int, share: Share
) -> None:
    points = [Point(*cell, 1, float(cell[0]), 0.0, 0.0, 1.0, 0.0, {}) for cell in measured]

    def distance(point: Point) -> float:
        doublings = abs(math.log2(_DEVICE.granted_fraction(point.share) / _DEVICE.granted_fraction(share)))
        return abs(math.log2(point.batch / batch)) + doublings + (point.share.mig != share.mig)

    nearest = min(points, key=lambda point: (distance(point), -point.batch))
    assert Surface(points, _DEVICE).nearest(batch, share) is nearest


def test_times_between_shares_are_read_at_the_sms_that_clients_got() -> None:
    """Of 108 SMs MPS grants 10% ten and 20% twenty, in pairs; a row's own count comes first."""
    points = [
        Point(1, Share(10.0), 1, 8.0, 0.0, 0.0, 1.0, 0.0, {"client_sms": 10.0}),
        Point(1, Share(50.0), 1, 2.0, 0.0, 0.0, 1.0, 0.0, {"client_sms": 40.0}),
    ]
    surface = Surface(points, _DEVICE)
    assert surface.read_latency(1, Share(20.0), lambda: None).value == pytest.approx(4.0)  # 20 SMs: twice 10
    assert surface.read_latency(1, Share(18.6), lambda: None).value == pytest.approx(4.0)  # 20 SMs as well
