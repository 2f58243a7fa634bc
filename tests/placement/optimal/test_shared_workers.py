from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Estimate, Figure
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.placement.contract import LinearEstimator, demand, plain_device, problem, solve_and_check
from gpuprof.placement.feasibility import check
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Options, Problem, collect_evidence

LAPTOP = replace(plain_device(), name="cpu-test", kind="cpu", compute_units=2)


class TwoCores(LinearEstimator):
    """Knows shares of one core and of both."""

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        return Share(50.0), Share(100.0)


def make_problem(count: int | None, rates: tuple[float, ...], slo_ms: float = 200.0, **options: bool) -> Problem:
    demands = [demand(f"m{number}", rate_rps, slo_ms) for number, rate_rps in enumerate(rates)]
    given = problem(demands, estimator=TwoCores(), options=Options(**options))  # type: ignore[arg-type]
    return replace(given, fleet=Fleet((FleetEntry(LAPTOP, count),)))


def solve(given: Problem) -> Placement:
    return solve_and_check(Optimal(), given)[0]


@pytest.mark.parametrize("count", [1, None])
@pytest.mark.parametrize("models", [3, 4, 8])
def test_light_models_take_turns_on_two_cores(count: int | None, models: int) -> None:
    placement = solve(make_problem(count, (5.0,) * models))
    assert not placement.unplaced and len(placement.gpus) == 1
    assert placement.lower_bound_gpus == 1
    assert len({replica.model for replica in placement.gpus[0].replicas()}) == models


def test_the_busiest_model_keeps_a_share_of_its_own_where_the_others_fit_beside() -> None:
    placement = solve(make_problem(1, (150.0, 5.0, 5.0, 5.0)))
    assert not placement.unplaced
    turning = {replica.model for replica in placement.gpus[0].replicas() if replica.turns}
    assert turning == {"m1", "m2", "m3"}


def test_two_models_with_a_core_each_do_not_take_turns() -> None:
    placement = solve(make_problem(1, (5.0, 5.0)))
    assert not any(replica.turns for replica in placement.gpus[0].replicas())


def test_isolated_models_have_shares_of_their_own() -> None:
    placement = solve(make_problem(None, (5.0,) * 4, isolate=True))
    assert len(placement.gpus) == 2
    assert not any(replica.turns for gpu in placement.gpus for replica in gpu.replicas())


def test_work_bounds_the_devices_and_no_bound_is_above_the_plan() -> None:
    rates = (300.0, 300.0, 300.0, 20.0)
    placement = solve(make_problem(None, rates))
    assert not placement.unplaced
    assert placement.lower_bound_gpus is not None
    assert 1 < placement.lower_bound_gpus <= len(placement.gpus)


def test_an_slo_that_waiting_would_break_is_left_unserved_on_one_machine() -> None:
    placement = solve(make_problem(1, (5.0,) * 6, slo_ms=3.3))
    assert placement.unplaced and any(replica.turns for replica in placement.gpus[0].replicas())
    assert placement.upper_bound_goodput_rps is not None
    assert placement.upper_bound_goodput_rps >= sum(placement.rates_rps().values())


class Contexts(LinearEstimator):
    """A process holds 1 GiB, of which 900 MiB are its context."""

    def estimate(self, *arguments: Any, **named: Any) -> Estimate:
        memory = Figure(float(2**30), MEASURED)
        return replace(super().estimate(*arguments, **named), memory_bytes=memory, context_bytes=900 * 2**20)


def plan_alike(count: int, **options: bool) -> tuple[Placement, DeploymentMap]:
    demands = [demand(f"m{number}", 4.0, 400.0) for number in range(count)]
    given = problem(demands, estimator=Contexts(), options=Options(**options))  # type: ignore[arg-type]
    gpu = replace(plain_device(), dram_bytes=6 * 2**30)
    return solve_and_check(Optimal(), replace(given, fleet=Fleet((FleetEntry(gpu, None),))))


def test_workers_hold_one_context_and_devices_grow_with_the_models_of_small_memory() -> None:
    counts = []
    for count in (1, 6, 7, 20, 41):
        placement, deployment = plan_alike(count)
        assert not placement.unplaced
        assert placement.lower_bound_gpus is not None and placement.lower_bound_gpus <= len(placement.gpus)
        counts.append(len(placement.gpus))
        for node in deployment.nodes:
            for gpu in node.gpus:
                assert sum(r.predicted.memory_bytes or 0 for r in gpu.partitions[0].replicas) <= 6 * 2**30
    assert counts == sorted(counts) and counts[-1] == 1
    assert len(plan_alike(7, isolate=True)[0].gpus) == 2  # six processes fit a device


def test_the_check_refuses_a_worker_whose_queue_or_memory_is_too_long() -> None:
    _, deployment = plan_alike(12)
    (node,) = deployment.nodes
    (gpu,) = node.gpus
    (partition,) = gpu.partitions
    assert {replica.turns for replica in partition.replicas} >= {1}
    given = problem(
        [demand(f"m{number}", 4.0, 400.0) for number in range(12)],
        [(replace(plain_device(), dram_bytes=6 * 2**30), None)],
        Contexts(),
    )

    def check_changed(**update: object) -> str:
        replicas = tuple(replica.model_copy(update=update) for replica in partition.replicas)
        changed = gpu.model_copy(update={"partitions": (partition.model_copy(update={"replicas": replicas}),)})
        models = {name: model.model_copy(update={"rate_rps": 1e6}) for name, model in deployment.models.items()}
        nodes = (node.model_copy(update={"gpus": (changed,)}),)
        broken = deployment.model_copy(update={"nodes": nodes, "models": models})
        return " ".join(map(str, check(broken, collect_evidence(given))))

    assert "serves at most" in check_changed(rate_rps=40.0)
    assert "GiB" in check_changed(turns=0, sm_share_pct=5.0)
