"""A model in the router: its replicas, the choice among them, and its statistics."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType

from gpuprof.domain.deployment import PublicName
from gpuprof.rules.routing import (
    RESERVE,
    FastestFirst,
    ReplicaLoad,
    adapt_reserve,
    expect_rows,
    expected_finish_ms,
    finish_ms,
    is_refused,
    makes_oldest_late,
    relax_reserve,
)
from gpuprof.serving.router.infer_request import Urgency
from gpuprof.serving.router.served_replica import ServedReplica, find_flow
from gpuprof.serving.router.worker import BatchAnswer
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.datatypes import ModelSpec
from gpuprof.serving.transport.inference import Inference, RefusedError
from gpuprof.serving.watch.statistics import ModelStatistics, SpanTracer, sum_statistics

#: Limit of a request's timeout; the SLO where longer.
_MAX_TIMEOUT_MS = 10_000.0


class Reserve:
    """Holds a model's reserve between answers; see `gpuprof.rules.routing.adapt_reserve`.

    ``percentile``: the percentile of the SLO; ``now``: seconds on any monotonic clock.
    """

    def __init__(self, percentile: float, now: float = 0.0) -> None:
        self.percentile = percentile  # may change with the next map
        self._part = RESERVE
        self._changed = now

    def at(self, now: float) -> float:
        """Return the fraction of a deadline held in reserve; ``now`` is in seconds."""
        return relax_reserve(self._part, 1000.0 * (now - self._changed))

    def observe(self, expected_ms: float, latency_ms: float, deadline_ms: float, now: float, requests: int = 1) -> None:
        """Record the expected and the actual time of a request whose batch held ``requests`` requests."""
        before = self.at(now)
        late_part = 1.0 - self.percentile / 100.0
        after = adapt_reserve(before, expected_ms, latency_ms, deadline_ms, late_part, requests)
        if after != before:
            self._part, self._changed = after, now


class ServedModel:
    """Routes the requests of a model.

    ``percentile``: the percentile of the SLO; ``public``: name and version for clients; None: its name, version 1.
    """

    def __init__(
        self,
        name: str,
        slo_ms: float,
        arena: Arena,
        percentile: float = 99.0,
        public: PublicName | None = None,
    ) -> None:
        self.name = name
        self.public = PublicName(name) if public is None else public
        self.slo_ms = slo_ms
        self.replicas: list[ServedReplica] = []
        self.tracer: SpanTracer | None = None
        self._counts = ModelStatistics()
        self._retired: list[ServedReplica] = []
        self._rule = FastestFirst()
        self.reserve = Reserve(percentile, time.monotonic())
        self.arena = arena
        self._loop = asyncio.get_running_loop()
        self._unassigned: list[Inference] = []
        self.spec: ModelSpec  #: Inputs and outputs of the model, set once a worker is ready.

    @property
    def is_ready(self) -> bool:
        """Return whether any replica has a live worker."""
        return any(replica.is_alive for replica in self.replicas)

    @property
    def statistics(self) -> ModelStatistics:
        """The counts of this model and all its replicas, retired ones included."""
        return sum_statistics(self.list_statistics())

    def list_statistics(self) -> list[ModelStatistics]:
        """Return the parts of `statistics`: the model's own, and each replica's."""
        return [self._counts, *(replica.statistics for replica in (*self.replicas, *self._retired))]

    def retire_replica(self, replica: ServedReplica) -> None:
        """Stop sending requests to a replica, and move its waiting requests to other replicas if there are any."""
        self.replicas.remove(replica)
        self._retired.append(replica)
        if self.is_ready:
            self.reassign(replica.empty())

    def forget_replica(self, replica: ServedReplica) -> None:
        """Forget a retired replica without unanswered requests, but keep its counts."""
        self._retired.remove(replica)
        self._counts.add(replica.statistics)

    @property
    def in_flight(self) -> int:
        """Accepted requests without an answer."""
        return len(self._unassigned) + sum(replica.in_flight for replica in (*self.replicas, *self._retired))

    def submit(self, inference: Inference) -> None:
        """Queue a request at the replica that the routing rule chooses.

        Raises `RefusedError`: 503, when the request could not be answered in time.
        """
        self._counts.arrived += 1
        try:
            self._assign(inference)
        except RefusedError as refusal:
            self._counts.refused += 1
            if self.tracer is not None:
                self.tracer.record_refusal(self.name, inference, refusal)
            raise

    def limit_deadline_ms(self, timeout_ms: float | None) -> float:
        """Return the deadline of a request with this timeout; None: the model's SLO.

        The deadline is at most ten seconds, or the SLO if longer: requests with an hour's patience would fill the
        queue.
        """
        if timeout_ms is None:
            return self.slo_ms
        return min(timeout_ms, max(_MAX_TIMEOUT_MS, self.slo_ms))

    def refuse_early(self, urgency: Callable[[], Urgency], client: str = "") -> None:
        """Refuse a request before its tensors are received if `submit` would refuse it at every replica.

        Most of the cost of a refusal is receiving the tensors. With tracing, nothing is refused early, so that every
        request has a span. Raises `RefusedError`: 503, when the request could not be answered in time.

        ``urgency``: returns the request's timeout and priority; called only when needed; ``client``: the client that
        sends the request.
        """
        alive = [replica for replica in self.replicas if replica.is_alive]
        if self.tracer is not None or not alive or not all(replica.is_occupied for replica in alive):
            return
        now, hint = time.monotonic(), urgency()
        deadline_ms = self.limit_deadline_ms(hint.timeout_ms)
        flow = find_flow(client, deadline_ms, self.slo_ms)
        loads = [replica.load(now, hint.priority, deadline_ms, flow) for replica in alive]
        times_ms = [expected_finish_ms(load) for load in loads]
        soonest_ms = min(times_ms)
        if all(self._would_refuse(load, soonest_ms, 0.0, deadline_ms, now) for load in loads):
            index = times_ms.index(soonest_ms)
            self._record_arrival(alive[index], loads[index], now, is_refused=deadline_ms >= self.slo_ms)
            self._counts.arrived += 1
            self._counts.refused += 1
            raise overload_refusal(self.name, soonest_ms, deadline_ms)

    def _assign(self, inference: Inference) -> None:
        now = time.monotonic()
        alive = self._list_capable(inference.rows)
        if not alive:
            message = f"model {self.name!r} has no worker at the moment"
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, message, 1.0, reason="no worker")
        loads = self._describe_loads(alive, inference, now)
        waited_ms, deadline_ms = 1000.0 * (now - inference.arrived), inference.deadline_ms
        index = self._choose(loads, waited_ms, deadline_ms, now) if len(loads) > 1 else 0
        load, replica = loads[index], alive[index]
        rows = expect_rows(load.waiting, load.joining, len(load.latency_ms))
        wait_ms = load.max_wait_ms
        expected_ms = finish_ms(load.waiting, load.oldest_wait_ms, load.busy_ms, rows, load.latency_ms, wait_ms)
        is_refused = self._would_refuse(load, expected_ms, waited_ms, deadline_ms, now)
        self._record_arrival(replica, load, now, is_refused and deadline_ms >= self.slo_ms)
        inference.expected_ms, inference.expected_rows = waited_ms + expected_ms, rows
        if is_refused:
            raise overload_refusal(self.name, inference.expected_ms, deadline_ms)
        replica.submit(inference, self.slo_ms)

    def _record_arrival(self, replica: ServedReplica, load: ReplicaLoad, now: float, is_refused: bool) -> None:
        """Count a request sent to a replica, for its batch formation.

        A refused request with a deadline shorter than the SLO is no sign of overload (``is_refused`` is False):
        otherwise a client with impossible deadlines could make all other batches wait to be filled.
        """
        replica.record_arrival(now, load, self._allowed_ms(self.slo_ms, now), is_refused)

    def _choose(self, loads: Sequence[ReplicaLoad], waited_ms: float, deadline_ms: float, now: float) -> int:
        """Return the rule's replica, or the fastest other if it would make the oldest waiting request late."""
        index = self._rule.choose(loads)
        if not self._delays_oldest(loads[index], now):
            return index
        times_ms = [expected_finish_ms(load) for load in loads]
        able = [
            position
            for position, load in enumerate(loads)
            if not self._would_refuse(load, times_ms[position], waited_ms, deadline_ms, now)
        ]
        return min(able, key=times_ms.__getitem__, default=index)

    def _describe_loads(self, replicas: Sequence[ServedReplica], inference: Inference, now: float) -> list[ReplicaLoad]:
        flow = find_flow(inference.client, inference.deadline_ms, self.slo_ms)
        return [replica.load(now, inference.priority, inference.deadline_ms, flow) for replica in replicas]

    def _would_refuse(
        self, load: ReplicaLoad, expected_ms: float, waited_ms: float, deadline_ms: float, now: float
    ) -> bool:
        if load.waiting == 0 and load.idle > 0:  # admitted with any expected time, as in `is_refused`
            return False
        reserve = self.reserve.at(now)
        is_late = is_refused(load.waiting, load.idle, expected_ms, waited_ms, deadline_ms, reserve)
        return is_late or self._delays_oldest(load, now)

    def _delays_oldest(self, load: ReplicaLoad, now: float) -> bool:
        if load.waiting == 0:
            return False
        allowed_ms = self._allowed_ms(load.oldest_deadline_ms, now)
        wait_ms = load.max_wait_ms
        return makes_oldest_late(load.waiting, load.oldest_wait_ms, load.busy_ms, load.latency_ms, wait_ms, allowed_ms)

    def _allowed_ms(self, deadline_ms: float, now: float) -> float:
        """Return the longest expected latency with which a request with this deadline is still admitted."""
        return (1.0 - self.reserve.at(now)) * deadline_ms

    def reassign(self, inferences: list[Inference]) -> None:
        """Send accepted requests to other replicas; where no replica has a worker, they wait.

        They go to the heads of the queues in their own order: first admitted, first served.
        """
        now = time.monotonic()
        counts: dict[ServedReplica, int] = {}
        for inference in inferences:
            alive = self._list_capable(inference.rows)
            if alive:
                target = alive[self._rule.choose(self._describe_loads(alive, inference, now))]
                target.add_reassigned(inference, counts.get(target, 0))
                counts[target] = counts.get(target, 0) + 1
            else:
                self._unassigned.append(inference)
        for replica in counts:
            replica.send_batches()

    def _list_capable(self, rows: int) -> list[ServedReplica]:
        """Return the live replicas whose largest batch holds ``rows`` rows."""
        return [replica for replica in self.replicas if replica.is_alive and replica.plan.batch >= rows]

    def on_worker_ready(self) -> None:
        """Assign the requests that waited for a worker; called when a worker becomes ready."""
        unassigned, self._unassigned = self._unassigned, []
        if unassigned:
            self.reassign(unassigned)

    def answer(self, inference: Inference, answer: BatchAnswer, position: int) -> None:
        """Deliver an answer to its client."""
        now = time.monotonic()
        # The protocol releases the slot when it has written the answer.
        slot, inference.output_slot = inference.output_slot, None
        inference.on_done(inference, answer.outputs[position], slot)
        inference.release(self.arena)
        # The rest comes last, so that the client does not wait for it.
        if self.tracer is not None:
            self.tracer.record_answer(self.name, inference)
        # Only requests without retries or overtaking measure the error of the forecast. Requests with a deadline below
        # the SLO are excluded: they are often slightly late, and would cause other requests to be refused.
        if inference.attempts == 1 and not inference.overtaken and inference.deadline_ms >= self.slo_ms:
            latency_ms = 1000.0 * (now - inference.arrived)
            self.reserve.observe(inference.expected_ms, latency_ms, inference.deadline_ms, now, answer.requests)

    def refuse(self, inference: Inference, refusal: RefusedError) -> None:
        """Count an accepted request that cannot be answered, and notify its client."""
        self._counts.failed += 1
        self._counts.failed_ns += int(1e9 * (time.monotonic() - inference.arrived))
        if self.tracer is not None:
            self.tracer.record_refusal(self.name, inference, refusal)
        self.discard(inference)
        inference.on_refused(refusal)

    def forget_cancelled(self) -> None:
        """Drop waiting requests whose client has disconnected, including requests that wait for a worker."""
        cancelled = [inference for inference in self._unassigned if inference.cancelled]
        self._unassigned = [inference for inference in self._unassigned if not inference.cancelled]
        for replica in (*self.replicas, *self._retired):
            cancelled += replica.drop_cancelled()
        for inference in cancelled:
            self.discard(inference)

    def discard(self, inference: Inference) -> None:
        """Free all memory held by a request."""
        inference.release(self.arena)
        if inference.output_slot is not None:
            self.arena.give_back(inference.output_slot)
            inference.output_slot = None


def overload_refusal(model: str, expected_ms: float, deadline_ms: float) -> RefusedError:
    """Return the refusal of a request whose answer is expected after its deadline."""
    message = f"model {model!r} is overloaded: the answer would take about {expected_ms:.0f} ms of {deadline_ms:.0f}"
    retry_s = max(0.0, expected_ms - deadline_ms) / 1000.0
    return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, message, retry_s, overloaded=True)


#: Time of batches in nanoseconds and their number, by rows.
BatchTimes = Mapping[int, tuple[int, int]]
_NO_BATCHES: BatchTimes = MappingProxyType({})


def count_batches(replica: ServedReplica) -> BatchTimes:
    """Return, by rows, the number of batches and their nanoseconds in the worker."""
    return {rows: (b.count, b.gather + b.infer + b.scatter) for rows, b in list(replica.statistics.batches.items())}


def sum_times(replica: ServedReplica, earlier: BatchTimes) -> tuple[float, float]:
    """Return the nanoseconds of batches since ``earlier``: measured, and predicted for their sizes."""
    took_ns = predicted_ns = 0.0
    predicted_ms = replica.plan.latency_ms or ()
    for rows, (count, nanoseconds) in count_batches(replica).items():
        count_before, nanoseconds_before = earlier.get(rows, (0, 0))
        if rows <= len(predicted_ms):
            took_ns += nanoseconds - nanoseconds_before
            predicted_ns += 1e6 * (count - count_before) * predicted_ms[rows - 1]
    return took_ns, predicted_ns


def find_neighbour_slowdowns(
    models: Iterable[ServedModel], earlier: Mapping[str, BatchTimes] = MappingProxyType({})
) -> dict[str, dict[str, float]]:
    """Return, by model and neighbour, the slow-down of the model's batches over the map's prediction.

    Neighbours are the other replicas with batches on the same device or MIG instance. Slow-downs multiply, and the
    neighbours of a replica are assumed to slow it equally. ``earlier``: by replica, the batches to exclude.
    """
    ran = []
    for model in models:
        for replica in model.replicas:
            took_ns, predicted_ns = sum_times(replica, earlier.get(replica.plan.name, _NO_BATCHES))
            if min(took_ns, predicted_ns) > 0.0:
                ran.append((model.name, replica.plan, took_ns, predicted_ns))
    logs: defaultdict[tuple[str, str], float] = defaultdict(float)
    weights: defaultdict[tuple[str, str], float] = defaultdict(float)
    for model_name, plan, took_ns, predicted_ns in ran:
        place = plan.place, plan.mig
        neighbours = [
            name for name, peer, *_ in ran if plan.place and peer is not plan and (peer.place, peer.mig) == place
        ]
        for neighbour in neighbours:
            logs[model_name, neighbour] += predicted_ns * math.log(took_ns / predicted_ns) / len(neighbours)
            weights[model_name, neighbour] += predicted_ns
    slowdowns: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (model_name, neighbour), weight in weights.items():
        slowdowns[model_name][neighbour] = math.exp(logs[model_name, neighbour] / weight)
    return slowdowns
