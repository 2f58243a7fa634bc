"""The process that forks workers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuprof.serving.machine.fork_server import WorkerSetup
from gpuprof.serving.machine.fork_server_link import ForkServerLink
from gpuprof.serving.machine.launcher import WorkerOrder
from gpuprof.serving.transport.rendezvous import RendezvousKey
from gpuprof.serving.watch.process_name import PADDING
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, has_ended, map_of, replica, running
from tests.serving.test_reliability import Askers, figure

pytestmark = serves_in_real_time

#: A rendezvous behind which nobody is: workers that come there end at once.
NOWHERE = WorkerSetup(RendezvousKey("unix:gpuprof-nobody", "00"), None)
ORDER = WorkerOrder("m", "1", "null:4", 1)


@pytest.fixture
def fork_server() -> Iterator[ForkServerLink]:
    link = ForkServerLink(NOWHERE)
    yield link
    link.close()


def fork_server_of(server: RunningServer) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    (found,) = [child for child in children if "gpuprof.serving.machine.fork_server" in child.cmdline()]
    return found


def test_a_forked_worker_is_called_by_its_own_name_and_is_the_fork_servers(tmp_path: Path) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m"), replica("m")])) as server:
        parent = fork_server_of(server)
        names = {worker.cmdline()[3] for worker in server.workers()}
        assert names == {"worker:here/m/0", "worker:here/m/1"}
        assert {worker.ppid() for worker in server.workers()} == {parent.pid}


def test_a_killed_fork_server_costs_no_worker_and_another_forks_the_next(tmp_path: Path) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")])) as server:
        (worker,) = server.workers()
        before = fork_server_of(server)
        with Askers(server, "m", 2) as askers:
            before.kill()
            assert eventually(lambda: has_ended(before))
            assert server.infer("m", [1.0])[0] == 200
            assert worker.is_running()
            worker.kill()
            assert eventually(lambda: figure(server, "gpuprof_worker_restarts_total") == 1)
            assert eventually(lambda: len(server.workers()) == 1)
        assert fork_server_of(server).pid != before.pid
        assert askers.wrong == askers.lost == []
        assert server.stop()[0] == 0
        assert eventually(lambda: has_ended(worker))


def test_the_end_of_a_forked_worker_is_seen_and_no_zombie_stays(fork_server: ForkServerLink) -> None:
    async def bear() -> int:
        living = await fork_server.start("worker:n/m/0", ORDER)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(living.fileno(), ended.set)
        await asyncio.wait_for(ended.wait(), 30)
        asyncio.get_running_loop().remove_reader(living.fileno())
        living.release()
        return living.pid

    pid = asyncio.run(bear())
    assert eventually(lambda: not psutil.pid_exists(pid))


def test_what_is_bound_to_a_gpu_is_started_with_its_environment_and_not_forked(fork_server: ForkServerLink) -> None:
    order = WorkerOrder("m", "1", "null:4", 1, environment={"CUDA_VISIBLE_DEVICES": "GPU-1"})

    async def bear() -> dict[str, str]:
        living = await fork_server.start("worker:n/m/0", order)
        process = psutil.Process(living.pid)
        seen = process.environ()
        assert process.ppid() == os.getpid()
        living.kill()
        living.release()
        return seen

    assert asyncio.run(bear())["CUDA_VISIBLE_DEVICES"] == "GPU-1"


def test_a_fork_server_that_has_threads_is_done_without(
    fork_server: ForkServerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForkServerLink, "_receive_reply", lambda link: ({"threads": 2}, []))

    async def bear() -> None:
        living = await fork_server.start("worker:n/m/0", ORDER)
        assert psutil.Process(living.pid).ppid() == os.getpid()
        living.release()

    asyncio.run(bear())


@pytest.mark.parametrize("name", ["short", "long " * 100])
def test_a_name_is_cut_to_the_space_of_the_command_line(name: str) -> None:
    program = f"""
import psutil
from gpuprof.serving.watch.process_name import name_process
before = sum(map(len, psutil.Process().cmdline()))
name_process(["word", {name!r}])
words = psutil.Process().cmdline()
assert words[0] == "word", words
assert {name!r}.startswith(words[1]) and words[1] in ({name!r}, {name!r}[:len(words[1])]), words
assert sum(map(len, words)) <= before + 4
assert len(words[1]) == len({name!r}) or len(words[1]) > 100, words
"""
    done = subprocess.run([sys.executable, "-c", program, PADDING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
