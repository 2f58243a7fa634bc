"""The machine's link to its fork server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from contextlib import suppress
from typing import Any

from gpuprof.runtime.module_command import module_command
from gpuprof.serving.machine.fork_server import MESSAGE_BYTES, WorkerSetup
from gpuprof.serving.machine.launcher import WorkerOrder, start_worker, thread_environment
from gpuprof.serving.watch.living_process import LivingProcess
from gpuprof.serving.watch.process_name import PADDING

_TIMEOUT_S = 30.0


class ForkServerLink:
    """Starts workers through a fork server, which it runs; workers that cannot be forked get a fresh interpreter."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._can_fork = True
        self._one_at_a_time = asyncio.Lock()

    async def prepare(self) -> None:
        """Start the fork server unless it runs, so that the next worker need not wait for it."""
        async with self._one_at_a_time:
            with suppress(OSError):  # the caller that needs the fork server gets the error
                await asyncio.to_thread(self._ensure_running)

    async def start(self, number: str, order: WorkerOrder) -> LivingProcess:
        """Start a worker.

        ``number``: the worker's number in the router. Raises `OSError` when no process can be started.
        """
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._start, number, order)

    def close(self) -> None:
        """End the fork server."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.wait()
        self._process = self._socket = None

    def _start(self, number: str, order: WorkerOrder) -> LivingProcess:
        # A worker bound to a GPU: CUDA reads the environment at its start, and does not survive a fork.
        if order.environment:
            return self._start_interpreter(number, order)
        try:
            return self._fork(number, order)
        except (ConnectionError, TimeoutError):  # the fork server was killed, or hangs: try again with a new one
            self._kill_server()
            return self._fork(number, order)

    def _start_interpreter(self, number: str, order: WorkerOrder) -> LivingProcess:
        child = start_worker(number, order, self._setup.key, self._setup.memory)
        return LivingProcess(child.pid, child)

    def _fork(self, number: str, order: WorkerOrder) -> LivingProcess:
        self._ensure_running()
        if not self._can_fork or self._socket is None:
            return self._start_interpreter(number, order)
        asked = {"number": number, "environment": thread_environment(order)}
        self._socket.send(json.dumps(asked).encode())
        answer, descriptors = self._receive_reply()
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return LivingProcess(answer["pid"], descriptor=descriptors[0])

    def _ensure_running(self) -> None:
        """Start the fork server unless it runs."""
        if self._socket is not None or not self._can_fork:
            return
        # Packets keep the message borders: each message is one JSON text with its descriptors.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = self._setup.memory
        with theirs:
            process = subprocess.Popen(
                module_command("gpuprof.serving.machine.fork_server", str(theirs.fileno()), PADDING),
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
            pipe.write(self._setup.to_json().encode())
        threads = self._receive_reply()[0]["threads"]
        if threads > 1:  # a library has some of its own here
            self._can_fork = False
            self._kill_server()

    def _receive_reply(self) -> tuple[dict[str, Any], list[int]]:
        assert self._socket is not None
        text, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
        if not text:
            raise ConnectionResetError("the fork server has ended")
        return json.loads(text), descriptors

    def _kill_server(self) -> None:
        if self._process is not None:
            self._process.kill()
        self.close()
