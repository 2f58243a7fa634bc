"""Divides the difference between a measured p99 and the predicted p99 by its causes.

The answered requests are queued again, first come first served, with measured values in place of predicted values:
first the model's time for each request, then also the time of sending. The rest arose in the network and the router.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuprof.load.request_columns import select_columns
from gpuprof.rules.host_work import host_work_of_plan
from gpuprof.serving.transport.server_timing import UNKNOWN_MS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.load.client import Schedule, SentRequests

    Floats = npt.NDArray[np.float64]

_WHOLE = (0.0, float("inf"))


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredRequests:
    """The answered requests of a model, including the warm-up."""

    #: ``due_ms``, ``sent_ms``: When they were due and sent, from the start of the warm-up.
    due_ms: Floats
    sent_ms: Floats
    infer_ms: Floats  #: Time of the model as the server reports it; `UNKNOWN_MS` where it does not.
    is_counted: npt.NDArray[np.bool_]  #: True for requests that count for the percentiles.


@dataclass(frozen=True, slots=True)
class P99Gap:
    """Parts of the measured p99 minus the predicted p99, in milliseconds; their sum is the difference."""

    batches_ms: float  #: Because batches took other times than predicted.
    late_ms: float  #: Because the client sent late.
    rest_ms: float  #: Due to the network and the router.

    def largest(self) -> str:
        """Return the largest part of the difference."""
        parts = {
            "the times of its batches": self.batches_ms,
            "late sending": self.late_ms,
            "the network and the router": self.rest_ms,
        }
        sign = 1.0 if self.batches_ms + self.late_ms + self.rest_ms >= 0.0 else -1.0
        name, part_ms = max(parts.items(), key=lambda item: sign * item[1])
        return f"{name} ({part_ms:+.1f} ms)"

    def __str__(self) -> str:
        return (
            f"{self.batches_ms:+.1f} ms by the times of its batches, {self.late_ms:+.1f} ms sent late, "
            f"{self.rest_ms:+.1f} ms in the network and the router"
        )


def select_answered(
    schedules: Sequence[Schedule], results: Sequence[SentRequests], model: int, span: tuple[float, float]
) -> AnsweredRequests:
    """Return the answered requests of the model at a position of the streams; ``span`` as in `summarize`."""
    due, sent, _, status, told_ms = select_columns(schedules, results, model, _WHOLE)
    answered = status == 200
    due_s = due[answered]
    return AnsweredRequests(
        1000.0 * due_s, 1000.0 * sent[answered], told_ms[2, answered], (due_s >= span[0]) & (due_s < span[1])
    )


def divide_p99_gap(
    deployment: DeploymentMap, model: str, answered: AnsweredRequests, predicted_ms: float, measured_ms: float
) -> P99Gap | None:
    """Return the parts of the difference between two 99th percentiles.

    None where requests share batches or processes take turns, since the composition is unknown, and where the server
    does not report the time of the model.
    """
    processes = _count_processes(deployment, model)
    if not processes or not len(answered.due_ms) or (answered.infer_ms == UNKNOWN_MS).any():
        return None
    planned_with = deployment.planned_with
    service_ms = answered.infer_ms + host_work_of_plan(planned_with).handover_ms
    as_due_ms, as_sent_ms = (
        _find_p99(answered, _queue(arrived_ms, service_ms, processes) + planned_with.overhead_ms)
        for arrived_ms in (answered.due_ms, answered.sent_ms)
    )
    return P99Gap(as_due_ms - predicted_ms, as_sent_ms - as_due_ms, measured_ms - as_sent_ms)


def _count_processes(deployment: DeploymentMap, model: str) -> int:
    """Return the number of processes that answer a model's requests individually; 0 where any process does not."""
    replicas = [replica for *_, replica in deployment.places() if model in replica.rates()]
    if any(replica.batch > 1 or replica.merged or replica.turns for replica in replicas):
        return 0
    return sum(replica.processes for replica in replicas)


def _queue(arrived_ms: Floats, service_ms: Floats, processes: int) -> Floats:
    """Return the times at which requests leave a first-come-first-served queue."""
    import numpy as np

    left_ms = np.empty_like(arrived_ms)
    free_ms = [0.0] * processes
    for request in np.argsort(arrived_ms, kind="stable"):
        left_ms[request] = max(free_ms[0], arrived_ms[request]) + service_ms[request]
        heapq.heapreplace(free_ms, left_ms[request])
    return left_ms


def _find_p99(answered: AnsweredRequests, left_ms: Floats) -> float:
    import numpy as np

    return float(np.quantile((left_ms - answered.due_ms)[answered.is_counted], 0.99))
