"""Reports elapsed seconds during an operation of known duration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from gpuprof.pipeline.result import Progress, ProgressCallback, say_nothing

#: Maximum reports per run, so that rendering them hardly disturbs the concurrent measurement.
_MOST_REPORTS = 20


@contextmanager
def report_elapsed(progress: ProgressCallback, step: str, total_s: float) -> Iterator[None]:
    """Call ``progress`` from a background thread with the seconds since the block began, at most once a second.

    Parameters
    ----------
    step : str
        Description of the step.
    total_s : float
        Expected duration; reports of longer steps stay at this value.
    """
    # No thread without a listener: its wake-ups would disturb the measurement.
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
