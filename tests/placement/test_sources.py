from __future__ import annotations

import json

import pytest

from gpuprof.domain.deployment import DeploymentMap, parse_map
from gpuprof.placement.contract import demand, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.sources import SourcePart, describe_sources, split_by_source

GIVEN = problem([demand("a", 30.0), demand("b", 10.0)])
PLACED = make_policy("ffd").place(GIVEN)


def with_sources(*sources: str) -> DeploymentMap:
    content = json.loads(to_map(GIVEN, PLACED).to_json())
    replicas = [r for n in content["nodes"] for g in n["gpus"] for p in g["partitions"] for r in p["replicas"]]
    for replica, source in zip(sorted(replicas, key=lambda one: one["model"]), sources, strict=True):
        replica["predicted"]["source"] = source
    return parse_map(content, "map")


def test_a_map_says_what_part_of_it_is_measured() -> None:
    assert split_by_source(with_sources("measured", "roofline, uncalibrated")) == (
        SourcePart("measured", 1, 30.0),
        SourcePart("predicted", 1, 10.0),
    )
    assert describe_sources(with_sources("extrapolated", "sum, interpolated")) == (
        "1 replica (25% of the requests) interpolated; 1 replica (75% of the requests) extrapolated"
    )
    assert describe_sources(to_map(GIVEN, Placement("nobody", ()))) == ""


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"lower_bound_gpus": 1, "lower_bound_cost_per_hour": 1.0, "upper_bound_goodput_rps": 40.0}, True),
        ({"lower_bound_gpus": 9, "lower_bound_cost_per_hour": 9.0, "upper_bound_goodput_rps": 39.0}, False),
    ],
)
def test_a_bound_that_the_map_itself_refutes_is_not_printed(bounds: dict[str, float], kept: bool) -> None:
    refuted = Placement("any", PLACED.gpus, **bounds)  # type: ignore[arg-type]
    said = to_map(GIVEN, refuted).predicted
    assert [getattr(said, name) for name in bounds] == (list(bounds.values()) if kept else [None] * 3)
