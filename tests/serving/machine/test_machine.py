"""The machine process: what must hold when it, or the whole of it, is killed."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuprof.domain.deployment import parse_map
from gpuprof.machine.gpu import LocalGpu
from gpuprof.machine.mps import MpsDaemon
from gpuprof.serving.machine import machine, orders
from gpuprof.serving.machine.machine import GpuHolder
from gpuprof.serving.machine.orders import GpuShare, WorkerOrder, needs_mps
from gpuprof.serving.plan import serving_plan
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, has_ended, map_of, replica, running
from tests.serving.test_reliability import Askers, figure

pytestmark = serves_in_real_time


def machines(server: RunningServer) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(server.process.pid).children()
        if child.status() != psutil.STATUS_ZOMBIE and "gpuprof.serving.machine.machine" in child.cmdline()
    ]


def _has_followed(server: RunningServer, old: psutil.Process) -> bool:
    return any(machine.pid != old.pid for machine in machines(server))


def test_a_killed_machine_loses_no_request_and_its_workers_are_taken_over(tmp_path: Path) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")])) as server:
        (worker,) = server.workers()
        with Askers(server, "m", 4) as askers:
            for _ in range(2):
                (machine,) = machines(server)
                machine.kill()
                assert eventually(partial(_has_followed, server, machine))
                time.sleep(0.3)
        assert askers.wrong == askers.lost == []
        assert set(askers.statuses) == {200}
        assert figure(server, "gpuprof_worker_restarts_total") == 0
        assert worker.is_running()
        worker.kill()  # the new machine keeps what it took over
        assert eventually(lambda: figure(server, "gpuprof_worker_restarts_total") == 1)
        assert eventually(lambda: server.infer("m", [1.0])[0] == 200)
        (restarted,) = server.workers()
        code, _ = server.stop()
        assert code == 0
        assert eventually(lambda: has_ended(restarted))


def test_workers_that_a_dead_machine_left_end_with_the_router(tmp_path: Path) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")])) as server:
        (worker,), (machine,) = server.workers(), machines(server)
        machine.kill()
        server.process.kill()
        assert eventually(lambda: has_ended(worker))


def test_when_machine_and_worker_are_killed_the_accepted_are_answered_by_successors(tmp_path: Path) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m"), replica("m")])) as server:
        with Askers(server, "m", 4) as askers:
            time.sleep(0.2)
            workers = server.workers()
            machines(server)[0].kill()
            workers[0].kill()
            assert eventually(lambda: figure(server, "gpuprof_workers_ready") == 1)
            assert eventually(lambda: figure(server, "gpuprof_workers_ready") == 2)
        assert askers.wrong == askers.lost == []
        assert set(askers.statuses) == {200}


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
