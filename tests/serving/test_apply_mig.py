"""MIG instances that are made for a map and given back, by a machine process that may be replaced meanwhile."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpuprof.domain.deployment import parse_map
from gpuprof.errors import InputError, UnavailableError
from gpuprof.machine.gpu import LocalGpu, LocalMigInstance
from gpuprof.serving.machine.machine import GpuHolder
from gpuprof.serving.machine.orders import MachineParts
from gpuprof.serving.plan.serving_plan import MapSource, Planner
from tests.machine.test_gpu_share import Smi
from tests.reruns import serves_in_real_time
from tests.serving.running import map_of, replica, running

pytestmark = serves_in_real_time


def mig_map(*instances: tuple[str, int]) -> dict[str, Any]:
    document = map_of({"m": "null:4"}, [])
    partitions = [
        {"mig": {"profile": profile, "start": start}, "replicas": [replica("m", sm_share_pct=100.0)]}
        for profile, start in instances
    ]
    document["nodes"][0]["gpus"] = [{"index": 1, "device": "a100-80", "partitions": partitions}]
    return document


def source_of(document: dict[str, Any]) -> MapSource:
    return MapSource(parse_map(document, "test"), Path())


def test_instances_are_wanted_only_when_that_is_asked_for() -> None:
    source = source_of(mig_map(("3g.40gb", 4), ("4g.40gb", 0)))
    assert Planner("g").nodes(source) == {}
    assert Planner("g", apply_mig=True).nodes(source) == {"n": {"1": [("3g.40gb", 4), ("4g.40gb", 0)]}}
    assert Planner("g", apply_mig=True, simulated=True).nodes(source) == {}
    two = mig_map(("3g.40gb", 4))
    two["nodes"].append({**two["nodes"][0], "name": "other"})
    with pytest.raises(InputError, match="--node"):
        Planner("g", apply_mig=True).nodes(source_of(two))
    assert list(Planner("g", node="other", apply_mig=True).nodes(source_of(two))) == ["other"]


def test_workers_are_planned_on_the_instances_that_were_made() -> None:
    parts = MachineParts((0,), (LocalGpu(1, "a100-80", "GPU-1", (LocalMigInstance("3g.40gb", 4, "MIG-new"),)),))
    (planned,) = Planner("g", apply_mig=True).plan(source_of(mig_map(("3g.40gb", 4))), {"n": parts})
    assert planned.orders[0].gpu is not None
    assert planned.orders[0].gpu.uuid == "MIG-new"


def test_a_successor_gives_back_what_a_machine_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = Smi(tmp_path, ("Disabled", []), ("Enabled", [["7g.80gb", 0]]))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    async def scene() -> None:
        states: list[dict[str, Any]] = []
        first = GpuHolder(lambda: states.append(json.loads(json.dumps(first.describe_takeover_state()))))
        await first.apply_layouts({"1": [["3g.40gb", 4], ["4g.40gb", 0]]})
        assert smi.gpu(1)["instances"] == [["4g.40gb", 0], ["3g.40gb", 4]]
        second = GpuHolder(lambda: None)  # the first was killed
        second.restore(states[-1])
        await second.apply_layouts({"1": [["4g.40gb", 0], ["3g.40gb", 4]]})  # they are there: nothing to do
        await second.close()

    asyncio.run(scene())
    assert smi.gpu(1)["instances"] == [["7g.80gb", 0]]
    assert smi.gpu(0) == {"mode": "Disabled", "instances": []}


def test_without_permission_the_server_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = Smi(tmp_path, ("Enabled", []), ("Enabled", []))
    smi.write(root=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with (
        pytest.raises(AssertionError, match=r"Insufficient Permissions .MIG instances are root's to make"),
        running(tmp_path, mig_map(("3g.40gb", 4)), "--apply-mig"),
    ):
        pass


def test_a_driver_that_refuses_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = Smi(tmp_path, ("Enabled", []), ("Enabled", []))
    smi.write(refused=["3g.40gb"])
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    holder = GpuHolder(lambda: None)
    with pytest.raises(UnavailableError, match="Insufficient Resources"):
        asyncio.run(holder.apply_layouts({"1": [["4g.40gb", 0], ["3g.40gb", 4]]}))
    assert holder.describe_takeover_state()["mig"] == []
    assert smi.gpu(1)["instances"] == []
