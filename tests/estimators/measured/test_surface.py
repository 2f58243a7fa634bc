from __future__ import annotations

import math

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
        doublings = abs(math.log2(_DEVICE.fraction(point.share) / _DEVICE.fraction(share)))
        return abs(math.log2(point.batch / batch)) + doublings + (point.share.mig != share.mig)

    nearest = min(points, key=lambda point: (distance(point), -point.batch))
    assert Surface(points, _DEVICE).nearest(batch, share) is nearest
