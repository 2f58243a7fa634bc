"""What a map says that it was planned with."""

from __future__ import annotations

import json

import pytest

from gpuprof.domain.deployment import PlannedDevices, PlannedWith, RecordedHostWork
from gpuprof.domain.map_file import parse_map
from gpuprof.errors import InputError
from gpuprof.rules.host_work import HostWork, host_work_of_plan

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
