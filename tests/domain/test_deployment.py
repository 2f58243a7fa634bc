import json
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest

from gpuprof.domain.catalogue import datasets
from gpuprof.domain.deployment import (
    DeploymentMap,
    PlanAtEnds,
    PlannedDevices,
    PlannedWith,
    json_schema,
    parse_map,
    read_map,
    write_map,
)
from gpuprof.domain.map_sources import (
    SourcePart,
    describe_basis,
    describe_sources,
    record_basis,
    split_by_source,
    summarize_map,
)
from gpuprof.errors import InputError
from gpuprof.placement.contract import demand, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.published.ffd import FirstFitDecreasing


def document() -> dict[str, Any]:
    predicted = {"latency_ms": 5.0, "throughput_rps": 1600.0, "goodput_rps": 400.0, "p99_ms": 21.0}
    replica = {"model": "resnet50", "batch": 8, "sm_share_pct": 30.0, "rate_rps": 400.0, "predicted": predicted}
    partition = {"mig": {"profile": "3g.40gb", "start": 4}, "replicas": [replica]}
    return {
        "schema": "gpuprof.deployment/1",
        "policy": "ffd",
        "models": {"resnet50": {"path": "resnet50.onnx", "rate_rps": 400, "slo_ms": 40}},
        "nodes": [{"name": "node0", "gpus": [{"index": 0, "device": "a100-80", "partitions": [partition]}]}],
        "predicted": {"gpus": 1, "goodput_rps": 400.0},
    }


def test_a_map_survives_being_written_and_read(tmp_path: Path) -> None:
    deployment = parse_map(document(), "here")
    write_map(deployment, tmp_path / "map.json")
    assert read_map(tmp_path / "map.json") == deployment
    (tmp_path / "map.json").write_text((tmp_path / "map.json").read_text(), encoding="utf-8-sig")  # as PowerShell does
    assert read_map(tmp_path / "map.json") == deployment
    assert [path.name for path in tmp_path.iterdir()] == ["map.json"]


def _broken(path: list[str | int], value: object) -> dict[str, Any]:
    content = document()
    place: Any = content
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return content


REPLICA: list[str | int] = ["nodes", 0, "gpus", 0, "partitions", 0, "replicas", 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "has no schema"),
        ({}, "has no schema"),
        (_broken(["schema"], "gpuprof.deployment/2"), "newer than gpuprof.deployment/1 .update gpuprof"),
        (_broken(["schema"], "other/1"), "its schema is 'other/1'"),
        (_broken(["color"], 1), "color: Extra inputs"),
        (_broken([*REPLICA, "sm_share_pct"], -1), "replicas.0.sm_share_pct"),
        (_broken([*REPLICA, "sm_share_pct"], 101), "replicas.0.sm_share_pct"),
        (_broken([*REPLICA, "batch"], 0), "replicas.0.batch"),
        (_broken([*REPLICA, "processes"], 0), "replicas.0.processes"),
        (_broken([*REPLICA, "rate_rps"], float("nan")), "replicas.0.rate_rps"),
        (_broken(["models", "resnet50", "slo_ms"], 0), "models.resnet50.slo_ms"),
        (_broken(["planned_with"], {"version": 2}), r"planned_with\.version"),
        (_broken(["planned_with"], {"overhead_ms": "1"}), r"planned_with\.overhead_ms"),
        (_broken(["planned_with"], {"host": {"handover_ms": -1}}), r"planned_with\.host\.handover_ms"),
        (_broken(["planned_with"], {"host": {"host_ms_busy": float("inf")}}), r"planned_with\.host\.host_ms_busy"),
    ],
)
def test_a_wrong_map_is_refused_with_the_place_of_the_error(content: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_map(content, "map.json")


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"schema": ')
    with pytest.raises(InputError, match="not JSON"):
        read_map(tmp_path / "map.json")


def test_nothing_is_left_behind_when_a_map_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "map.json").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        write_map(parse_map(document(), "here"), tmp_path / "map.json")
    assert [path.name for path in tmp_path.iterdir()] == ["map.json"]
    with pytest.raises(InputError, match="cannot write"):
        write_map(parse_map(document(), "here"), tmp_path / "nowhere" / "map.json")


MAP = {
    "schema": "gpuprof.deployment/1",
    "policy": "p",
    "models": {},
    "nodes": [],
    "predicted": {"gpus": 0, "cost_per_hour": 0.0, "goodput_rps": 0.0},
}


def test_a_map_with_settings_is_written_and_read_the_same() -> None:
    settings = PlannedWith(fleet=(PlannedDevices(device="v100", count=2),), confidence=0.9, max_processes=2)
    placed = parse_map(MAP | {"planned_with": json.loads(settings.model_dump_json())}, "it")
    content = json.loads(placed.to_json())
    assert content["planned_with"]["fleet"] == [{"device": "v100", "count": 2}]
    assert "stopped_by" not in content["planned_with"]
    assert parse_map(content, "it") == placed


PUBLISHED = json.loads((datasets() / "deployment.schema.json").read_text(encoding="utf-8"))


@pytest.mark.skipif(pydantic.VERSION < "2.14", reason="older versions of pydantic word the schema differently")
def test_the_published_schema_is_that_of_the_code() -> None:
    assert json_schema() == PUBLISHED


def test_a_map_obeys_the_published_schema_and_an_edited_one_does_not() -> None:
    given = problem([demand("m")])
    content = json.loads(to_map(given, FirstFitDecreasing().place(given)).to_json())
    validator = jsonschema.Draft202012Validator(PUBLISHED)
    validator.validate(content)
    content["nodes"][0]["gpus"][0]["partitions"][0]["replicas"][0]["sm_share_pct"] = 101
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(content)


GIVEN = problem([demand("a", 30.0), demand("b", 10.0)])
PLACED = make_policy("ffd").place(GIVEN)


def with_sources(*sources: str) -> DeploymentMap:
    content = json.loads(to_map(GIVEN, PLACED).to_json())
    replicas = [r for n in content["nodes"] for g in n["gpus"] for p in g["partitions"] for r in p["replicas"]]
    for replica, source in zip(sorted(replicas, key=lambda violation: violation["model"]), sources, strict=True):
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
    empty = to_map(GIVEN, Placement("nobody", ()))
    assert describe_sources(empty) == "" and summarize_map(empty).startswith("No devices")


def with_ends(
    deployment: DeploymentMap, lower: PlanAtEnds | None, upper: PlanAtEnds | None, bound: int | None = None
) -> DeploymentMap:
    changes = {"at_lower_ends": lower, "at_upper_ends": upper, "lower_bound_gpus": bound}
    return deployment.model_copy(update={"predicted": deployment.predicted.model_copy(update=changes)})


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


def test_models_measured_alone_are_not_called_unmeasured_beside_others() -> None:
    both = with_sources("measured × linear", "interpolated × traffic, beyond what was co-located")
    assert (
        describe_sources(both) == "2 replicas (100% of the requests) measured alone, predicted beside their neighbours"
    )
    assert "measured on plain" not in describe_basis(both)
    deployment = with_sources("measured × linear", "roofline, uncalibrated")
    assert describe_sources(deployment) == "2 replicas (100% of the requests) predicted"
    assert "1 of 2 models measured on plain" in describe_basis(deployment)


def test_programs_get_what_a_map_rests_on_and_both_ends() -> None:
    half = with_sources("measured", "roofline, uncalibrated")
    lower, upper = (PlanAtEnds(gpus=count, served_rps=40.0, lower_bound_gpus=count) for count in (1, 6))
    record = record_basis(with_ends(half, lower, upper))
    assert record["sources"] == [
        {"kind": "measured", "replicas": 1, "rate_rps": 30.0, "part": 0.75},
        {"kind": "predicted", "replicas": 1, "rate_rps": 10.0, "part": 0.25},
    ]
    assert record["measured_models"] == {"plain": {"measured": 1, "models": 2}}
    assert (record["at_lower_ends"], record["at_upper_ends"]) == (lower.model_dump(), upper.model_dump())
    assert "1 of 2 models measured on plain; at the lower ends" in str(record["text"])
    assert record_basis(half)["at_upper_ends"] is None


def with_prediction(deployment: DeploymentMap, **fields: object) -> DeploymentMap:
    return deployment.model_copy(update={"predicted": deployment.predicted.model_copy(update=fields)})


def test_a_map_is_summed_up_in_a_few_sentences() -> None:
    figures = {"cost_per_hour": 3.4309, "internal_slack": 0.13, "external_fragmentation": 0.63, "goodput_rps": 40.0}
    measured = with_prediction(with_sources("measured", "interpolated"), **figures, lower_bound_gpus=1, moves=1)
    unused = "Unused: 13% of allocated shares; 63% of the GPU unallocated."
    summary = f"1 × plain ($3.43/h), proven minimum. 40 of 40 requests/s within SLO. {unused} Replicas to move: 1 of 2."
    assert summarize_map(measured) == summary
    guessed = with_prediction(with_sources("measured", "roofline"), **figures, lower_bound_gpus=1)
    assert summarize_map(guessed).startswith("1 × plain ($3.43/h), minimum by these estimates. 40 of 40")


def test_a_bound_below_the_map_stands_beside_those_at_the_ends_where_they_differ() -> None:
    measured = with_prediction(with_sources("measured", "measured"), gpus=4, cost_per_hour=None)
    assert summarize_map(measured).startswith("1 × plain. ")
    same = PlanAtEnds(gpus=4, served_rps=40.0, lower_bound_gpus=3)
    assert summarize_map(with_ends(measured, None, same, 3)).startswith("1 × plain, at least 3 needed. ")
    fewer, more = (PlanAtEnds(served_rps=40.0, lower_bound_gpus=count) for count in (2, 5))
    words = "1 × plain, at least 3 needed (at least 2 at their lower ends, 5 at their upper ends). "
    assert summarize_map(with_ends(measured, fewer, more, 3)).startswith(words)


@pytest.mark.parametrize(
    ("goodput_rps", "most", "said"),
    [
        (39.996, None, "39.99 of 40.00 requests/s within SLO."),
        (40.0 - 1e-9, 40.0, "40 of 40 requests/s within SLO."),
        (30.0, 35.0, "30 of 40 requests/s within SLO; no map reaches more than 35."),
    ],
)
def test_what_is_missing_is_not_rounded_away(goodput_rps: float, most: float | None, said: str) -> None:
    given = with_sources("measured", "measured")
    assert said in summarize_map(with_prediction(given, goodput_rps=goodput_rps, upper_bound_goodput_rps=most))


def test_one_dear_device_is_no_minimum_where_cheaper_kinds_were_offered() -> None:
    predicted = with_prediction(
        with_sources("measured", "roofline"),
        cost_per_hour=1.86,
        goodput_rps=40.0,
        lower_bound_gpus=1,
        lower_bound_cost_per_hour=0.8,
    )
    offered = (PlannedDevices(device="plain", count=None), PlannedDevices(device="cheap", count=None))
    among = predicted.model_copy(update={"planned_with": predicted.planned_with.model_copy(update={"fleet": offered})})
    assert summarize_map(among).startswith("1 × plain ($1.86/h), at least $0.80/h needed by these estimates.")
