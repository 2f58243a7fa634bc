from __future__ import annotations

import json

import pytest

from gpuprof.domain.deployment import DeploymentMap, PlanAtEnds, parse_map
from gpuprof.domain.map_sources import SourcePart, describe_basis, describe_bounds, describe_sources, split_by_source
from gpuprof.placement.contract import demand, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import make_policy

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


def with_ends(
    deployment: DeploymentMap, lower: PlanAtEnds | None, upper: PlanAtEnds | None, bound: int | None = None
) -> DeploymentMap:
    said = {"at_lower_ends": lower, "at_upper_ends": upper, "lower_bound_gpus": bound}
    return deployment.model_copy(update={"predicted": deployment.predicted.model_copy(update=said)})


def test_a_map_says_which_models_were_measured_and_what_other_ends_would_take() -> None:
    half = with_sources("extrapolated", "roofline, uncalibrated")
    unknown = "; what it comes to at the ends of the estimates' intervals was not computed"
    assert describe_basis(half) == f"1 of 2 models measured on plain{unknown}"
    same = PlanAtEnds(gpus=half.predicted.gpus, served_rps=40.0)
    assert describe_basis(with_ends(half, same, same)) == "1 of 2 models measured on plain"
    six = PlanAtEnds(gpus=6, served_rps=40.0)
    text = "at the lower ends of the estimates 1 device, at the upper ends 6 devices"
    assert describe_basis(with_ends(half, same, six)) == f"1 of 2 models measured on plain; {text}"
    assert describe_basis(with_sources("measured", "measured")) == ""
    part = PlanAtEnds(gpus=1, served_rps=30.0)
    text = "at the lower ends of the estimates not computed, at the upper ends 1 device for 30 of 40 requests/s"
    assert describe_basis(with_ends(with_sources("measured", "measured"), None, part)) == text


def test_a_bound_stands_beside_those_at_the_ends_where_they_differ() -> None:
    measured = with_sources("measured", "measured")
    assert describe_bounds(measured) == ""
    same = PlanAtEnds(gpus=4, served_rps=40.0, lower_bound_gpus=4)
    text = "at least 4 needed by any map by these estimates"
    assert describe_bounds(with_ends(measured, None, same, 4)) == text
    fewer, more = (PlanAtEnds(served_rps=40.0, lower_bound_gpus=count) for count in (3, 5))
    assert (
        describe_bounds(with_ends(measured, fewer, more, 4)) == f"{text} (3 at their lower ends, 5 at their upper ends)"
    )


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
