from __future__ import annotations

import pytest

from gpuprof.domain.map_file import parse_map
from gpuprof.serving.change.bounds import Bounds, Departure, ObservedLoad, PlannedLoad, find_departure, read_planned
from gpuprof.serving.change.window import ServiceWindow
from gpuprof.serving.watch.statistics import BUCKETS_MS
from tests.serving.running import map_of, replica

PLAN = PlannedLoad(rate_rps=100.0, percentile=99.0, slowest=1.0)


def observe_window(rate_rps: float, slowdown: float | None = 1.0, late: int = 0, seconds: float = 5.0) -> ObservedLoad:
    count = int(rate_rps * seconds)
    return ObservedLoad(ServiceWindow(seconds, count, count, late, 0, (0,) * (len(BUCKETS_MS) + 1)), slowdown)


@pytest.mark.parametrize(
    ("seen", "how"),
    [
        (observe_window(100.0), None),
        (observe_window(120.0), None),
        (observe_window(125.0), None),  # so much more may be chance
        (observe_window(140.0), Departure.RATE),
        (observe_window(100.0, 1.2), None),
        (observe_window(100.0, 1.3), Departure.LATENCY),
        (observe_window(100.0, late=100), Departure.SLO),
        (observe_window(45.0), None),
        (observe_window(30.0), Departure.IDLE),
        (observe_window(0.0, None), Departure.IDLE),
        (observe_window(100.0, 0.7), Departure.QUICK),
        (observe_window(30.0, 1.5), Departure.LATENCY),
    ],
)
def test_a_model_leaves_its_bounds_by_more_than_chance(seen: ObservedLoad, how: Departure | None) -> None:
    assert find_departure(PLAN, seen, Bounds()) is how


def test_of_few_requests_more_is_taken_for_chance() -> None:
    few = PlannedLoad(1.0, 99.0, 1.0)
    assert find_departure(few, observe_window(2.0), Bounds()) is None
    assert find_departure(few, observe_window(2.0, seconds=100.0), Bounds()) is Departure.RATE


def test_what_the_plan_leaves_open_is_borne() -> None:
    document = map_of({"m": "null:4"}, [replica("m", latency_ms=2.0)])
    document["nodes"][0]["gpus"][0]["partitions"][0]["replicas"][0]["predicted"]["latency_ms_interval"] = [1.0, 3.0]
    plan = read_planned(parse_map(document, "test"), "m")
    assert plan == PlannedLoad(50.0, 99.0, 1.5)
    assert find_departure(plan, observe_window(50.0, 1.4), Bounds()) is None
    assert find_departure(plan, observe_window(50.0, 1.6), Bounds()) is Departure.LATENCY
