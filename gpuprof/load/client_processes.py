"""Runs several load clients in parallel, the first in this process, the others in child processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from gpuprof.load.client import LoadClient, Schedule, SentRequests
from gpuprof.load.windows import WindowRule, WindowWatch


def run_clients(
    schedules: Sequence[Schedule], rule: WindowRule | None = None, begin_s: float = 0.0
) -> list[SentRequests]:
    """Run a client for each schedule, the first in this process, the others in child processes.

    With a rule, the windows of the first client, whose requests are a sample of all, decide when the measurement ends;
    they begin at ``begin_s``.
    """
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pipes = []
    for schedule in schedules[1:]:
        parent_end, child_end = context.Pipe()
        process = context.Process(target=_run_in_child, args=(schedule, child_end, stop), daemon=True)
        process.start()
        child_end.close()
        pipes.append((process, parent_end))
    for _, pipe in pipes:
        pipe.recv()  # the child has started
    # All clients start at the same time of the machine's monotonic clock, late enough for all to have received it.
    start = time.monotonic() + 0.05
    for _, pipe in pipes:
        pipe.send(start)
    watch = None if rule is None else WindowWatch(rule, len(schedules[0].requests), begin_s)
    results = [LoadClient(schedules[0], watch, partial(_signal_stop, watch, stop)).run(start)]
    for process, pipe in pipes:
        results.append(pipe.recv())
        process.join()
    return results


def _signal_stop(watch: WindowWatch | None, stop: Any) -> bool:
    """Signal the end to the other clients."""
    if watch is not None and watch.is_stable and not stop.is_set():
        stop.set()
    return False


def _run_in_child(schedule: Schedule, pipe: object, stop: Any) -> None:
    pipe.send(True)  # type: ignore[attr-defined]
    pipe.send(LoadClient(schedule, None, stop.is_set).run(pipe.recv()))  # type: ignore[attr-defined]
