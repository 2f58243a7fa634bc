from __future__ import annotations

from gpuprof.placement.contract import demand, plain_device, problem
from gpuprof.placement.segment import Segments
from gpuprof.placement.unplaced_reasons import explain_unplaced


def test_a_rate_beyond_all_replicas_is_not_put_down_to_a_fleet_that_has_no_end() -> None:
    given = problem([demand("m", 1e300)])
    reason = explain_unplaced(given, Segments(given), given.demands[0])
    assert reason == "10000 replicas, the most that are planned, serve too little"


def test_a_full_fleet_is_named_with_its_counts() -> None:
    given = problem([demand("m", 50.0)], [(plain_device(), 2)])
    assert "no room is left on 2 plain" in explain_unplaced(given, Segments(given), given.demands[0])
