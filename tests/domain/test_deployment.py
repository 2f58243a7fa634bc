from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpuprof.domain.catalogue import datasets
from gpuprof.domain.deployment import (
    PlannedDevices,
    PlannedWith,
    RecordedHostWork,
    json_schema,
    parse_map,
    read_map,
    share_of,
    write_map,
)
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.contract import demand, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.rules.host_work import HostWork, host_work_of_plan


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


def test_what_is_written_obeys_the_published_schema(tmp_path: Path) -> None:
    write_map(parse_map(document(), "here"), tmp_path / "map.json")
    jsonschema.validate(json.loads((tmp_path / "map.json").read_text()), json_schema())


def test_every_replica_is_found_with_its_place_and_share() -> None:
    ((node, gpu, partition, replica),) = parse_map(document(), "here").places()
    assert (node.name, gpu.index, replica.model) == ("node0", 0, "resnet50")
    assert share_of(partition, replica) == Share(30.0, "3g.40gb")


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


@pytest.mark.parametrize("name", ["handover_ms", "host_ms", "host_cores", "host_ms_busy", "overhead_ms"])
@pytest.mark.parametrize("text", ["-1", "nan", "inf", "much"])
def test_a_cost_of_serving_that_is_none_is_refused(name: str, text: str) -> None:
    settings = {name: text} if name == "overhead_ms" else {"host": {name: text}}
    with pytest.raises(InputError, match=name):
        parse_map(MAP | {"planned_with": settings}, "it")


def test_a_newer_kind_of_settings_is_refused() -> None:
    with pytest.raises(InputError, match=r"planned_with\.version"):
        parse_map(MAP | {"planned_with": {"version": 2}}, "it")


def test_a_map_with_settings_is_written_and_read_the_same() -> None:
    settings = PlannedWith(fleet=(PlannedDevices(device="v100", count=2),), confidence=0.9, max_processes=2)
    placed = parse_map(MAP | {"planned_with": json.loads(settings.model_dump_json())}, "it")
    content = json.loads(placed.to_json())
    assert content["planned_with"]["fleet"] == [{"device": "v100", "count": 2}]
    assert "stopped_by" not in content["planned_with"]
    assert parse_map(content, "it") == placed


def test_what_serving_costs_is_what_was_recorded() -> None:
    host = RecordedHostWork(handover_ms=0.2, host_ms=1.0, host_cores=2, host_ms_busy=0.5)
    assert host_work_of_plan(PlannedWith(host=host)) == HostWork(0.2, 1.0, 2, 0.5)
    assert host_work_of_plan(PlannedWith()) == HostWork()


def test_a_map_without_settings_says_the_defaults() -> None:
    assert parse_map(MAP, "it").planned_with == PlannedWith()


PUBLISHED = json.loads((datasets() / "deployment.schema.json").read_text(encoding="utf-8"))


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
