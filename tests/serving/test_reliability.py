"""What must hold when workers die or hang, and when the server is told to stop."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuprof.errors import UnavailableError
from gpuprof.machine.cgroup import quota_parent
from gpuprof.machine.cpu_share import own_cores
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, has_ended, map_of, replica, running

pytestmark = serves_in_real_time


class Askers:
    """Threads that ask for one answer after another, each with a value of its own that comes back, or ``answer``."""

    def __init__(self, server: RunningServer, model: str, count: int, answer: list[float] | None = None) -> None:
        self._answer = answer
        self.statuses: list[int] = []
        self.wrong: list[Any] = []
        self.lost: list[str] = []
        self._server = server
        self._model = model
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(1000 * number,)) for number in range(count)]

    def __enter__(self) -> Askers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, value: int) -> None:
        connection = self._server.client()
        while not self._stop.is_set():
            value += 1
            tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [float(value)]}
            try:
                connection.request("POST", f"/v2/models/{self._model}/infer", json.dumps({"inputs": [tensor]}))
                answer = connection.getresponse()
                text = answer.read()
            except ConnectionRefusedError:
                break  # the server no longer takes connections
            except (OSError, http.client.HTTPException) as error:
                self.lost.append(repr(error))
                break
            self.statuses.append(answer.status)
            if answer.status == 200 and json.loads(text)["outputs"][0]["data"] != (self._answer or [float(value)]):
                self.wrong.append((value, text))
        connection.close()


def figure(server: RunningServer, name: str) -> float:
    text = server.get("/metrics")[1].decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


def has_restarted(server: RunningServer, times: int) -> bool:
    return figure(server, "gpuprof_worker_restarts_total") == times


@pytest.fixture
def two_replicas() -> dict[str, Any]:
    return map_of({"m": "null:4"}, [replica("m"), replica("m")])


@pytest.mark.slow
def test_killed_workers_lose_no_accepted_request_while_another_replica_lives(
    tmp_path: Path, two_replicas: dict[str, Any]
) -> None:
    with running(tmp_path, two_replicas) as server:
        with Askers(server, "m", 6) as askers:
            for kills in range(4):
                assert eventually(lambda: figure(server, "gpuprof_workers_ready") == 2)
                server.workers()[0].kill()
                assert eventually(partial(has_restarted, server, kills + 1))
            assert eventually(lambda: figure(server, "gpuprof_workers_ready") == 2)
        assert askers.wrong == askers.lost == []
        assert len(askers.statuses) > 100
        assert set(askers.statuses) == {200}


def test_without_another_replica_the_accepted_wait_for_the_restart(tmp_path: Path) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")])) as server:
        with Askers(server, "m", 4) as askers:
            time.sleep(0.3)
            server.workers()[0].kill()
            assert eventually(lambda: server.get("/v2/health/ready")[0] == 200 and len(server.workers()) == 1)
            time.sleep(0.3)
        assert askers.wrong == askers.lost == []
        assert set(askers.statuses) <= {200, 503}
        assert askers.statuses[-1] == 200
        assert server.infer("m", [1.0])[0] == 200


def test_a_worker_that_hangs_is_found_and_replaced_and_its_request_answered(
    tmp_path: Path, two_replicas: dict[str, Any]
) -> None:
    with running(tmp_path, two_replicas, "--hang-s", "0.6") as server:
        for worker in (first := server.workers()):
            worker.suspend()
        assert server.infer("m", [3.0])[1]["outputs"][0]["data"] == [3.0]
        assert eventually(lambda: all(has_ended(worker) for worker in first))
        assert eventually(lambda: len(server.workers()) == 2)


def test_told_to_stop_the_server_answers_what_it_accepted_and_leaves_no_process(
    tmp_path: Path, two_replicas: dict[str, Any]
) -> None:
    with running(tmp_path, two_replicas) as server:
        workers = server.workers()
        with Askers(server, "m", 6) as askers:
            time.sleep(0.3)
            code, errors = server.stop(signal.SIGINT)
        assert (code, errors) == (0, "drained\n")
        assert askers.wrong == askers.lost == []
        assert set(askers.statuses) == {200}
        assert eventually(lambda: all(has_ended(worker) for worker in workers))


def test_workers_end_when_the_router_is_killed(tmp_path: Path, two_replicas: dict[str, Any]) -> None:
    with running(tmp_path, two_replicas) as server:
        workers = server.workers()
        server.process.kill()
        assert eventually(lambda: all(has_ended(worker) for worker in workers))


def test_fractions_of_a_core_are_held_by_groups_that_do_not_stay_behind(tmp_path: Path) -> None:
    try:
        parent, version = quota_parent()
    except UnavailableError as reason:
        pytest.skip(str(reason))
    own_share = 25.0 / len(own_cores())
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m", sm_share_pct=own_share)])) as server:
        (group,) = parent.glob(f"gpuprof-serve-{server.process.pid}-*")
        assert str(server.workers()[0].pid) in (group / "cgroup.procs").read_text().split()
        limit = (group / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")).read_text().split()[0]
        assert int(limit) > 0
        server.workers()[0].kill()
        server.stop()
    assert not group.exists()
