from dataclasses import replace

import pytest
from hypothesis import example, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.share import Share
from gpuprof.placement.contract import demand, plain_device, problem, sliced_device, solve_and_check
from gpuprof.placement.deploy import compare, jain, measure, to_map
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.published.igniter import Igniter
from gpuprof.placement.published.parvagpu import ParvaGpu

GIVEN = problem([demand("a", 200.0)], [(plain_device(), None)], options=Options(latency_budget=0.9))


class Careless:
    def place(self, problem: Problem) -> Placement:
        replica = PlacedReplica("m", 8, 1, Share(60.0), 25.0)
        return Placement("careless", (PlacedGpu("plain", (PlacedPartition((replica, replica)),)),))


class Broken:
    def place(self, problem: Problem) -> Placement:
        raise ZeroDivisionError("division by zero")


class Stranger:
    def place(self, problem: Problem) -> Placement:
        replica = PlacedReplica("nobody asked", 8, 1, Share(60.0), 25.0)
        return Placement("stranger", (PlacedGpu("nowhere", (PlacedPartition((replica,)),)),))


def test_a_policy_that_fails_is_a_row_and_the_others_are_compared() -> None:
    given = problem([demand("m")], [(plain_device(), None)])
    broken, stranger, sound = compare(
        given, [("broken", Broken()), ("stranger", Stranger()), ("ffd", FirstFitDecreasing())]
    )
    assert broken.reason == "the policy failed: ZeroDivisionError: division by zero"
    assert stranger.deployment is None or stranger.violations
    assert sound.objective is not None


def test_policies_stand_side_by_side_with_their_figures_and_reasons() -> None:
    given = problem([demand("m")], [(plain_device(), None)])
    named: list[tuple[str, Policy]] = [
        ("ffd", FirstFitDecreasing()),
        ("optimal", Optimal()),
        ("igniter", Igniter()),
        ("parvagpu", ParvaGpu()),
    ]
    outcomes = compare(given, [*named, ("careless", Careless())])
    assert [outcome.name for outcome in outcomes] == ["ffd", "optimal", "igniter", "parvagpu", "careless"]
    for outcome in outcomes[:3]:
        assert outcome.objective is not None
        assert outcome.objective.gpus == 1
        assert outcome.violations == ()
        assert outcome.missing_rps == 0.0
    assert outcomes[3].deployment is None
    assert "needs a device with MIG" in outcomes[3].reason
    assert [violation.rule for violation in outcomes[4].violations] == ["share"]


def draw_map(*replicas: PlacedReplica) -> Placement:
    return Placement("by hand", (PlacedGpu("plain", (PlacedPartition(replicas),)),))


def test_slack_and_fragmentation_are_those_of_the_papers_equations() -> None:
    # batch 4 under 50% serves 333.3/s; at 100/s each it is busy for 0.3 of the time
    active = PlacedReplica("a", 4, 1, Share(25.0), 50.0, memory_bytes=2**30)
    two = PlacedReplica("a", 4, 1, Share(50.0), 100.0, memory_bytes=2**30)
    figures = measure(to_map(GIVEN, draw_map(active, two)), {"plain": plain_device()})
    assert figures.internal_slack == pytest.approx(0.7)
    assert figures.external_fragmentation == pytest.approx(0.25)
    assert figures.compute_utilization == pytest.approx(0.3 * 0.75)
    assert figures.memory_utilization == pytest.approx(2 / 16)
    assert figures.gpus == 1
    assert figures.cost_per_hour == 1.0
    assert figures.goodput_rps == pytest.approx(150.0)
    assert figures.fairness == 1.0


def test_activity_while_busy_counts_as_slack() -> None:
    busy = PlacedReplica("a", 4, 1, Share(50.0), 200.0)
    figures = measure(to_map(GIVEN, draw_map(busy)), {"plain": plain_device()}, lambda device, replica: 0.5)
    assert figures.internal_slack == pytest.approx(1.0 - 0.6 * 0.5)


def test_instances_count_by_their_sms() -> None:
    placed = PlacedReplica("a", 4, 1, Share(100.0, "3g.40gb"), 100.0)
    placement = Placement("by hand", (PlacedGpu("sliced", (PlacedPartition((placed,), "3g.40gb", 4),)),))
    given = problem([demand("a", 100.0)], [(sliced_device(), None)], options=Options(latency_budget=0.9))
    figures = measure(to_map(given, placement), {"sliced": sliced_device()})
    assert figures.external_fragmentation == pytest.approx(1.0 - 42 / 108)


def test_an_empty_map_has_no_figures_to_divide_by() -> None:
    figures = measure(to_map(GIVEN, Placement("none", ())), {"plain": plain_device()})
    assert (figures.gpus, figures.internal_slack, figures.external_fragmentation) == (0, 0.0, 0.0)


def test_fairness_is_jains_index() -> None:
    assert jain([1.0, 1.0, 1.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([0.0, 0.0]) == 1.0


FOUR = problem(
    [demand(name, 20.0) for name in "abcd"],
    [(plain_device(), None), (sliced_device(), None)],
    options=Options(gpus_per_node=2),
)


def replica(model: str, pct: float = 50.0, mig: str | None = None, rate: float = 20.0) -> PlacedReplica:
    return PlacedReplica(model, 4, 1, Share(pct, mig), rate)


def whole(*models: str) -> PlacedGpu:
    return PlacedGpu("plain", (PlacedPartition(tuple(replica(model) for model in models)),))


def old(*gpus: PlacedGpu) -> DeploymentMap:
    return to_map(FOUR, Placement("old", gpus))


def replan(previous: DeploymentMap, *gpus: PlacedGpu) -> DeploymentMap:
    return to_map(replace(FOUR, previous=previous), Placement("new", gpus))


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
