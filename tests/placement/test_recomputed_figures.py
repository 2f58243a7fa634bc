"""Figures that hardly move a plan are compared with the estimator that planned it: memory, times of smaller batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import PREDICTED, Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.placement.contract import demand, evidence, plain_device, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem
from tests.placement.curved import CurvedEstimator

_POLICIES = ("ffd", "igniter", "usher", "optimal")


@dataclass(frozen=True, slots=True)
class GuessedMemory(CurvedEstimator):
    """Memory is a guess: it is planned at the upper end of its interval, and no process is held to it."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time of the formula."""
        # Named, since `super()` knows no class with slots.
        said = CurvedEstimator.estimate(self, model, device, batch, share, beside, processes)
        assert said.memory_bytes is not None
        value = said.memory_bytes.value
        return replace(said, memory_bytes=Figure(value, PREDICTED, 0.5 * value, 3.0 * value))


_ESTIMATOR = GuessedMemory(start_ms=8.0)


def _pose(confidence: float | None) -> Problem:
    asked = [demand("m0", 120.0, 160.0), demand("m1", 150.0, 200.0)]
    return problem(asked, [(plain_device(), None)], _ESTIMATOR, Options(confidence=confidence))  # type: ignore[arg-type]


def _plan(policy: str, confidence: float | None) -> tuple[Problem, dict[str, Any]]:
    given = _pose(confidence)
    deployment = to_map(given, make_policy(policy).place(given))
    assert check(deployment, evidence(given)) == ()
    return given, json.loads(deployment.to_json())


def _replicas(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        one
        for node in content["nodes"]
        for gpu in node["gpus"]
        for partition in gpu["partitions"]
        for one in partition["replicas"]
    ]


def _find_wrong(given: Problem, content: dict[str, Any]) -> list[str]:
    return [one.message for one in check(DeploymentMap.model_validate(content), evidence(given))]


@pytest.mark.parametrize("confidence", [None, 0.0, 0.5])
@pytest.mark.parametrize("policy", _POLICIES)
def test_a_memory_that_is_not_the_planned_end_of_the_estimators_is_noticed_where_nothing_is_limited(
    policy: str, confidence: float | None
) -> None:
    given, content = _plan(policy, confidence)
    for number, replica in enumerate(_replicas(content)):
        assert replica["memory_limit_bytes"] is None
        for factor in (0.0, 0.34, 0.7, 0.99, 1.01, 1.5):
            changed = json.loads(json.dumps(content))
            predicted = _replicas(changed)[number]["predicted"]
            predicted["memory_bytes"] = round(factor * predicted["memory_bytes"])
            assert _find_wrong(given, changed), f"{replica['model']}: {factor}"


def test_a_memory_requirement_that_is_not_the_estimators_is_noticed() -> None:
    given, content = _plan("usher", None)
    for factor in (0.7, 1.3):
        changed = json.loads(json.dumps(content))
        _replicas(changed)[0]["predicted"]["mreq"]["bytes"] *= factor
        assert "by the estimator" in _find_wrong(given, changed)[0]


def test_memory_of_which_the_estimator_knows_nothing_cannot_be_said() -> None:
    given, content = _plan("ffd", None)

    class Silent(GuessedMemory):
        def estimate(self, *asked: Any, **more: Any) -> Estimate:
            return replace(GuessedMemory.estimate(self, *asked, **more), memory_bytes=None)

    known = replace(evidence(given), estimator=Silent(start_ms=8.0))
    assert "of which the estimator knows nothing" in check(DeploymentMap.model_validate(content), known)[0].message


def test_what_a_map_leaves_unsaid_counts_at_the_planned_end_when_memory_is_added_up() -> None:
    given, content = _plan("ffd", None)
    small = replace(plain_device(), dram_bytes=2 * 2**30)  # for the means of the replicas, not for their upper ends
    for replica in _replicas(content):
        replica["predicted"]["memory_bytes"] = None
    known = replace(evidence(given), devices={small.name: small})
    assert {one.rule for one in check(DeploymentMap.model_validate(content), known)} == {"memory"}


@pytest.mark.parametrize("policy", _POLICIES)
def test_a_wrong_time_of_any_smaller_batch_is_noticed(policy: str) -> None:
    given, content = _plan(policy, None)
    changes = 0
    for number, replica in enumerate(_replicas(content)):
        for size in range(len(replica["batch_latency_ms"]) - 1):
            for factor in (0.5, 0.9, 0.995, 1.005, 1.1, 2.0):
                changed = json.loads(json.dumps(content))
                _replicas(changed)[number]["batch_latency_ms"][size] *= factor
                assert _find_wrong(given, changed), f"{replica['model']} at {size + 1}: {factor}"
                changes += 1
    assert changes > 0
