"""One test body, run against the serving runtime and against the simulator: what failures do to requests."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from gpuprof.domain.arrival_process import RecordedArrivals
from gpuprof.domain.deployment import Replica
from gpuprof.simulator.cluster import Failure, SimulationOptions
from gpuprof.simulator.engine import simulate
from tests.simulator.maps import make_map, replica
from tests.virtual_server import Outage, serve

#: Replicas, arrivals in ms and outages → sorted latencies in ms, and how many requests got no answer.
System = Callable[[Sequence[Replica], Sequence[float], Sequence[Outage]], tuple[list[float], int]]


@pytest.fixture(params=["served", "simulated"])
def system(request: pytest.FixtureRequest) -> System:
    def serve_requests(
        replicas: Sequence[Replica], arrivals: Sequence[float], outages: Sequence[Outage]
    ) -> tuple[list[float], int]:
        result = serve(replicas, arrivals, outages)
        return sorted(result.latencies_ms.values()), result.failed

    def simulate_requests(
        replicas: Sequence[Replica], arrivals: Sequence[float], outages: Sequence[Outage]
    ) -> tuple[list[float], int]:
        failures = tuple(
            Failure("node0", o.replica, o.begin_ms / 1e3, None if o.end_ms is None else (o.end_ms - o.begin_ms) / 1e3)
            for o in outages
        )
        times = RecordedArrivals(np.array([round(t * 1e6) for t in arrivals], np.int64), 1.0)
        result = simulate(make_map([[r] for r in replicas]), {"m": times}, SimulationOptions(10.0, failures=failures))
        # A bin of the histogram is a 256th of its value wide.
        latencies = result.series[0]
        counts = np.diff(np.rint(np.array([0.0, *latencies.fraction]) * result.models[0].answered)).astype(int)
        return np.repeat(latencies.latency_ms, counts).tolist(), result.models[0].missed["failed"]

    return serve_requests if request.param == "served" else simulate_requests


def about(*latencies_ms: float) -> object:
    return pytest.approx(sorted(latencies_ms), rel=0.005)


PAIR = replica("m", [100.0, 100.0])


def test_the_fastest_replica_and_the_batching_rule_decide_alike(system: System) -> None:
    waits = replica("m", [50.0, 60.0], max_wait_ms=20.0)
    slow = replica("m", [90.0])
    latencies, failed = system([waits, slow], [0.0, 10.0, 12.0, 14.0, 30.0], [])
    # 0 and 10 fill a batch until 70; 12 goes to the slow one until 102; 14 and 30 wait for the first, until 130.
    assert latencies == about(70.0, 60.0, 90.0, 116.0, 100.0)
    assert failed == 0


def test_what_a_failed_device_had_goes_before_what_waits_elsewhere(system: System) -> None:
    latencies, failed = system([PAIR, PAIR], [0.0, 5.0, 10.0, 40.0, 50.0], [Outage(1, 60.0)])
    # 0 ran and 10 and 40 waited where it failed. The other is busy until 105; then 0 and 10, then 40 and 50 of its own.
    assert latencies == about(205.0, 100.0, 195.0, 265.0, 255.0)
    assert failed == 0


def test_without_another_replica_the_accepted_wait_for_the_device_and_new_ones_are_turned_away(system: System) -> None:
    latencies, failed = system([PAIR], [0.0, 20.0, 100.0], [Outage(0, 50.0, 200.0)])
    assert latencies == about(300.0, 280.0)
    assert failed == 1


def test_a_device_that_never_comes_back_answers_nothing(system: System) -> None:
    assert system([PAIR], [0.0, 20.0], [Outage(0, 50.0)]) == ([], 2)


@pytest.mark.parametrize("system", ["served"], indirect=True)  # simulated devices do not fail because of a request
def test_a_request_that_was_lost_twice_goes_alone(system: System) -> None:
    outages = [Outage(0, 50.0, 100.0), Outage(0, 150.0, 200.0)]
    latencies, failed = system([PAIR], [0.0, 120.0], outages)
    assert latencies == about(300.0, 280.0)  # together they would both be answered at 300
    assert failed == 0


def test_a_request_that_was_lost_three_times_is_given_up(system: System) -> None:
    outages = [Outage(0, 50.0, 100.0), Outage(0, 150.0, 200.0), Outage(0, 250.0, 300.0)]
    latencies, failed = system([PAIR], [0.0, 120.0], outages)
    assert latencies == about(280.0)
    assert failed == 1


def test_a_replica_that_came_back_serves_again(system: System) -> None:
    latencies, failed = system([PAIR, PAIR], [0.0, 5.0, 110.0, 120.0], [Outage(1, 20.0, 100.0)])
    # 0 follows 5 on the other replica until 205; 110 goes to the one that is back, and 120 waits behind 0.
    assert latencies == about(205.0, 100.0, 100.0, 185.0)
    assert failed == 0
