"""Shares of GPUs that NVML is made to show, under daemons that are played."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuprof.domain.map_file import parse_map
from gpuprof.machine.gpu import LocalGpu
from gpuprof.machine.mps import MpsDaemon
from gpuprof.serving.machine import machine, orders
from gpuprof.serving.machine.machine import GpuHolder
from gpuprof.serving.machine.orders import GpuShare, WorkerOrder, needs_mps
from gpuprof.serving.plan import serving_plan
from tests.reruns import serves_in_real_time
from tests.serving.running import map_of, replica

pytestmark = serves_in_real_time


def test_workers_of_one_gpu_share_a_daemon_that_ends_with_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    running: list[str] = []
    ended: list[str] = []
    states: list[dict[str, Any]] = []

    @contextmanager
    def play_daemon(uuid: str) -> Iterator[MpsDaemon]:
        running.append(uuid)
        yield MpsDaemon(f"/pipes/{uuid}")
        ended.append(uuid)

    monkeypatch.setattr(machine, "mps_daemon", play_daemon)
    shares = [_order(uuid, with_mps) for uuid, with_mps in (("a", True), ("a", True), ("b", True), ("c", False))]

    async def bind() -> list[dict[str, str]]:
        holder = GpuHolder(lambda: states.append(holder.describe_takeover_state()))
        bound = await asyncio.gather(*(holder.bind(order) for order in shares))
        await holder.close()
        return bound

    pipes = [environment.get("CUDA_MPS_PIPE_DIRECTORY") for environment in asyncio.run(bind())]
    assert pipes == ["/pipes/a", "/pipes/a", "/pipes/b", None]
    assert sorted(running) == sorted(ended) == ["a", "b"]
    assert states[-1]["daemons"] == {"a": ["/pipes/a", None], "b": ["/pipes/b", None]}


def _order(uuid: str, with_mps: bool) -> WorkerOrder:
    return WorkerOrder("m", "1", "m.onnx", 1, gpu=GpuShare(uuid, 50.0), with_mps=with_mps)


def test_one_process_that_has_everything_needs_no_mps() -> None:
    assert not needs_mps([100.0])
    assert needs_mps([50.0]) and needs_mps([100.0, 100.0])


def test_the_replicas_of_a_gpu_are_ordered_with_their_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "list_local_gpus", lambda: (LocalGpu(0, "h100", "GPU-1"),))
    document = map_of({"m": "null:4"}, [replica("m", sm_share_pct=60.0, processes=2, memory_limit_bytes=1 << 30)])
    document["nodes"][0]["gpus"][0]["device"] = "h100"
    (planned,) = serving_plan.Planner("g").plan(serving_plan.MapSource(parse_map(document, "test"), Path()))
    assert [order.gpu for order in planned.orders] == [GpuShare("GPU-1", 30.0, 1 << 30)] * 2
    assert all(order.with_mps and order.provider == "CUDAExecutionProvider" for order in planned.orders)


def test_replicas_of_an_unshared_gpu_are_sent_to_mps_without_a_percentage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "list_local_gpus", lambda: (LocalGpu(0, "h100", "GPU-1"),))
    document = map_of({"a": "null:4", "b": "null:4"}, [replica("a", memory_limit_bytes=1 << 30), replica("b")])
    document["nodes"][0]["gpus"][0]["device"] = "h100"
    document["nodes"][0]["gpus"][0]["partitions"][0]["unshared"] = True
    planned = serving_plan.Planner("g", shadow_pct=10.0).plan(
        serving_plan.MapSource(parse_map(document, "test"), Path())
    )
    shares = [order for plan in planned for order in plan.orders]
    assert all(order.with_mps and order.gpu is not None for order in shares)
    assert [order.gpu.environment(MpsDaemon("/pipes")) for order in shares if order.gpu is not None] == [
        {
            "CUDA_VISIBLE_DEVICES": "GPU-1",
            "CUDA_MPS_PIPE_DIRECTORY": "/pipes",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1024M",
        },
        {"CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_MPS_PIPE_DIRECTORY": "/pipes"},
    ]
    assert [plan.standby for plan in planned] == [None, None]  # nothing is left to give a standby more of
