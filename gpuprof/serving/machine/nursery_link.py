"""The machine's end of its nursery."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

from gpuprof.serving.machine.launcher import WorkerOrder, start_worker, thread_environment
from gpuprof.serving.machine.nursery import MESSAGE_BYTES, Household
from gpuprof.serving.watch.living_process import LivingProcess
from gpuprof.serving.watch.process_name import ROOM

_TIMEOUT_S = 30.0


class NurseryLink:
    """Has workers forked by a nursery, which it starts and keeps, and starts afresh those that cannot be.

    Parameters
    ----------
    household : Household
    """

    def __init__(self, household: Household) -> None:
        self._household = household
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._can_fork = True
        self._one_at_a_time = asyncio.Lock()

    async def prepare(self) -> None:
        """Start the nursery unless it is there, so that who is started next need not wait for it."""
        async with self._one_at_a_time:
            with suppress(OSError):  # told to who needs it
                await asyncio.to_thread(self._open)

    async def start(self, number: str, order: WorkerOrder) -> LivingProcess:
        """Start a worker.

        Parameters
        ----------
        number : str
            Under which the router waits for it.
        order : WorkerOrder

        Raises
        ------
        OSError
            When no process can be started.
        """
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._start, number, order)

    def close(self) -> None:
        """Let the nursery end."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.wait()
        self._process = self._socket = None

    def _start(self, number: str, order: WorkerOrder) -> LivingProcess:
        if order.environment:  # it is bound to a GPU: CUDA reads this when it starts, and does not survive a fork
            return self._fresh(number, order)
        try:
            return self._fork(number, order)
        except (ConnectionError, TimeoutError):  # it was killed, or hangs: once more with another
            self._give_up()
            return self._fork(number, order)

    def _fresh(self, number: str, order: WorkerOrder) -> LivingProcess:
        child = start_worker(number, order, self._household.key, self._household.memory)
        return LivingProcess(child.pid, child)

    def _fork(self, number: str, order: WorkerOrder) -> LivingProcess:
        self._open()
        if not self._can_fork or self._socket is None:
            return self._fresh(number, order)
        asked = {"number": number, "environment": thread_environment(order)}
        self._socket.send(json.dumps(asked).encode())
        answer, descriptors = self._hear()
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return LivingProcess(answer["pid"], descriptor=descriptors[0])

    def _open(self) -> None:
        """Start the nursery unless it is there."""
        if self._socket is not None or not self._can_fork:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = self._household.memory
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpuprof.serving.machine.nursery", str(theirs.fileno()), ROOM],
                pass_fds=(theirs.fileno(),) if memory is None else (theirs.fileno(), memory.fd),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                # NumPy's own threads would come on top of ONNX Runtime's, and would not survive a fork.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        self._process, self._socket = process, ours
        ours.settimeout(_TIMEOUT_S)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(self._household.to_json().encode())
        threads = self._hear()[0]["threads"]
        if threads > 1:  # a library has some of its own here
            self._can_fork = False
            self._give_up()

    def _hear(self) -> tuple[dict[str, Any], list[int]]:
        assert self._socket is not None
        text, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
        if not text:
            raise ConnectionResetError("the nursery has ended")
        return json.loads(text), descriptors

    def _give_up(self) -> None:
        if self._process is not None:
            self._process.kill()
        self.close()
