"""One figure of a map is changed: what makes the plan wrong is noticed without the estimator that planned it, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.errors import InputError
from gpuprof.placement.contract import demand, evidence, plain_device, problem, sliced_device
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem
from tests.placement.curved import CurvedEstimator

_FACTORS = (0.1, 0.5, 0.8, 0.95, 1.05, 1.2, 2.0, 10.0)
_REPLICA = ("batch", "processes", "sm_share_pct", "memory_limit_bytes", "rate_rps", "turn_ms")
#: The memory that a replica is said to hold is not among them where it has a limit, which is what it counts with.
_PREDICTED = ("latency_ms", "throughput_rps", "overlapped_ms")
_MODEL = ("rate_rps", "slo_ms", "percentile")

Path = tuple[str | int, ...]


def _pose(budget: float | None, *, mig: bool) -> Problem:
    device = sliced_device() if mig else plain_device()
    asked = [demand(f"m{i}", 20.0 + 35.0 * i, 60.0 + 25.0 * i) for i in range(4)]
    estimator = CurvedEstimator(disturbance=0.0 if mig else 0.05)
    return problem(asked, [(device, None)], estimator, Options(latency_budget=budget))  # type: ignore[arg-type]


def _plan(policy: str, budget: float | None) -> tuple[Problem, dict[str, Any]]:
    given = _pose(budget, mig=policy in ("parvagpu", "mig-serving"))
    options = {"temporal": "true"} if policy == "gpulet" else {}
    deployment = to_map(given, make_policy(policy, options).place(given))
    assert check(deployment, evidence(given)) == ()
    assert check(deployment, replace(evidence(given), estimator=None)) == ()
    return given, json.loads(deployment.to_json())


PLANS = {
    (policy, budget): _plan(policy, budget)
    for budget in (None, 0.5)
    for policy in ("ffd", "gpulet", "igniter", "parvagpu", "optimal")
}


def _figures(content: dict[str, Any]) -> Iterator[Path]:
    """Yield where each figure that a plan stands on is."""
    for n, node in enumerate(content["nodes"]):
        for g, gpu in enumerate(node["gpus"]):
            for p, part in enumerate(gpu["partitions"]):
                for r, replica in enumerate(part["replicas"]):
                    at: Path = ("nodes", n, "gpus", g, "partitions", p, "replicas", r)
                    yield from ((*at, name) for name in _REPLICA if replica.get(name) is not None)
                    yield from ((*at, "predicted", name) for name in _PREDICTED if replica["predicted"].get(name))
                    # Of smaller batches a wrong time moves the percentiles by less than queues are held to.
                    yield from (
                        (*at, "batch_latency_ms", i) for i in range(len(replica["batch_latency_ms"] or ()))[-1:]
                    )
    for model in content["models"]:
        yield from (("models", model, name) for name in _MODEL)


def _change(content: dict[str, Any], where: Path, to: float) -> DeploymentMap | None:
    """Return the map with another value somewhere, None where the schema refuses it."""
    copy = json.loads(json.dumps(content))
    holder = copy
    for step in where[:-1]:
        holder = holder[step]
    holder[where[-1]] = to
    try:
        return DeploymentMap.model_validate(copy)
    except (InputError, ValueError):
        return None


def _value(content: Any, where: Path) -> Any:
    for step in where:
        content = content[step]
    return content


@pytest.mark.parametrize("plan", sorted(PLANS, key=str), ids=str)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_the_estimator_finds_wrong_is_found_without_it(
    plan: tuple[str, float | None], data: st.DataObject
) -> None:
    given, content = PLANS[plan]
    where = data.draw(st.sampled_from(list(_figures(content))))
    factor = data.draw(st.sampled_from(_FACTORS))
    before = _value(content, where)
    to = before * factor
    if isinstance(before, int):
        to = data.draw(st.sampled_from([before - 1, before + 1, round(to)]))
    changed = _change(content, where, to)
    if changed is None or to == before:
        return
    known = evidence(given)
    wrong = check(changed, known)
    noticed = check(changed, replace(known, estimator=None))
    if wrong:
        assert noticed, f"{where}: {before} → {to}: {wrong[0]}"


@pytest.mark.parametrize("plan", [one for one in sorted(PLANS, key=str) if one[1]], ids=str)
@pytest.mark.parametrize("name", ["batch", "latency_ms", "latency_ms longer", "throughput_rps"])
def test_with_a_latency_budget_a_batch_less_and_a_longer_time_are_noticed(
    plan: tuple[str, float | None], name: str
) -> None:
    given, content = PLANS[plan]
    for where in _figures(content):
        if where[-1] != name.split()[0]:
            continue
        before = _value(content, where)
        to = before - 1 if name == "batch" else before * (1.2 if "longer" in name else 0.9)
        changed = _change(content, where, to)
        if changed is not None:
            assert check(changed, replace(evidence(given), estimator=None)), f"{where}: {before} → {to}"
