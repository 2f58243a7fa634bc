from __future__ import annotations

from dataclasses import replace

import pytest

from gpuprof.domain.share import Share
from gpuprof.placement.contract import demand, plain_device, problem, sliced_device
from gpuprof.placement.optimal.pattern_program import PatternProgram, ReplicaPattern, drop_dominated
from gpuprof.placement.placement import PlacedPartition, PlacedReplica


def make_pattern(rates: dict[str, float], device: str = "plain", mig: str | None = None) -> ReplicaPattern:
    share = Share(100.0 / len(rates), mig)
    replicas = tuple(PlacedReplica(model, 1, 1, share, rate) for model, rate in rates.items())
    return ReplicaPattern(device, PlacedPartition(replicas, mig))


def test_rooms_are_taken_until_every_demand_is_served() -> None:
    given = problem([demand("a", 100.0), demand("b", 30.0)])
    program = PatternProgram(given, given.demands, [make_pattern({"a": 90.0}), make_pattern({"a": 10.0, "b": 30.0})])
    solution = program.program.solve()
    assert solution is not None
    assert solution.objective == pytest.approx(2.0)
    gpus = program.read_solution(solution)
    assert sorted(one.rate_rps for gpu in gpus for one in gpu.replicas()) == pytest.approx([10.0, 30.0, 90.0])


def test_no_more_is_served_than_is_asked_for() -> None:
    given = problem([demand("a", 50.0)])
    program = PatternProgram(given, given.demands, [make_pattern({"a": 80.0})])
    solution = program.program.solve()
    assert solution is not None
    assert [one.rate_rps for gpu in program.read_solution(solution) for one in gpu.replicas()] == pytest.approx([50.0])


def test_instances_stand_in_legal_layouts() -> None:
    given = problem([demand("a", 20.0)], [(sliced_device(), None)])
    program = PatternProgram(given, given.demands, [make_pattern({"a": 10.0}, "sliced", "3g.40gb")])
    solution = program.program.solve()
    assert solution is not None
    (gpu,) = program.read_solution(solution)
    assert sorted((part.mig, part.start) for part in gpu.partitions) == [("3g.40gb", 0), ("3g.40gb", 4)]


def test_a_fleet_that_is_too_small_has_no_solution() -> None:
    given = problem([demand("a", 50.0)], [(plain_device(), 1)])
    assert PatternProgram(given, given.demands, [make_pattern({"a": 40.0})]).program.solve() is None


def test_no_more_replicas_are_taken_than_are_allowed() -> None:
    given = problem([replace(demand("a", 50.0), max_replicas=1)])
    assert PatternProgram(given, given.demands, [make_pattern({"a": 40.0})]).program.solve() is None


def test_what_serves_less_of_everything_in_the_same_room_is_left_out() -> None:
    demands = [demand("a"), demand("b")]
    best, other, worse = (
        make_pattern({"a": 5.0, "b": 1.0}),
        make_pattern({"b": 3.0}),
        make_pattern({"a": 4.0, "b": 1.0}),
    )
    elsewhere = make_pattern({"a": 1.0}, mig="1g.10gb")
    assert set(drop_dominated([worse, best, other, elsewhere], demands)) == {best, other, elsewhere}
