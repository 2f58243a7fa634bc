"""A replica: a queue in front of its workers, and the batching rule between them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from gpuprof.rules.batching import batch_size_now, wait_limit_ms
from gpuprof.rules.routing import (
    ReplicaLoad,
    correct_expected_ms,
    decay_count,
    extend_wait_ms,
    forecast_joining,
    is_retry_limit_reached,
    must_be_alone,
    update_mean_left_ms,
)
from gpuprof.serving.router.request_queue import Flow, RequestQueue
from gpuprof.serving.router.worker import BatchAnswer, SentBatch, ServedWorker
from gpuprof.serving.transport.datatypes import ModelSpec
from gpuprof.serving.transport.inference import Inference, RefusedError, StageTimes, bad_request
from gpuprof.serving.watch.statistics import ModelStatistics

#: A worker may hold as many short batches as it runs in this time: the router can send more only once per iteration of
#: its event loop, which takes this long under load with large bodies. Models with a short SLO get fewer: a batch
#: already sent precedes any later request of higher priority.
_PREFETCH_MS, _PREFETCH_SLOS = 5.0, 0.1


_WEIGHT = 0.05  # weight of a batch in the running means
#: Maximum ratio of measured to expected time in the means; its reciprocal is the minimum.
_CLIP = 2.0
#: Time without an observation after which a correction begins to fade, and the half-life of the fading.
_SILENCE_S, _HALF_LIFE_S = 1.0, 1.5


class LatencyTable:
    """Expected time of a batch of 1, 2, … rows: the map's predictions, corrected by recent measurements.

    There are two corrections: a factor for batches of all sizes, since most slow-downs affect all sizes, and a further
    factor for each size. Every observation changes them by a bounded amount, however long the batch took: a worker that
    was suspended for a second says nothing about the next batch. Without observations the corrections fade, so that
    requests refused for a wrong estimate are admitted again; and a request that finds a worker idle is always admitted
    (`gpuprof.rules.routing.is_refused`), which gives a new observation.

    ``batch``: largest batch; ``predicted_ms``: by number of rows; None: unknown until measured; ``now``: seconds on any
    clock that goes on.
    """

    def __init__(self, batch: int, predicted_ms: Sequence[float] | None = None, now: float = 0.0) -> None:
        base = list(predicted_ms or ())[:batch]
        self._base = base + [base[-1] if base else 0.0] * (batch - len(base))
        self._is_predicted = bool(base) and base[0] > 0.0
        self._common = _Correction(now)
        self._by_rows = [_Correction(now) for _ in range(batch)]
        self._times = list(self._base)
        self._fresh_until = now

    def times_ms(self, now: float) -> Sequence[float]:
        """Return the times by rows, up to the largest batch; 0 for unknown times."""
        if now >= self._fresh_until:
            factor = self._common.at(now)
            self._times = [time * factor * ratio.at(now) for time, ratio in zip(self._base, self._by_rows, strict=True)]
            self._fresh_until = now + 0.01  # corrections take effect after 10 ms at most
        return self._times

    def observe(self, rows: int, ms: float, now: float) -> None:
        """Record that a batch of ``rows`` took ``ms``; unknown sizes are assumed in proportion."""
        if not self._base[rows - 1]:
            for size in range(1, len(self._base) + 1):
                self._base[size - 1] = self._base[size - 1] or ms * max(1.0, size / rows)
            self._fresh_until = now
        base, expected = self._base[rows - 1], self.times_ms(now)[rows - 1]
        if base <= 0.0:
            return
        if expected > 0.0:
            ms = min(max(ms, expected / _CLIP), expected * _CLIP)
        factor = self._common.observe(ms / base, now)
        self._by_rows[rows - 1].observe(ms / base / factor, now)
        if not self._is_predicted:  # without predictions the corrections fade towards measured times
            self._base = [(1.0 + _WEIGHT * (factor - 1.0)) * time for time in self._base]


class _Correction:
    """A running mean of a ratio, fading to 1 without observations."""

    __slots__ = ("_ratio", "_seen")

    def __init__(self, now: float) -> None:
        self._ratio = 1.0
        self._seen = now

    def at(self, now: float) -> float:
        """Return the factor at a time: the last mean, faded by the time since the last observation."""
        silent_s = now - self._seen - _SILENCE_S
        if silent_s <= 0.0 or self._ratio == 1.0:
            return self._ratio
        return 1.0 + (self._ratio - 1.0) * math.exp2(-silent_s / _HALF_LIFE_S)

    def observe(self, ratio: float, now: float) -> float:
        """Record a ratio of measured to predicted time; return the updated mean."""
        before = self._ratio if now <= self._seen + _SILENCE_S else self.at(now)
        self._ratio = before + _WEIGHT * (ratio - before)
        self._seen = now
        return self._ratio


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """Batching parameters of a replica."""

    name: str  #: ``"resnet50/0"``.
    batch: int
    max_wait_ms: float
    latency_ms: tuple[float, ...] | None  #: Predicted time of a batch of 1, 2, … ``batch``.
    rate_rps: float = 0.0  #: Planned request rate.
    #: ``place``, ``mig``: Node and device; MIG instance or empty. Shown in logs and metrics.
    place: str = ""
    mig: str = ""
    share_pct: float = 100.0  #: Share of the device or MIG instance for all its workers together.


class ReplicaOwner(Protocol):
    """The receiver of a replica's answers, refusals and reassigned requests."""

    def answer(self, inference: Inference, answer: BatchAnswer, position: int) -> None:
        """Take an answered inference, whose outputs are at ``position`` of the answer."""

    def refuse(self, inference: Inference, refusal: RefusedError) -> None:
        """Refuse an accepted inference that cannot be answered."""

    def reassign(self, inferences: list[Inference]) -> None:
        """Send accepted inferences to other replicas, because the replica has no worker left."""

    def on_worker_ready(self) -> None:
        """Serve through the replica again: one of its workers is ready."""


class ServedReplica:
    """Queues the requests of a replica and feeds its workers.

    ``workers``: one for each process; ``owner``: takes answers, refusals and requests for other replicas.
    """

    def __init__(
        self,
        plan: ReplicaPlan,
        workers: list[ServedWorker],
        owner: ReplicaOwner,
        statistics: ModelStatistics,
    ) -> None:
        self.plan = plan
        self.workers = workers
        self.statistics = statistics
        self.latency = LatencyTable(plan.batch, plan.latency_ms, time.monotonic())
        self._owner = owner
        self._queue = RequestQueue()
        self._timer: asyncio.TimerHandle | None = None
        self._arrival_count = self._refused_count = 0.0
        self._wait_ms = plan.max_wait_ms
        self._is_held = False
        self._counted_at = 0.0
        self._joining = 0
        self._left_ms = 0.0
        self._allowed_ms = math.inf
        self._loop = asyncio.get_running_loop()
        self._stages_ahead = any(worker.stages_ahead for worker in workers)
        for worker in workers:
            worker.replica = self

    @property
    def is_alive(self) -> bool:
        """Return whether any worker is ready."""
        return True in [worker.is_ready for worker in self.workers]

    @property
    def specs(self) -> list[ModelSpec]:
        """Inputs and outputs of the model, as each live worker reports them."""
        return [worker.spec for worker in self.workers if worker.spec is not None]

    @property
    def in_flight(self) -> int:
        """Requests queued or at a worker."""
        return len(self._queue) + sum(worker.requests for worker in self.workers)

    @property
    def is_occupied(self) -> bool:
        """A worker that is a process, started by the machine process of its node."""
        return bool(self._queue) or not any(worker.is_idle for worker in self.workers)

    @property
    def waiting_rows(self) -> int:
        """Number of batch rows in the waiting requests."""
        return self._queue.rows

    def load(self, now: float, priority: int, deadline_ms: float, flow: Flow = ("", False)) -> ReplicaLoad:
        """Return the work ahead of a new request of this priority, deadline and flow, for the routing rule."""
        queue = self._queue
        rows_ahead, oldest, oldest_deadline = 0, 0.0, math.inf
        if queue.rows:
            rows_ahead = queue.rows_before(priority, flow)
            oldest, oldest_deadline = 1000.0 * (now - queue.oldest.arrived), queue.oldest.deadline_ms
        busy, idle = [], 0
        for worker in self.workers:
            if worker.is_idle:
                busy.append(0.0)
                idle += 1
            elif worker.is_ready:
                busy.append(worker.busy_ms(now))
        times_ms = self.latency.times_ms(now)
        wait_ms = wait_limit_ms(self._wait_ms, deadline_ms, times_ms)
        joining = 0 if idle else self._joining
        return ReplicaLoad(rows_ahead, oldest, tuple(busy), times_ms, wait_ms, idle, joining, oldest_deadline)

    def record_arrival(self, now: float, load: ReplicaLoad, allowed_ms: float, is_refused: bool) -> None:
        """Count a request sent here by the routing rule, admitted if its answer takes at most ``allowed_ms``."""
        full_ms, elapsed_ms = load.latency_ms[-1], 1000.0 * (now - self._counted_at)
        self._allowed_ms = allowed_ms
        left = decay_count(1.0, elapsed_ms, full_ms)
        self._arrival_count = 1.0 + self._arrival_count * left
        self._refused_count = self._refused_count * left + is_refused
        counts = self._refused_count, self._arrival_count
        self._wait_ms = extend_wait_ms(self.plan.max_wait_ms, *counts, allowed_ms, load.latency_ms)
        if load.idle == 0 and load.busy_ms:
            self._left_ms = update_mean_left_ms(self._left_ms, min(load.busy_ms), self._arrival_count)
        self._counted_at = now

    def submit(self, inference: Inference, slo_ms: float = math.inf) -> None:
        """Queue a request by priority, then fairly among clients; send it at once if the queue is empty."""
        if not self._queue.rows and (worker := self._find_free_worker(inference.rows)) is not None:
            now = time.monotonic()
            limit_ms = wait_limit_ms(self._wait_ms, inference.deadline_ms, self.latency.times_ms(now))
            if batch_size_now(inference.rows, self.plan.batch, 1000.0 * (now - inference.arrived), limit_ms):
                self._send(worker, [inference], now)
                return
        self._queue.add(inference, find_flow(inference.client, inference.deadline_ms, slo_ms))
        self.send_batches()

    def requeue(self, inferences: list[Inference]) -> None:
        """Put accepted requests back at the head of the queue, in their order."""
        self._queue.put_first(inferences)
        self.send_batches()

    def add_reassigned(self, inference: Inference, position: int) -> None:
        """Insert an accepted request of another replica at ``position`` of the queue, without sending it yet."""
        self._queue.put_first([inference], position)

    def drop_cancelled(self) -> list[Inference]:
        """Remove and return requests whose client has disconnected."""
        return self._queue.remove(lambda inference: inference.cancelled)

    def empty(self) -> list[Inference]:
        """Remove and return all waiting requests."""
        return self._queue.remove(lambda _: True)

    def send_batches(self) -> None:
        """Send every batch that the rule allows, and set a timer for the next one."""
        while self._queue.rows:
            worker = self._find_free_worker(self._queue.rows)
            if worker is None:
                return
            now = time.monotonic()
            self._refuse_overtaken(worker.busy_ms(now), now)
            if not self._queue.rows:
                return
            oldest = self._queue.oldest
            if oldest.attempts:
                self._send(worker, self._queue.take(self.plan.batch), now)
                continue
            limit_ms = wait_limit_ms(self._wait_ms, oldest.deadline_ms, self.latency.times_ms(now))
            waited_ms = 1000.0 * (now - oldest.arrived)
            rows = batch_size_now(self.waiting_rows, self.plan.batch, waited_ms, limit_ms)
            if not rows:
                self._is_held = True
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_later(max(0.0, limit_ms - waited_ms) / 1000.0, self.send_batches)
                return
            self._send(worker, self._queue.take(rows), now)

    def _refuse_overtaken(self, busy_ms: float, now: float) -> None:
        """Refuse accepted requests that are late because other requests were inserted before them."""
        for inference in self._queue.remove_late(now, busy_ms + self.latency.times_ms(now)[-1]):
            text = "the request cannot be answered in time: others of higher priority, or of other clients, went first"
            status = HTTPStatus.SERVICE_UNAVAILABLE
            refusal = RefusedError(status, text, 0.0, overloaded=True, reason="overtaken")
            self._owner.refuse(inference, refusal)

    def _find_free_worker(self, rows: int) -> ServedWorker | None:
        """Return an idle worker, else the worker with the fewest batches that may receive a full batch in advance.

        A worker with its next batch at hand is not idle while its answer travels to the router and the next batch
        comes back. Batches are sent in advance only when there is a full batch for every process, so that requests
        are served in the order of arrival.
        """
        ready = 0
        for worker in self.workers:
            if worker.is_idle:
                return worker
            ready += worker.is_ready
        if rows < self.plan.batch * ready:
            return None
        if self._stages_ahead and self._queue.rows and self._queue.oldest.deaths:
            return None  # it must run alone, to show whether it kills workers
        prefetch_ms = min(_PREFETCH_MS, _PREFETCH_SLOS * self._allowed_ms)
        prefetching = [worker for worker in self.workers if worker.can_prefetch(prefetch_ms)]
        return min(prefetching, key=lambda worker: len(worker.sent), default=None)

    def _send(self, worker: ServedWorker, inferences: list[Inference], now: float) -> None:
        rows = sum([inference.rows for inference in inferences])
        sent_rows, times_ms = min(rows, self.plan.batch), self.latency.times_ms(now)
        for inference in inferences:
            inference.attempts += 1
            inference.sent = now
            inference.replica = self.plan.name
            if self._is_held:
                inference.expected_ms = 1000.0 * (now - inference.arrived) + times_ms[sent_rows - 1]
            elif inference.expected_rows:
                expected_rows = min(inference.expected_rows, len(times_ms))  # by a replica with larger batches, maybe
                inference.expected_ms = correct_expected_ms(inference.expected_ms, expected_rows, sent_rows, times_ms)
        self._is_held = False
        expected_ms = times_ms[sent_rows - 1]
        worker.send(inferences, rows, expected_ms, now)
        if self.plan.batch > 1:  # a batch of 1 has no joining requests
            count = decay_count(self._arrival_count, 1000.0 * (now - self._counted_at), times_ms[-1])
            processes = len(self.workers)
            self._joining = forecast_joining(count, expected_ms, times_ms, processes, self._left_ms, self._allowed_ms)

    def on_worker_ready(self) -> None:
        """Assign waiting requests to a worker that became ready."""
        self._owner.on_worker_ready()
        self.send_batches()

    def on_batch_done(self, batch: SentBatch, answer: BatchAnswer) -> None:
        """Deliver the answers of a batch, then count them: neither worker nor clients wait for that."""
        if self._queue.rows:
            self.send_batches()  # before the answers are written: the worker must not wait for them
        now, now_ms = time.monotonic(), int(time.time() * 1000)
        stages = answer.gather_ns, answer.infer_ns, answer.scatter_ns
        for position, inference in enumerate(batch.inferences):
            inference.times = StageTimes(int(1e9 * (inference.sent - inference.arrived)), *stages)
            self._owner.answer(inference, answer, position)
        statistics = self.statistics
        statistics.add_batch(batch.rows, len(batch.inferences), *stages)
        for inference in batch.inferences:
            took_s = now - inference.arrived
            in_slo = 1000.0 * took_s <= inference.deadline_ms
            statistics.add_answer(inference.rows, int(1e9 * took_s), inference.times.queue, in_slo, now_ms)
        self.latency.observe(min(batch.rows, self.plan.batch), batch.took_ms, now)

    def on_batch_failed(self, batch: SentBatch, message: str) -> None:
        """Refuse the request that failed; retry each request of a batch of several alone."""
        if len(batch.inferences) == 1:
            self._owner.refuse(batch.inferences[0], bad_request(f"the model failed on these inputs: {message}"))
            self.send_batches()
            return
        for inference in batch.inferences:
            inference.alone = True
        self.requeue(batch.inferences)

    def on_batches_lost(self, batches: list[SentBatch]) -> None:
        """Retry the requests of a worker that died, at another replica if this replica has no worker left."""
        inferences = [inference for batch in batches for inference in batch.inferences]
        # Only the running batch can have killed the worker, or the next batch if its inputs were being copied.
        for batch in batches[: 2 if self._stages_ahead else 1]:
            for inference in batch.inferences:
                inference.deaths += 1
        retries = []
        for inference in inferences:
            if is_retry_limit_reached(inference.deaths):
                message = f"{inference.deaths} workers ended while they ran this request"
                self._owner.refuse(inference, RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, message))
            else:
                inference.alone = inference.alone or must_be_alone(inference.deaths)
                retries.append(inference)
        self.statistics.retried += len(retries)
        if self.is_alive:
            self.requeue(retries)
        else:
            self._owner.reassign([*retries, *self.empty()])


def find_flow(client: str, deadline_ms: float, slo_ms: float) -> Flow:
    """Return the flow of a request in fair queueing; deadlines longer than the SLO form a client's second flow."""
    return client, deadline_ms > slo_ms
