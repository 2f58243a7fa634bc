"""Maps edited at random into nonsense: `check` finds what is wrong, and never fails itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.map_file import parse_map
from gpuprof.errors import InputError
from gpuprof.placement.contract import demand, evidence, plain_device, problem, sliced_device
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import Violation, check
from gpuprof.placement.problem import Options
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.published.parvagpu import ParvaGpu

MIG = problem(
    [demand(f"m{i}", 150.0 + 120.0 * i, 60.0 + 20.0 * i) for i in range(5)],
    [(sliced_device(), None)],
    options=Options(latency_budget=0.5),
)
SHARED = problem([demand(f"m{i}", 20.0 + 10.0 * i, 80.0) for i in range(5)], [(plain_device(), None)])
MAPS = {
    "mig": (MIG, to_map(MIG, ParvaGpu().place(MIG))),
    "shared": (SHARED, to_map(SHARED, FirstFitDecreasing().place(SHARED))),
}

Edit = Callable[[dict[str, Any]], None]


def check_edited(kind: str, edit: Edit) -> tuple[Violation, ...]:
    posed, drawn = MAPS[kind]
    content = json.loads(drawn.to_json())
    edit(content)
    return check(DeploymentMap.model_validate(content), evidence(posed))


def places(content: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (device, partition) of the map."""
    return [(gpu, part) for node in content["nodes"] for gpu in node["gpus"] for part in gpu["partitions"]]


@pytest.mark.parametrize("kind", sorted(MAPS))
def test_the_maps_are_sound_before_they_are_edited(kind: str) -> None:
    assert check_edited(kind, lambda content: None) == ()


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**19),
    st.floats(),
    st.sampled_from(["", "m0", "sliced", "nowhere", "1g.10gb", "9g.99gb"]),
    st.just([]),
    st.just({}),
)


def _paths(content: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    steps = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [at, *(path for key, value in steps for path in _paths(value, (*at, key)))]


def _replace_at(content: Any, path: tuple[Any, ...], value: Any) -> None:
    for step in path[:-1]:
        content = content[step]
    content[path[-1]] = value


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(MAPS)), st.data())
def test_whatever_is_written_anywhere_is_refused_or_checked(kind: str, data: st.DataObject) -> None:
    posed, drawn = MAPS[kind]
    content = json.loads(drawn.to_json())
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(_paths(content)[1:]))
        _replace_at(content, path, data.draw(VALUES))
    try:
        read = parse_map(content, "the map")
    except InputError:
        return  # a clear line, and no map
    for violation in check(read, evidence(posed)):
        assert violation.rule
        assert violation.message


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.5, 100.0))
def test_every_device_that_is_given_out_more_than_once_is_found(pick: int, extra: float) -> None:
    def edit(content: dict[str, Any]) -> None:
        _, part = places(content)[pick % len(places(content))]
        taken = sum(replica["sm_share_pct"] for replica in part["replicas"])
        part["replicas"].append({**part["replicas"][0], "sm_share_pct": min(100.0, 100.0 - taken + extra)})

    assert "share" in {violation.rule for violation in check_edited("shared", edit)}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12))
def test_every_start_that_the_driver_refuses_and_every_overlap_is_found(pick: int, start: int) -> None:
    device = sliced_device()
    outcome: dict[str, bool] = {}

    def edit(content: dict[str, Any]) -> None:
        gpu, part = places(content)[pick % len(places(content))]
        part["mig"]["start"] = start
        profile = device.mig_profile(part["mig"]["profile"])
        slots = [
            slot
            for partition in gpu["partitions"]
            for slot in range(
                partition["mig"]["start"],
                partition["mig"]["start"] + device.mig_profile(partition["mig"]["profile"]).memory_slices,
            )
        ]
        outcome["wrong"] = start not in profile.start_slots or len(set(slots)) < len(slots)

    violations = check_edited("mig", edit)
    assert ("geometry" in {violation.rule for violation in violations}) is outcome["wrong"]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(MAPS)), st.integers(0, 10**6))
def test_every_demand_that_lost_a_replica_is_found(kind: str, pick: int) -> None:
    lost: list[str] = []

    def edit(content: dict[str, Any]) -> None:
        _, part = places(content)[pick % len(places(content))]
        lost.append(part["replicas"].pop()["model"])

    violations = check_edited(kind, edit)
    assert any(violation.rule == "rate" and violation.where == lost[0] for violation in violations)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("field", "value"), [("batch", 2**16), ("batch", 4097), ("sm_share_pct", 5e-324)])
def test_numbers_beyond_all_measure_are_found_and_not_computed_with(field: str, value: float, alone: bool) -> None:
    posed, drawn = MAPS["shared"]
    content = json.loads(drawn.to_json())
    replica = places(content)[0][1]["replicas"][0]
    replica.update({field: value, "batch_latency_ms": None})
    against = replace(evidence(posed), estimator=None) if alone else evidence(posed)
    assert check(DeploymentMap.model_validate(content), against)


@pytest.mark.parametrize("batch", [0, 2**16 + 1, 10**19])
def test_batches_that_nobody_means_are_refused_by_the_reader(batch: int) -> None:
    content = json.loads(MAPS["shared"][1].to_json())
    places(content)[0][1]["replicas"][0]["batch"] = batch
    with pytest.raises(InputError, match="batch"):
        parse_map(content, "the map")


@pytest.mark.parametrize("share", [0.0, -5.0, 100.1, float("nan"), float("inf")])
def test_shares_out_of_range_are_refused_by_the_reader(share: float) -> None:
    content = json.loads(MAPS["shared"][1].to_json())
    places(content)[0][1]["replicas"][0]["sm_share_pct"] = share
    with pytest.raises(InputError, match="sm_share_pct"):
        parse_map(content, "the map")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(1.5, 1e6))
def test_every_replica_that_is_asked_for_more_than_it_serves_is_found(pick: int, factor: float) -> None:
    def edit(content: dict[str, Any]) -> None:
        _, part = places(content)[pick % len(places(content))]
        replica = part["replicas"][0]
        replica["rate_rps"] = max(replica["rate_rps"], replica["predicted"]["throughput_rps"]) * factor

    assert {violation.rule for violation in check_edited("mig", edit)} & {"rate", "slo"}
