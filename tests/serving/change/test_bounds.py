import pytest

from gpuprof.domain.deployment import parse_map
from gpuprof.serving.change.window import (
    Departure,
    ObservedLoad,
    PlannedLoad,
    ServiceWindow,
    find_departure,
    percentile_of,
    read_planned,
)
from gpuprof.serving.watch.statistics import BUCKETS_MS, ModelStatistics
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
    assert find_departure(PLAN, seen) is how


def test_of_few_requests_more_is_taken_for_chance() -> None:
    few = PlannedLoad(1.0, 99.0, 1.0)
    assert find_departure(few, observe_window(2.0)) is None
    assert find_departure(few, observe_window(2.0, seconds=100.0)) is Departure.RATE


def test_what_the_plan_leaves_open_is_borne() -> None:
    document = map_of({"m": "null:4"}, [replica("m", latency_ms=2.0)])
    document["nodes"][0]["gpus"][0]["partitions"][0]["replicas"][0]["predicted"]["latency_ms_interval"] = [1.0, 3.0]
    plan = read_planned(parse_map(document, "test"), "m")
    assert plan == PlannedLoad(50.0, 99.0, 1.5)
    assert find_departure(plan, observe_window(50.0, 1.4)) is None
    assert find_departure(plan, observe_window(50.0, 1.6)) is Departure.LATENCY


def count_answers(latencies_ms: list[float], slo_ms: float, refused: int = 0) -> ServiceWindow:
    statistics = ModelStatistics(arrived=len(latencies_ms) + refused, refused=refused)
    for ms in latencies_ms:
        statistics.add_answer(1, int(1e6 * ms), 0, ms <= slo_ms, 0)
    return ServiceWindow.of([statistics])


def make_window(late: int, answered: int, refused: int = 0) -> ServiceWindow:
    return ServiceWindow(1.0, answered + refused, answered, late, refused, (0,) * (len(BUCKETS_MS) + 1))


def test_a_window_is_what_was_counted_meanwhile() -> None:
    before = count_answers([1.0] * 10, 5.0)
    load = before.until(count_answers([1.0] * 10 + [4.0] * 6 + [40.0] * 2, 5.0, refused=2), 2.0)
    assert (load.arrived, load.answered, load.late, load.refused) == (10, 8, 2, 2)
    assert load.rate_rps == 5.0
    assert 3.0 < (load.percentile_ms(50.0) or 0.0) <= 5.0
    assert 30.0 < (load.percentile_ms(99.0) or 0.0) <= 50.0


@pytest.mark.parametrize(
    ("late", "answered", "refused", "broken"),
    [
        (1, 20, 0, False),
        (2, 20, 0, True),
        (10, 1000, 0, False),
        (25, 1000, 0, True),
        (0, 975, 25, True),
        (0, 0, 0, False),
    ],
)
def test_the_slo_is_broken_when_chance_does_not_explain(late: int, answered: int, refused: int, broken: bool) -> None:
    assert make_window(late, answered, refused).breaks_slo(99.0) is broken


def test_percentiles_are_within_their_bucket() -> None:
    buckets = [0] * (len(BUCKETS_MS) + 1)
    buckets[BUCKETS_MS.index(10.0)] = 99
    buckets[-1] = 1
    assert percentile_of(buckets, 50.0) == pytest.approx(5.0 + 5.0 * 50 / 99)
    assert percentile_of(buckets, 99.9) == BUCKETS_MS[-1]
    assert percentile_of([0] * 5, 50.0) is None
