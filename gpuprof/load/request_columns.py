"""Requests of a model as arrays: times, status and the times that the server reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuprof.serving.transport.server_timing import UNKNOWN_MS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from gpuprof.load.client import Schedule, SentRequests

    Floats = npt.NDArray[np.float64]


def select_columns(
    schedules: Sequence[Schedule], results: Sequence[SentRequests], model: int, span: tuple[float, float]
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return arrays over requests: when due, sent and answered, the status, and the server's times (three rows)."""
    import numpy as np

    due = np.concatenate([np.asarray(schedule.times, float) for schedule in schedules])
    models = np.concatenate([np.asarray(schedule.models) for schedule in schedules])
    sent = np.concatenate([np.asarray(result.sent_s) for result in results])
    done = np.concatenate([np.asarray(result.done_s) for result in results])
    status = np.concatenate([np.asarray(result.status, float) for result in results])
    told = [
        [times or [UNKNOWN_MS] * len(result.sent_s) for times in (result.server_ms, result.queue_ms, result.infer_ms)]
        for result in results
    ]
    told_ms = np.concatenate([np.asarray(times, float) for times in told], axis=1)
    own = (models == model) & (due >= span[0]) & (due < span[1])
    return due[own], sent[own], done[own], status[own], told_ms[:, own]
