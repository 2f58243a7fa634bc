"""What a map says that it was planned with, and the maps that said it otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.map_file import parse_map, read_map
from gpuprof.domain.planned_with import PlannedDevices, PlannedWith, RecordedHostWork
from gpuprof.errors import InputError
from gpuprof.rules.host_work import HostWork, host_work_of_plan

#: As `place --gpus v100:2 --confidence 0.9 --max-batch 4 --max-processes 2` wrote it when maps had ``inputs``.
OLD = Path(__file__).with_name("map_of_0_1_0.json")


def test_an_older_map_is_read_with_all_that_it_was_planned_with() -> None:
    inputs = json.loads(OLD.read_text())["inputs"]
    assert read_map(OLD).planned_with == PlannedWith(
        fleet=(PlannedDevices(device="v100", count=2),),
        confidence=0.9,
        overhead_ms=0.3,
        max_batch=4,
        max_processes=2,
        host=RecordedHostWork(handover_ms=0.2),
        slo_sha256=inputs["slo_sha256"],
        database_sha256=inputs["database_sha256"],
        found_by="rooms",
    )


def test_an_older_map_is_written_as_they_are_now_and_read_the_same() -> None:
    old = read_map(OLD)
    content = json.loads(old.to_json())
    assert "inputs" not in content
    assert content["planned_with"]["fleet"] == [{"device": "v100", "count": 2}]
    assert "stopped_by" not in content["planned_with"]
    assert parse_map(content, "it") == old


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"confidence": "much"}, "confidence must be a number but is 'much'"),
        ({"confidence": "1.5"}, "confidence"),
        ({"latency_budget": "0.0"}, "latency_budget"),
        ({"max_batch": "inf"}, "max_batch must be a number"),
        ({"fleet": "v100:none"}, "name or name:count but has 'v100:none'"),
        ({"fleet": 3}, "inputs must be texts by name"),
    ],
)
def test_an_older_map_that_records_nonsense_is_refused(inputs: dict[str, object], message: str) -> None:
    content = json.loads(OLD.read_text()) | {"inputs": inputs}
    with pytest.raises(InputError, match=message):
        parse_map(content, "it")


@pytest.mark.parametrize("name", ["handover_ms", "host_ms", "host_cores", "host_ms_busy", "overhead_ms"])
@pytest.mark.parametrize("text", ["-1", "nan", "inf", "much"])
def test_a_cost_of_serving_that_is_none_is_refused_as_text_and_as_number(name: str, text: str) -> None:
    content = json.loads(OLD.read_text())
    with pytest.raises(InputError, match=name):
        parse_map(content | {"inputs": {name: text}}, "it")
    del content["inputs"]
    settings = {name: text} if name == "overhead_ms" else {"host": {name: text}}
    with pytest.raises(InputError, match=name):
        parse_map(content | {"planned_with": settings}, "it")


def test_a_map_has_what_it_was_planned_with_once() -> None:
    content = json.loads(OLD.read_text()) | {"planned_with": {}}
    with pytest.raises(InputError, match="a map has one of them"):
        parse_map(content, "it")


def test_a_newer_kind_of_settings_is_refused() -> None:
    content = json.loads(OLD.read_text())
    del content["inputs"]
    with pytest.raises(InputError, match=r"planned_with\.version"):
        parse_map(content | {"planned_with": {"version": 2}}, "it")


def test_names_that_nobody_knows_are_left_out_of_older_maps() -> None:
    content = json.loads(OLD.read_text()) | {"inputs": {"comment": "by hand"}}
    assert parse_map(content, "it").planned_with == PlannedWith()


def test_what_serving_costs_is_what_was_recorded() -> None:
    host = RecordedHostWork(handover_ms=0.2, host_ms=1.0, host_cores=2, host_ms_busy=0.5)
    assert host_work_of_plan(PlannedWith(host=host)) == HostWork(0.2, 1.0, 2, 0.5)
    assert host_work_of_plan(PlannedWith()) == HostWork()


def test_a_map_without_settings_says_the_defaults() -> None:
    content = json.loads(OLD.read_text())
    del content["inputs"]
    assert DeploymentMap.model_validate(content).planned_with == PlannedWith()
