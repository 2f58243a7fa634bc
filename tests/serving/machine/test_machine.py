"""The machine process: what must hold when it, or the whole of it, is killed."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import psutil

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


def test_when_machine_and_worker_are_killed_at_once_the_accepted_are_answered_by_those_that_follow(
    tmp_path: Path,
) -> None:
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
