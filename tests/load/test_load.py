import math
import time
from array import array
from typing import Any

import numpy as np
import pytest

from gpuprof.load.client import LoadClient, Schedule, SentRequests
from gpuprof.load.load import LoadSettings, RequestStream, arrival_times, make_schedules, run_load
from gpuprof.load.report import find_percentile, stage_row, stage_rows, summarize
from gpuprof.load.target import Target, requests_for
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer

pytestmark = serves_in_real_time


@pytest.mark.parametrize(("kind", "scv"), [("poisson", 1.0), ("gamma:4", 4.0), ("constant", 0.0)])
def test_arrivals_have_their_rate_and_variability_and_repeat(kind: str, scv: float) -> None:
    times = arrival_times(kind, 100.0, 200.0, seed=3)
    gaps = np.diff(times)
    assert len(times) / 200.0 == pytest.approx(100.0, rel=0.05)
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(scv, abs=0.35)
    assert (np.diff(times) >= 0).all() and times[-1] <= 200.0
    assert np.array_equal(times, arrival_times(kind, 100.0, 200.0, seed=3))


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_the_traffic_is_the_same_however_many_clients_send_it(clients: int) -> None:
    streams = [RequestStream("a", 50.0, 10.0), RequestStream("b", 20.0, 10.0)]
    requests = ((b"a",), (b"b",))
    settings = LoadSettings(duration_s=4.0, warmup_s=1.0, seed=5, clients=clients)
    schedules = make_schedules(Target("h", 1), streams, requests, settings)
    assert len(schedules) == clients
    merged = sorted((time, model) for s in schedules for time, model in zip(s.times, s.models, strict=True))
    alone = make_schedules(Target("h", 1), streams, requests, LoadSettings(4.0, 1.0, 5, clients=1))[0]
    assert merged == list(zip(alone.times, alone.models, strict=True))


def sent_requests(rows: list[tuple[float, float, int]]) -> SentRequests:
    """From rows of (sent, done, status)."""
    begun, ends, status = (array(kind, column) for kind, column in zip("ddh", zip(*rows, strict=True), strict=True))
    return SentRequests(begun, ends, status)


def test_latency_counts_from_when_a_request_was_due_and_warm_up_does_not_count() -> None:
    schedule = Schedule("h", 1, ((b"",),), [0.5, 1.0, 1.2, 1.4, 1.6, 2.5], [0] * 6)
    result = sent_requests(
        [(0.5, 9.0, 200), (1.1, 1.2, 200), (1.2, 1.5, 200), (1.4, 1.41, 503), (1.6, -1.0, 0), (2.5, 2.6, 200)]
    )
    row = summarize([schedule], [result], 0, "m", 250.0, (1.0, 2.0))
    assert (row.sent, row.answered, row.in_slo, row.refused, row.failed, row.lost) == (4, 2, 1, 1, 0, 1)
    assert (row.rate_rps, row.goodput_rps) == (4.0, 1.0)
    assert row.p50_ms == pytest.approx(250.0)
    assert row.lag_p99_ms == pytest.approx(97.0)
    assert row.client_is_limit


def test_what_the_server_did_meanwhile_is_the_difference_of_its_statistics() -> None:
    def statistics(count: int, queue_ms: float, batches: dict[int, int]) -> dict[str, Any]:
        ns = int(1e6 * queue_ms)
        stages = {
            key: {"count": count, "ns": ns} for key in ("queue", "compute_input", "compute_infer", "compute_output")
        }
        return {
            "inference_stats": stages,
            "batch_stats": [
                {"batch_size": size, "compute_infer": {"count": n, "ns": 0}} for size, n in batches.items()
            ],
        }

    schedule = Schedule("h", 1, ((b"",),), [0.0], [0])
    row_before = summarize([schedule], [sent_requests([(0.0, 0.010, 200)])], 0, "m", 100.0, (0.0, 1.0))
    row = stage_row(row_before, statistics(10, 10.0, {1: 10}), statistics(15, 20.0, {1: 12, 4: 3}))
    assert row["queue_ms"] == 2.0
    assert row["router_ms"] == pytest.approx(2.0)
    assert row["batches"] == {1: 2, 4: 3}
    assert stage_row(row_before, None, None) == {"model": "m"}


def test_what_the_server_says_it_took_is_kept_apart_from_the_network() -> None:
    schedule = Schedule("h", 1, ((b"",),), [0.0, 1.0, 2.0], [0, 0, 0])
    requests = sent_requests([(0.0, 0.010, 200), (1.0, 1.020, 200), (2.0, 2.001, 503)])
    requests.server_ms.extend([4.0, 6.0, math.nan])
    assert not requests.queue_ms  # of other servers only the total is known
    summary = summarize([schedule], [requests], 0, "m", 100.0, (0.0, 3.0))
    assert summary.mean_ms == pytest.approx(15.0)
    assert summary.server_mean_ms == 5.0
    ns = {key: {"count": 0, "ns": 0} for key in ("queue", "compute_input", "compute_infer", "compute_output")}
    after = {"inference_stats": {key: {"count": 2, "ns": 1_000_000} for key in ns}, "batch_stats": []}
    row = stage_row(summary, {"inference_stats": ns, "batch_stats": []}, after)
    assert row["router_ms"] == pytest.approx(13.0) and row["network_ms"] == pytest.approx(10.0)
    requests.server_ms[1] = math.nan  # one that does not say
    silent = summarize([schedule], [requests], 0, "m", 100.0, (0.0, 3.0))
    assert silent.server_mean_ms is None
    assert stage_row(silent, {"inference_stats": ns, "batch_stats": []}, after)["network_ms"] is None


def test_the_slowest_hundredth_of_the_answers_is_divided_into_where_its_time_went() -> None:
    due = [float(second) for second in range(200)]
    schedule = Schedule("h", 1, ((b"",),), due, [0] * 200)
    # All take 10 ms but two: one was sent 5 ms late and waited, the other's batch took long.
    sent, done = list(due), [second + 0.010 for second in due]
    sent[50], done[50], done[70] = due[50] + 0.005, due[50] + 0.040, due[70] + 0.060
    requests = sent_requests([(begin, end, 200) for begin, end in zip(sent, done, strict=True)])
    requests.server_ms.extend([9.0] * 200)
    requests.queue_ms.extend([1.0] * 200)
    requests.infer_ms.extend([7.0] * 200)
    requests.server_ms[50], requests.queue_ms[50] = 32.0, 20.0
    requests.server_ms[70], requests.infer_ms[70] = 58.0, 50.0
    row = summarize([schedule], [requests], 0, "m", 100.0, (0.0, 200.0))
    assert row.slowest_ms == pytest.approx(50.0)
    assert (row.slowest_late_ms, row.slowest_network_ms) == pytest.approx((2.5, 2.5))
    assert (row.slowest_router_ms, row.slowest_queue_ms, row.slowest_infer_ms) == pytest.approx((6.0, 10.5, 28.5))
    requests.infer_ms[3] = math.nan  # a server that does not say it of every answer
    assert summarize([schedule], [requests], 0, "m", 100.0, (0.0, 200.0)).slowest_ms is None


def test_stages_count_the_warm_up_on_both_sides_so_that_no_part_of_a_request_takes_less_than_nothing() -> None:
    schedule = Schedule("h", 1, ((b"",),), [0.0, 2.0], [0, 0])
    requests = sent_requests([(0.0, 0.100, 200), (2.0, 2.002, 200)])  # the first, of the warm-up, waited long
    keys = ("queue", "compute_input", "compute_infer", "compute_output")
    counts = [
        {"m": {"inference_stats": {key: {"count": n, "ns": ns} for key in keys}, "batch_stats": []}}
        for n, ns in ((0, 0), (2, 20_000_000))
    ]
    (row,) = stage_rows([schedule], [requests], ["m"], *counts)
    assert row["queue_ms"] == 10.0 and row["router_ms"] == pytest.approx(51.0 - 40.0)


def test_a_server_is_loaded_and_every_request_answered(null_server: RunningServer) -> None:
    streams = [RequestStream("small", 100.0, 500.0), RequestStream("large", 20.0, 500.0)]
    settings = LoadSettings(duration_s=1.0, warmup_s=0.2, seed=1, clients=2)
    outcome = run_load(Target.parse(null_server.url), streams, settings)
    for result, stream in zip(outcome.results, streams, strict=True):
        assert result.sent == result.answered > 0
        assert result.rate_rps == pytest.approx(stream.rate_rps, rel=0.6)
        assert result.p50_ms is not None and 0.0 < result.p50_ms <= (result.p99_ms or math.inf)
    assert outcome.stages[0]["queue_ms"] is not None


def test_a_percentile_has_its_interval_or_is_not_given() -> None:
    values = [float(value) for value in range(1, 1001)]
    p99 = find_percentile(values, 99.0)
    assert p99 is not None and p99.low is not None and p99.high is not None
    assert p99.low < p99.value < p99.high <= 1000.0
    inside = [
        (percentile.low or 0.0) <= 0.99 <= (percentile.high or 1.0)
        for seed in range(300)
        if (percentile := find_percentile(np.sort(np.random.default_rng(seed).random(1500)).tolist(), 99.0)) is not None
    ]
    assert np.mean(inside) > 0.92
    assert find_percentile(values[:15], 99.0) is None and find_percentile(values[:15], 95.0) is None
    hundred = find_percentile(values[:100], 99.0)
    assert hundred is not None and hundred.high is None and hundred.low is not None  # nothing shows how high it may be
    assert find_percentile([], 50.0) is None
    alone = find_percentile([3.0], 50.0)
    assert alone is not None and alone.value == 3.0


def test_a_closed_loop_keeps_so_many_on_their_way_and_counts_from_sending(null_server: RunningServer) -> None:
    streams = [RequestStream("small", 0.0, 60_000.0, concurrency=3)]
    settings = LoadSettings(duration_s=0.8, warmup_s=0.2, clients=2)
    schedules = make_schedules(Target("h", 1), streams, ((b"a",),), settings)
    assert [schedule.in_flight for schedule in schedules] == [(2,), (1,)]
    outcome = run_load(Target.parse(null_server.url), streams, settings)
    (result,) = outcome.results
    assert result.answered == result.sent > 20 and result.lost == 0 and result.mean_ms is not None
    # Little's law: what is on its way is the rate times the time of each; from the beginning it would be hundreds.
    assert result.rate_rps * result.mean_ms / 1000.0 < 9.0


def test_an_answer_in_a_closed_loop_sends_the_next_request_and_never_more(null_server: RunningServer) -> None:
    target = Target.parse(null_server.url)
    requests = requests_for(target, "small", None, 0)
    schedule = Schedule(target.host, target.port, (tuple(requests),), (), (), in_flight=(3,), until_s=0.5)
    sent = LoadClient(schedule).run(time.monotonic())
    begun, ends = np.asarray(sent.sent_s), np.sort(np.asarray(sent.done_s))
    assert len(begun) > 6 and set(sent.status) == {200}
    assert (ends[:-3] <= begun[3:]).all()
    assert begun[2] <= ends[0]
