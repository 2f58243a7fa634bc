"""Program of a worker process: ``python -m gpuprof.profiling.worker.program CONNECTION``.

The connection, an open file descriptor, carries the worker's setup, then tasks; each is answered by its result or its
error. Given the name of a file from `gpuprof.profiling.worker.process.task_command`, the program runs this task alone.
"""

from __future__ import annotations

import ctypes
import importlib
import pickle
import signal
import sys
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from gpuprof.errors import GpuprofError, UnavailableError
from gpuprof.machine.cgroup import confine_to_share
from gpuprof.profiling.worker.tasks import Resident, WorkerSetup


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
