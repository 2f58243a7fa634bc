"""Reports elapsed seconds during an operation of known duration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from gpuprof.pipeline.result import Progress, ProgressCallback, say_nothing

#: Reports a run at most, so that whoever shows them takes next to nothing of what is measured beside.
_MOST_REPORTS = 20


@contextmanager
def report_elapsed(progress: ProgressCallback, step: str, total_s: float) -> Iterator[None]:
    """Call ``progress`` from a background thread with the seconds since the block began, at most once a second.

    Parameters
    ----------
    step : str
        What goes on, in words.
    total_s : float
        How long it is to go on; what takes longer stays at the end.
    """
    # No thread where nobody looks: it would wake up beside what is being measured.
    if progress is say_nothing:
        yield
        return
    began, ended, total = time.monotonic(), Event(), max(1, round(total_s))
    period_s = max(1.0, total_s / _MOST_REPORTS)

    def report() -> None:
        while not ended.wait(period_s):
            progress(Progress(step, min(total, round(time.monotonic() - began)), total))

    progress(Progress(step, 0, total))
    thread = Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    progress(Progress(step, total, total))
