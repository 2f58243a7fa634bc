from __future__ import annotations

from gpuprof.domain.share import Share
from gpuprof.placement.comparison import compare
from gpuprof.placement.contract import demand, plain_device, problem
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Problem
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.published.igniter import Igniter
from gpuprof.placement.published.parvagpu import ParvaGpu


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
