"""Replicas that fill partial batches up take as long for one request as for a full batch, in plans and in checks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Estimate, Workload
from gpuprof.domain.runtime_variant import Padding
from gpuprof.domain.share import Share
from gpuprof.placement.contract import LinearEstimator, demand, evidence, plain_device, problem, sliced_device
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.policies import make_policy
from gpuprof.placement.predict import retime_map
from gpuprof.placement.problem import Options, Problem
from gpuprof.rules.batching import padded_size


@dataclass(frozen=True, slots=True)
class PaddedEstimator(LinearEstimator):
    """Every batch is filled up."""

    padding: Padding = Padding.FULL

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time of the formula."""
        estimate = LinearEstimator.estimate(self, model, device, batch, share, beside, processes)
        return replace(estimate, padding=self.padding)


def _pose(source: str = MEASURED, slowdown: float = 0.05, count: int | None = None) -> Problem:
    demands = [demand("m0", 120.0, 60.0), demand("m1", 300.0, 40.0)]
    estimator = PaddedEstimator(slowdown=slowdown, source=source)
    return problem(demands, [(plain_device(), count)], estimator, Options())


@pytest.mark.parametrize("policy", ["ffd", "gpulet", "igniter", "milp", "optimal", "usher"])
def test_every_batch_of_a_replica_is_planned_with_the_time_of_a_full_one(policy: str) -> None:
    given = _pose(count=4)
    deployment = to_map(given, make_policy(policy).place(given))
    assert check(deployment, evidence(given)) == ()
    replicas = [replica for *_, replica in deployment.places()]
    assert any(replica.batch > 1 for replica in replicas)
    for replica in replicas:
        assert replica.batch_latency_ms is not None
        assert set(replica.batch_latency_ms) == {replica.batch_latency_ms[-1]}
        assert len(replica.batch_latency_ms) == replica.batch
        assert replica.batch_latency_ms[-1] == pytest.approx(replica.predicted.latency_ms)


@pytest.mark.parametrize("policy", ["ffd", "optimal"])
def test_batches_padded_to_powers_of_two_are_planned_with_the_times_of_these(policy: str) -> None:
    estimator = PaddedEstimator(slowdown=0.05, source=MEASURED, padding=Padding.POWERS_OF_TWO)
    given = replace(_pose(count=4), estimator=estimator)
    deployment = to_map(given, make_policy(policy).place(given))
    assert check(deployment, evidence(given)) == ()
    for *_, replica in deployment.places():
        times = replica.batch_latency_ms
        assert times is not None and len(set(times)) > 1
        sizes = [padded_size(rows, replica.batch, Padding.POWERS_OF_TWO) for rows in range(1, replica.batch + 1)]
        assert times == tuple(times[size - 1] for size in sizes)


def test_check_refuses_partial_batches_that_are_quicker_than_full_ones() -> None:
    given = _pose()
    content = json.loads(to_map(given, make_policy("ffd").place(given)).to_json())
    replica = next(
        written
        for node in content["nodes"]
        for gpu in node["gpus"]
        for partition in gpu["partitions"]
        for written in partition["replicas"]
        if written["batch"] > 1
    )
    replica["batch_latency_ms"][0] *= 0.5
    violations = check(DeploymentMap.model_validate(content), evidence(given))
    assert any("batch_latency_ms of 1 is" in violation.message for violation in violations)


def test_new_times_of_a_map_are_padded_too() -> None:
    given = _pose()
    deployment = to_map(given, make_policy("ffd").place(given))
    slower = replace(given, estimator=PaddedEstimator(start_ms=4.0, slowdown=0.05))
    for *_, replica in retime_map(deployment, evidence(slower), "another").places():
        assert replica.batch_latency_ms is not None
        assert replica.batch_latency_ms == pytest.approx((replica.predicted.latency_ms,) * replica.batch)


def test_a_plan_of_instances_is_accepted() -> None:
    demands = [demand("m0", 120.0, 90.0), demand("m1", 100.0, 120.0)]
    given = problem(demands, [(sliced_device(), None)], PaddedEstimator(), Options())
    assert check(to_map(given, make_policy("optimal").place(given)), evidence(given)) == ()
