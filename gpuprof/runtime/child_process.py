"""Processes that run functions, one after another, and contain the crashes, hangs and memory exhaustion of models.

The program of such a process is ``python -m gpuprof.runtime.child_process CONNECTION``: the connection, an open file
descriptor, carries the function that opens its state, then tasks; each is answered by its result or its error.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from gpuprof.errors import GpuprofError, InputError, UnavailableError
from gpuprof.runtime.module_command import module_command

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
#: Function that a process runs; its first argument is the process's state.
Task = Callable[Concatenate[Any, Arguments], Any]

#: Time for a model of gigabytes from a cold disk; after it a silent process is considered dead.
PATIENCE_S = 600.0


class DiedError(UnavailableError):
    """A child process ended in the middle of a task."""


class CrashError(InputError):
    """A model crashed the process that runs it."""


class ChildProcess:
    """A process that runs tasks, one after another.

    ``what``: name of the work in messages, ``"profiling resnet50"``; ``begin``: opens the process's state there;
    ``environment``: variables added to this process's own.
    """

    def __init__(
        self,
        what: str,
        begin: Callable[[Connection], AbstractContextManager[Any]],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.what = what
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - lives as long as the process
        self._connection, child_end = Pipe()
        self._process = subprocess.Popen(
            module_command("gpuprof.runtime.child_process", str(child_end.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[child_end.fileno()],
            env={**os.environ, **package_path(), **(environment or {})},
            # A separate process group: all descendants end with it, and Ctrl-C reaches only the parent.
            start_new_session=True,
        )
        child_end.close()
        self._connection.send(begin)

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
        """Start a task; `receive` returns its result, and reports an ended process."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send((task, arguments, options))

    def receive(self, within_s: float = PATIENCE_S) -> Any:
        """Return the result of the task started by `send`.

        Raises the task's own `GpuprofError`, `DiedError` when the process died, or `UnavailableError` when it was
        silent for ``within_s`` seconds; it is ended then.
        """
        try:
            if not self._connection.poll(within_s):
                self._kill()
                raise UnavailableError(
                    f"{self.what}: no answer within {within_s:g} s, so it was ended", "raise --time-limit"
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
        """Make a task that runs until stopped return."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(None)

    def end(self) -> None:
        """Kill the process and its descendants, and wait for it."""
        self._kill()
        self._connection.close()
        self._log.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _exit_error(self) -> DiedError:
        code = self._process.wait()
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        fix = f"its last words: {lines[-1]}" if lines else ""
        if code == -signal.SIGKILL:  # comes from Linux for a process with too much memory; nothing else here sends it
            fix = "out of memory? try a smaller batch"
        return DiedError(f"{self.what}: the process died ({cause})", fix)


_of_thread = threading.local()  # the kernel ends a child with the thread that started it


def call_apart(function: Callable[..., Result], model: Path, *arguments: Any, within_s: float = PATIENCE_S) -> Result:
    """Return ``function(model, *arguments)``, run in a process that is kept for this thread's next calls.

    Raises the function's own `GpuprofError`; `CrashError` when the process dies; `UnavailableError` when it does not
    answer within ``within_s`` seconds.
    """
    child: ChildProcess | None = getattr(_of_thread, "child", None)
    if child is None or _of_thread.parent != os.getpid():  # another parent: this process is a fork
        child = _of_thread.child = ChildProcess("ONNX Runtime", _keep_nothing)
        _of_thread.parent = os.getpid()
        atexit.register(child.end)
    try:
        child.send(_call, os.getcwd(), function, model, *arguments)  # noqa: PTH109 - paths may be relative
        result: Result = child.receive(within_s)
        return result
    except DiedError as error:
        raise CrashError(f"{model} cannot be run: {error.message}", error.fix) from None
    except KeyboardInterrupt:
        child._kill()  # its answer would be taken for the next one's
        raise
    finally:
        if not child.is_alive:
            atexit.unregister(child.end)
            child.end()
            _of_thread.child = None


@contextmanager
def _keep_nothing(connection: Connection) -> Iterator[None]:
    yield


def _call(state: None, folder: str, function: Callable[..., Result], *arguments: Any) -> Result:
    os.chdir(folder)
    return function(*arguments)


def package_path() -> dict[str, str]:
    """Return the ``PYTHONPATH`` with which another process imports this package."""
    package = str(Path(__file__).parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))}


def _serve(connection: Connection) -> None:
    _die_with_parent()
    begin = connection.recv()
    with suppress(ImportError):
        importlib.import_module("onnxruntime")  # before the first baseline of memory, as in an idle server
    try:
        with begin(connection) as state:
            while True:
                if (call := connection.recv()) is None:  # a stop message for a task that has failed meanwhile
                    continue
                task, arguments, options = call
                try:
                    reply = task(state, *arguments, **options)
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
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        _serve(Connection(int(sys.argv[1])))
