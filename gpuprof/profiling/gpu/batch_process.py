"""Process that measures all batch sizes of a model under a share: ``python -m … gpu.batch_process``.

Starting ONNX Runtime on CUDA takes seconds, timing a batch size two. All batch sizes are timed first, each in its own
session, so that their memory figures are independent. Then each is recorded: once a profiler has started, everything in
its process is slower. The protocol is that of `gpuprof.profiling.child.child`. An ``error`` concerns a single batch
size; the next follows.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import TextIO

from gpuprof.errors import GpuprofError
from gpuprof.profiling.child.child import (
    die_with_parent,
    load_runtime,
    receive_task,
    send_message,
    time_model,
    wait_for,
)
from gpuprof.profiling.child.task import BatchesTask, BatchTasks
from gpuprof.profiling.gpu.recorded_run import record_model


def main() -> int:
    """Do the task on stdin."""
    die_with_parent()
    speech = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output printed by libraries must not mix with the protocol
    task: BatchesTask = receive_task()
    load_runtime()
    for row in task.rows:
        _try_row(_time_row, row, speech)
        gc.collect()  # objects in reference cycles would keep a session's memory until some later collection
    wait_for("record")
    for row in task.rows:
        _try_row(_record_row, row, speech)
        gc.collect()  # objects in reference cycles would keep a session's memory until some later collection
    return 0


def _try_row(part: Callable[[BatchTasks, TextIO], None], row: BatchTasks, speech: TextIO) -> None:
    try:
        part(row, speech)
    except GpuprofError as error:
        send_message(speech, "error", kind=type(error).__name__, message=error.message, fix=error.fix)
    except MemoryError:
        send_message(speech, "error", kind="UnavailableError", message="out of memory", fix="try a smaller batch")


def _time_row(row: BatchTasks, speech: TextIO) -> None:
    import numpy as np

    time_model(row.timed, dict(np.load(row.timed.inputs)), speech)


def _record_row(row: BatchTasks, speech: TextIO) -> None:
    if row.recorded:
        record_model(row.recorded)
    send_message(speech, "recorded")


if __name__ == "__main__":
    sys.exit(main())
