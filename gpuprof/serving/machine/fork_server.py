"""The fork server: a process with all of a worker's imports, which forks workers on request.

python -m gpuprof.serving.machine.fork_server SOCKET_FD PADDING < SETUP

A fresh interpreter's imports take two thirds of a worker's start, all of it on cores that are busy because a worker
has just died; a fork takes a few milliseconds. The worker itself imports ONNX Runtime, which starts a thread on
import: threads do not survive a fork. Workers bound to a GPU are started by `launcher.start_worker` instead. The fork
server ends when the machine closes the socket; its forked workers live on.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuprof.serving.machine.launcher import SharedMemory
from gpuprof.serving.transport.arena import map_arena
from gpuprof.serving.transport.rendezvous import RendezvousKey
from gpuprof.serving.watch.process_name import name_process
from gpuprof.serving.worker.worker import run_worker

#: No request, and no answer, is longer.
MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The common settings of a fork server's workers."""

    key: RendezvousKey  #: Address and secret of the router's rendezvous.
    memory: SharedMemory | None  #: Memory shared with the router.

    def to_json(self) -> str:
        """Return the setup as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSetup:
        """Return the setup written by `to_json`."""
        said = json.loads(text)
        memory = None if said["memory"] is None else SharedMemory(**said["memory"])
        return cls(RendezvousKey(**said["key"]), memory)


class ForkServer:
    """Forks workers.

    ``machine``: socket of the requests: each message is answered by a process id and a descriptor of the process.
    """

    def __init__(self, machine: socket.socket, setup: WorkerSetup) -> None:
        self._machine = machine
        self._setup = setup
        self._children: dict[int, int] = {}

    def run(self) -> None:
        """Fork workers until the machine closes the socket."""
        self._reply({"threads": len(list(Path("/proc/self/task").iterdir()))})
        while True:
            readable, _, _ = select.select([*self._children, self._machine.fileno()], [], [])
            for descriptor in readable:
                if descriptor in self._children:
                    self._reap(descriptor)
                elif text := self._machine.recv(MESSAGE_BYTES):
                    self._fork_worker(json.loads(text))
                else:
                    self._reap_ended()
                    return

    def _fork_worker(self, asked: dict[str, Any]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._reply({"errno": error.errno})
            return
        if not pid:
            self._run_worker(asked)
        descriptor = os.pidfd_open(pid)  # an ended child still exists: only this process reaps it
        self._children[descriptor] = pid
        self._reply({"pid": pid}, [descriptor])

    def _run_worker(self, asked: dict[str, Any]) -> None:
        """Run a worker in the forked process, and never return."""
        code = 1
        try:
            self._machine.close()
            for descriptor in self._children:
                os.close(descriptor)
            os.environ.update(asked["environment"])
            name_process([sys.executable, "-m", "gpuprof.serving.worker.worker", asked["number"]])
            memory = self._setup.memory
            arena = None if memory is None else map_arena(memory.fd, memory.size)
            code = run_worker(asked["number"], self._setup.key, arena)
        except BaseException:  # as the end of a separate process would print
            traceback.print_exc()
        finally:
            os._exit(code)  # without cleaning up the fork server's resources

    def _reap(self, descriptor: int) -> None:
        os.waitpid(self._children.pop(descriptor), 0)
        os.close(descriptor)

    def _reap_ended(self) -> None:
        """Reap workers that have ended; the others live on."""
        ended, _, _ = select.select(list(self._children), [], [], 0.0)
        for descriptor in ended:
            self._reap(descriptor)

    def _reply(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        with suppress(ConnectionError):  # the machine has gone, which the next read of the socket detects
            socket.send_fds(self._machine, [json.dumps(message).encode()], descriptors or [])


def main(arguments: list[str]) -> int:
    """Fork workers until the machine has gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the router drains first
        signal.signal(ignored, signal.SIG_IGN)
    setup = WorkerSetup.from_json(sys.stdin.read())
    import numpy  # noqa: F401 - so that workers need not

    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, memory shared with the workers
    with socket.socket(fileno=int(arguments[0])) as machine:
        ForkServer(machine, setup).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
