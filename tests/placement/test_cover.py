from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.share import Share
from gpuprof.placement.bin import cheapest_cover, make_cost, share_out_rate
from gpuprof.placement.contract import demand, plain_device, problem
from gpuprof.placement.segment import Segment


def segment(pct: float, capacity_rps: float) -> Segment:
    return Segment("m", "plain", Share(pct), 1, 1, capacity_rps, pct / 100.0, None, 1.0)


COST = make_cost(problem([demand("m")], [(plain_device(price=2.0), None)]))


def test_the_price_is_that_of_the_part_of_the_device() -> None:
    assert COST(segment(25.0, 1.0)) == 0.5


def test_the_efficient_segment_is_taken_as_often_as_it_fits_and_a_small_one_for_the_rest() -> None:
    cover = cheapest_cover(Demand("m", 215.0, Slo(1.0)), [segment(10, 20), segment(40, 100), segment(100, 180)], COST)
    assert [part.share.sm_pct for part, _ in cover.parts] == [40.0, 40.0, 10.0]
    assert cover.missing_rps == 0.0


def test_few_replicas_allowed_means_larger_ones() -> None:
    demand = Demand("m", 150.0, Slo(1.0), max_replicas=1)
    cover = cheapest_cover(demand, [segment(10, 20), segment(40, 100), segment(100, 180)], COST)
    assert [part.share.sm_pct for part, _ in cover.parts] == [100.0]


def test_what_few_replicas_cannot_serve_is_missing() -> None:
    demand = Demand("m", 500.0, Slo(1.0), max_replicas=2)
    cover = cheapest_cover(demand, [segment(40, 100), segment(100, 180)], COST)
    assert len(cover.parts) == 2
    assert cover.missing_rps == 500.0 - 360.0


def test_without_segments_everything_is_missing() -> None:
    assert cheapest_cover(Demand("m", 5.0, Slo(1.0)), [], COST).missing_rps == 5.0


@given(
    rate=st.floats(0.1, 1e4),
    sizes=st.lists(st.tuples(st.floats(1.0, 100.0), st.floats(1.0, 500.0)), min_size=1, max_size=5),
)
def test_a_cover_serves_the_whole_rate_and_overloads_nobody(rate: float, sizes: list[tuple[float, float]]) -> None:
    cover = cheapest_cover(Demand("m", rate, Slo(1.0)), [segment(*size) for size in sizes], COST)
    assert abs(sum(part for _, part in cover.parts) - rate) < 1e-6 * rate
    assert all(part <= segment.capacity_rps * (1 + 1e-9) for segment, part in cover.parts)


def test_load_is_shared_out_by_capacity() -> None:
    cover = share_out_rate(60.0, [segment(10, 40), segment(20, 80)])
    assert [rate for _, rate in cover.parts] == [20.0, 40.0]
