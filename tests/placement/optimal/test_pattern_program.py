from __future__ import annotations

from dataclasses import replace

import pytest

from gpuprof.domain.share import Share
from gpuprof.placement.contract import demand, plain_device, problem, sliced_device
from gpuprof.placement.optimal.pattern_program import PatternProgram, ReplicaPattern, drop_dominated
from gpuprof.placement.placement import PlacedPartition, PlacedReplica


def suite(rates: dict[str, float], device: str = "plain", mig: str | None = None) -> ReplicaPattern:
    share = Share(100.0 / len(rates), mig)
    replicas = tuple(PlacedReplica(model, 1, 1, share, rate) for model, rate in rates.items())
    return ReplicaPattern(device, PlacedPartition(replicas, mig))


def test_rooms_are_taken_until_every_demand_is_served() -> None:
    given = problem([demand("a", 100.0), demand("b", 30.0)])
    assembly = PatternProgram(given, given.demands, [suite({"a": 90.0}), suite({"a": 10.0, "b": 30.0})])
    solution = assembly.program.solve()
    assert solution is not None
    assert solution.objective == pytest.approx(2.0)
    gpus = assembly.read_solution(solution)
    assert sorted(one.rate_rps for gpu in gpus for one in gpu.replicas()) == pytest.approx([10.0, 30.0, 90.0])


def test_no_more_is_served_than_is_asked_for() -> None:
    given = problem([demand("a", 50.0)])
    assembly = PatternProgram(given, given.demands, [suite({"a": 80.0})])
    solution = assembly.program.solve()
    assert solution is not None
    assert [one.rate_rps for gpu in assembly.read_solution(solution) for one in gpu.replicas()] == pytest.approx([50.0])


def test_instances_stand_in_legal_layouts() -> None:
    given = problem([demand("a", 20.0)], [(sliced_device(), None)])
    assembly = PatternProgram(given, given.demands, [suite({"a": 10.0}, "sliced", "3g.40gb")])
    solution = assembly.program.solve()
    assert solution is not None
    (gpu,) = assembly.read_solution(solution)
    assert sorted((part.mig, part.start) for part in gpu.partitions) == [("3g.40gb", 0), ("3g.40gb", 4)]


def test_a_fleet_that_is_too_small_has_no_solution() -> None:
    given = problem([demand("a", 50.0)], [(plain_device(), 1)])
    assert PatternProgram(given, given.demands, [suite({"a": 40.0})]).program.solve() is None


def test_no_more_replicas_are_taken_than_are_allowed() -> None:
    given = problem([replace(demand("a", 50.0), max_replicas=1)])
    assert PatternProgram(given, given.demands, [suite({"a": 40.0})]).program.solve() is None


def test_what_serves_less_of_everything_in_the_same_room_is_left_out() -> None:
    demands = [demand("a"), demand("b")]
    best, other, worse = suite({"a": 5.0, "b": 1.0}), suite({"b": 3.0}), suite({"a": 4.0, "b": 1.0})
    elsewhere = suite({"a": 1.0}, mig="1g.10gb")
    assert set(drop_dominated([worse, best, other, elsewhere], demands)) == {best, other, elsewhere}
