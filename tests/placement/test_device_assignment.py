from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.share import Share
from gpuprof.placement.contract import demand, plain_device, problem, sliced_device, solve_and_check
from gpuprof.placement.deploy import to_map
from gpuprof.placement.device_assignment import assign_devices
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.parvagpu import ParvaGpu

GIVEN = problem(
    [demand(name, 20.0) for name in "abcd"],
    [(plain_device(), None), (sliced_device(), None)],
    options=Options(gpus_per_node=2),
)


def replica(model: str, pct: float = 50.0, mig: str | None = None, rate: float = 20.0) -> PlacedReplica:
    return PlacedReplica(model, 4, 1, Share(pct, mig), rate)


def whole(*models: str) -> PlacedGpu:
    return PlacedGpu("plain", (PlacedPartition(tuple(replica(model) for model in models)),))


def old(*gpus: PlacedGpu) -> DeploymentMap:
    return to_map(GIVEN, Placement("old", gpus))


def replan(previous: DeploymentMap, *gpus: PlacedGpu) -> DeploymentMap:
    return to_map(replace(GIVEN, previous=previous), Placement("new", gpus))


def places(deployment: DeploymentMap) -> set[tuple[str, int, str]]:
    return {(node.name, gpu.index, replica.model) for node, gpu, _, replica in deployment.places()}


def test_devices_that_hold_the_same_keep_their_numbers() -> None:
    before = old(whole("a", "b"), whole("c"), whole("d"))
    after = replan(before, whole("d"), whole("b", "a"))
    assert after.predicted.moves == 0
    assert places(after) <= places(before)


def test_the_seats_are_those_under_which_most_replicas_stay_not_the_first_that_match() -> None:
    before = old(whole("a", "b"), whole("a"))
    # first come, first served would seat the first device on the first, and (a, b) would lose a replica
    after = replan(before, whole("a"), whole("a", "b"))
    assert after.predicted.moves == 0


def test_another_batch_is_a_move_and_another_rate_is_not() -> None:
    before = old(whole("a"))
    rate = PlacedGpu("plain", (PlacedPartition((replica("a", rate=7.0),)),))
    batch = PlacedGpu("plain", (PlacedPartition((replace(replica("a"), batch=8),)),))
    assert replan(before, rate).predicted.moves == 0
    assert replan(before, batch).predicted.moves == 1


def test_new_devices_fill_machines_that_have_room_before_new_ones() -> None:
    before = old(whole("a"), whole("b"), whole("c"))  # two machines of two
    after = replan(before, whole("d"), whole("d"), whole("a"), whole("b"), whole("c"))
    assert {(node, index) for node, index, model in places(after) if model == "d"} == {("node1", 1), ("node2", 0)}
    assert after.predicted.moves == 2


def test_without_an_older_map_nothing_is_said_of_moves() -> None:
    assert old(whole("a")).predicted.moves is None


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@drawn(
    rates=st.lists(st.floats(1.0, 900.0), min_size=1, max_size=5),
    mig=st.booleans(),
    policy=st.sampled_from([Optimal(), ParvaGpu()]),
)
@example(rates=[637.0], mig=False, policy=Optimal())  # what is left over makes the second of its replicas larger
@example(rates=[157.6, 782.5, 178.9, 777.8], mig=False, policy=Optimal())  # two of the devices are the same in all
@example(rates=[817.0], mig=False, policy=Optimal())  # two replicas in one partition were made one
def test_from_its_own_output_nothing_moves(rates: list[float], mig: bool, policy: Optimal | ParvaGpu) -> None:
    fleet = [(sliced_device(), None)] if mig or isinstance(policy, ParvaGpu) else [(plain_device(), None)]
    demands = [demand(f"m{i}", rate, 60.0) for i, rate in enumerate(rates)]
    given: Problem = problem(demands, fleet, options=Options(gpus_per_node=2))
    _, first = solve_and_check(policy, given)
    _, second = solve_and_check(policy, replace(given, previous=first))
    assert second.predicted.moves == 0
    assert second.nodes == first.nodes


@pytest.mark.parametrize("count", [300])
def test_many_devices_that_are_all_different_keep_their_places(count: int) -> None:
    gpus = [whole(f"m{i}", f"m{i + 1}") for i in range(count)]
    given = problem([demand(f"m{i}") for i in range(count + 1)])
    before = to_map(given, Placement("old", tuple(gpus)))
    assert assign_devices(gpus[::-1], before).moves == 0
