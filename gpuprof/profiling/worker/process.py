"""Worker processes, which stay up for all batch sizes of a measurement, and programs that run a task alone."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from gpuprof.errors import GpuprofError
from gpuprof.machine.cgroup import confine_to_share
from gpuprof.profiling.worker.tasks import Resident, WorkerSetup
from gpuprof.runtime.child_process import Arguments, ChildProcess, Task
from gpuprof.runtime.module_command import module_command


class Worker(ChildProcess):
    """A process within a share, whose tasks get a `Resident` as their first argument.

    ``what``: name of the work in messages, ``"resnet50 at batch 8"``; ``environment``: variables added to this
    process's own.
    """

    def __init__(self, setup: WorkerSetup, what: str, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(f"profiling {what}", partial(_make_resident, setup), environment)


@contextmanager
def _make_resident(setup: WorkerSetup, connection: Connection) -> Iterator[Resident]:
    with confine_to_share(setup.part, setup.group) if setup.part else nullcontext():
        yield Resident(setup, connection)


def task_command(
    file: Path, setup: WorkerSetup, task: Task[Arguments], *arguments: Arguments.args, **options: Arguments.kwargs
) -> list[str]:
    """Return the command line of a program that runs a task alone, for a profiler; the task is written to ``file``."""
    file.write_bytes(pickle.dumps((setup, (task, arguments, options))))
    return module_command("gpuprof.profiling.worker.process", str(file))


def main(arguments: list[str]) -> int:
    """Run the task in the file; its error is printed on stderr as a line."""
    try:
        setup, (task, parameters, options) = pickle.loads(Path(arguments[0]).read_bytes())
        task(Resident(setup), *parameters, **options)
    except GpuprofError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
