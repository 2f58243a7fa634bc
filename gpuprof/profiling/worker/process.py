"""Worker processes: starting them, calling functions in them, ending them reliably; and the program that they run.

A worker contains crashes, hangs and memory exhaustion of a model, and stays up for all batch sizes of a measurement.
Its program is ``python -m gpuprof.profiling.worker.process CONNECTION``: the connection, an open file descriptor,
carries the worker's setup, then tasks; each is answered by its result or its error. Given the name of a file from
`task_command`, the program runs this task alone.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self

from gpuprof.errors import GpuprofError, UnavailableError
from gpuprof.machine.cgroup import confine_to_share
from gpuprof.profiling.worker.tasks import Resident, WorkerSetup
from gpuprof.runtime.module_command import module_command

Arguments = ParamSpec("Arguments")
#: Function that a worker runs; its first argument is the worker's state.
Task = Callable[Concatenate[Resident, Arguments], Any]

#: Time for a model of gigabytes from a cold disk; after it a silent worker is considered dead.
PATIENCE_S = 600.0
_PROGRAM = "gpuprof.profiling.worker.process"


class Worker:
    """A process that runs tasks, one after another.

    ``what``: name of the work in messages, ``"resnet50 at batch 8"``; ``environment``: variables added to this
    process's own.
    """

    def __init__(self, setup: WorkerSetup, what: str, environment: Mapping[str, str] | None = None) -> None:
        self.what = what
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - lives as long as the worker
        self._connection, child_end = Pipe()
        self._process = subprocess.Popen(
            module_command(_PROGRAM, str(child_end.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[child_end.fileno()],
            env={**os.environ, **package_path(), **(environment or {})},
            # A separate process group: all descendants end with the worker, and Ctrl-C reaches only the parent.
            start_new_session=True,
        )
        child_end.close()
        self._connection.send(setup)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def process_id(self) -> int:
        """Id of the process, and of its process group."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def send(self, task: Task[Arguments], *arguments: Arguments.args, **options: Arguments.kwargs) -> None:
        """Begin a task; `receive` waits for its result. An ended worker is detected there."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send((task, arguments, options))

    def receive(self, within_s: float = PATIENCE_S) -> Any:
        """Return the result of the task begun.

        Raises the task's own `GpuprofError`, or `UnavailableError` when the worker died or was silent for ``within_s``
        seconds; the worker is ended then.
        """
        try:
            if not self._connection.poll(within_s):
                self._kill()
                raise UnavailableError(
                    f"profiling {self.what}: no answer within {within_s:g} s, so it was ended", "raise --time-limit"
                )
            reply = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._exit_error() from None
        if isinstance(reply, Exception):
            raise reply
        return reply

    def call(self, task: Task[Arguments], *arguments: Arguments.args, **options: Arguments.kwargs) -> Any:
        """Run a task and return its result; errors as for `receive`."""
        self.send(task, *arguments, **options)
        return self.receive()

    def stop(self) -> None:
        """Tell a task that runs until it is stopped to return."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(None)

    def end(self) -> None:
        """Kill the worker and its descendants, and wait for the worker."""
        self._kill()
        self._connection.close()
        self._log.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _exit_error(self) -> UnavailableError:
        code = self._process.wait()
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        fix = f"its last words: {lines[-1]}" if lines else ""
        if code == -signal.SIGKILL:  # comes from Linux for a process with too much memory; nothing else here sends it
            fix = "out of memory? try a smaller batch"
        return UnavailableError(f"profiling {self.what}: the process died ({cause})", fix)


def package_path() -> dict[str, str]:
    """Return the ``PYTHONPATH`` with which another process imports this package."""
    package = str(Path(__file__).parents[3])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))}


def task_command(
    file: Path, setup: WorkerSetup, task: Task[Arguments], *arguments: Arguments.args, **options: Arguments.kwargs
) -> list[str]:
    """Return the command line of a program that runs a task alone, for a profiler; the task is written to ``file``."""
    file.write_bytes(pickle.dumps((setup, (task, arguments, options))))
    return module_command(_PROGRAM, str(file))


def main(arguments: list[str]) -> int:
    """Serve the connection, or run the task in the file; the error of a lone task is printed on stderr as a line."""
    if arguments[0].isdecimal():
        connection = Connection(int(arguments[0]))
        with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
            _serve(connection)
        return 0
    try:
        setup, (task, parameters, options) = pickle.loads(Path(arguments[0]).read_bytes())
        task(Resident(setup), *parameters, **options)
    except GpuprofError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _serve(connection: Connection) -> None:
    _die_with_parent()
    setup: WorkerSetup = connection.recv()
    importlib.import_module("onnxruntime")  # before the first baseline of memory, as in an idle server
    try:
        with confine_to_share(setup.part, setup.group) if setup.part else nullcontext():
            resident = Resident(setup, connection)
            while True:
                if (call := connection.recv()) is None:  # a stop message for a task that has failed meanwhile
                    continue
                task, arguments, options = call
                try:
                    reply = task(resident, *arguments, **options)
                except GpuprofError as error:
                    reply = error
                except MemoryError:
                    reply = UnavailableError("out of memory", "try a smaller batch")
                connection.send(reply)
    except GpuprofError as error:  # of the share
        connection.send(error)


def _die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    with suppress(OSError, AttributeError):  # Linux only; elsewhere the closed connection ends it, later
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG (prctl(2))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
