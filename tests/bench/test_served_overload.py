"""What is sent to a server and to the simulator under overload is counted alike."""

from __future__ import annotations

import pytest

from bench.served_overload import PROTOCOLS, ReplicaSet
from bench.virtual_server import VirtualRequest, serve_requests


@pytest.mark.parametrize("load", [0.5, 1.5, 3.0])
def test_the_simulator_and_the_router_in_virtual_time_answer_the_same_part_in_time(load: float) -> None:
    case = ReplicaSet(8, 2, 24.0)
    requests = case.arrivals(load, 3)
    routed = serve_requests(case.replica_list(), requests, slo_ms=case.slo_ms)
    part = case.part_in_time(requests, routed.took_ms)
    assert part == pytest.approx(min(load, 1.0), rel=0.06)
    assert case.simulate(requests, 0.0) == pytest.approx(part, rel=0.01)


def test_only_what_comes_after_the_warm_up_and_is_answered_within_the_slo_counts() -> None:
    case = ReplicaSet(1, 1, 10.0)
    requests = [
        VirtualRequest(at_ms, priority) for at_ms, priority in ((1999.0, 0), (2000.0, 0), (3000.0, 1), (4000.0, 1))
    ]
    took = [10.0, 10.0, case.slo_ms, case.slo_ms + 0.1]
    most = 0.8 * case.duration_s * case.capacity_rps
    assert case.part_in_time(requests, took) == 2 / most
    assert case.part_in_time(requests, took, (1, "")) == 1 / most


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_requests_of_both_clients_are_answered_over_either_protocol(protocol: str) -> None:
    served = ReplicaSet(1, 1, 1.0).serve([VirtualRequest(0.0, 1), VirtualRequest(500.0, client="light")], protocol)
    assert [took is not None for took in served.took_ms] == [True, True]
    assert [one.client for one in served.requests] == ["", "light"]
