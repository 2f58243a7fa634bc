"""A model as the router serves it: its replicas, the choice among them, and its statistics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus

from gpuprof.domain.public_name import PublicName
from gpuprof.rules.routing import (
    ReplicaLoad,
    RoutingRule,
    expect_rows,
    expected_finish_ms,
    finish_ms,
    is_refused,
    makes_oldest_late,
)
from gpuprof.serving.router.infer_request import InferRequest, RequestBody, Urgency
from gpuprof.serving.router.known_requests import RequestReader
from gpuprof.serving.router.merged_replica import MemberReplica
from gpuprof.serving.router.reserve import Reserve
from gpuprof.serving.router.served_replica import ServedReplica, flow_of
from gpuprof.serving.router.worker_link import BatchAnswer
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import Inference, RefusedError
from gpuprof.serving.transport.metadata import ModelSpec
from gpuprof.serving.watch.statistics import ModelStatistics, sum_statistics
from gpuprof.serving.watch.tracing import RequestTracer

#: A replica of one model, or what a model sees of one that serves several.
AnyReplica = ServedReplica | MemberReplica
#: What a request may ask for at most, in ms and in SLOs; the longer counts.
_LONGEST_MS, _LONGEST_SLOS = 10_000.0, 10.0
_MAX_WAITING = 20_000  # requests, whatever the SLO allows


class ServedModel:
    """Routes the requests of one model.

    Parameters
    ----------
    percentile : float
        Of the latencies, that the SLO is for.
    public : PublicName or None
        As clients know it; None: by its name, version 1.
    """

    def __init__(
        self,
        name: str,
        slo_ms: float,
        rule: RoutingRule,
        arena: Arena,
        percentile: float = 99.0,
        public: PublicName | None = None,
    ) -> None:
        self.name = name
        self.public = PublicName(name) if public is None else public
        self.slo_ms = slo_ms
        self.replicas: list[AnyReplica] = []
        self.tracer: RequestTracer | None = None
        self._counts = ModelStatistics()
        self._leaving: list[AnyReplica] = []
        self._rule = rule
        self._reserve = Reserve(percentile, time.monotonic())
        self._arena = arena
        self._loop = asyncio.get_running_loop()
        self._unassigned: list[Inference] = []
        self._spec: ModelSpec | None = None
        self._reader: RequestReader | None = None

    @property
    def spec(self) -> ModelSpec:
        """Inputs and outputs; known once a worker is ready."""
        assert self._spec is not None
        return self._spec

    @spec.setter
    def spec(self, spec: ModelSpec) -> None:
        """Set them once a worker has said them."""
        self._spec, self._reader = spec, RequestReader(spec)

    def read_request(self, body: RequestBody) -> InferRequest:
        """Read and check a request of HTTP. Raises `RefusedError`: 400, saying what is wrong."""
        assert self._reader is not None
        return self._reader.read_request(body)

    @property
    def percentile(self) -> float:
        """Of the latencies, that the SLO is for; the reserve is learned for it."""
        return self._reserve.percentile

    @percentile.setter
    def percentile(self, percentile: float) -> None:
        """Learn the reserve for another one."""
        self._reserve.percentile = percentile

    @property
    def is_ready(self) -> bool:
        """Whether any replica lives."""
        return any(replica.is_alive for replica in self.replicas)

    @property
    def statistics(self) -> ModelStatistics:
        """What was counted here and by all replicas, those that were retired included."""
        return sum_statistics(self.counts())

    def counts(self) -> list[ModelStatistics]:
        """Return what makes up `statistics`: what was counted here, and by each replica."""
        return [self._counts, *(replica.statistics for replica in (*self.replicas, *self._leaving))]

    def retire_replica(self, replica: AnyReplica) -> None:
        """Give a replica no more requests; those that wait there go to others if there are others."""
        self.replicas.remove(replica)
        self._leaving.append(replica)
        if self.is_ready:
            self.reassign(replica.empty())

    def forget_replica(self, replica: AnyReplica) -> None:
        """Forget a replica that has answered what it had, and keep what it has counted."""
        self._leaving.remove(replica)
        self._counts.add(replica.statistics)

    def slowdowns(self, now: float) -> list[float]:
        """Return how many times as long as planned a full batch is expected to take at each replica that has a plan."""
        return [
            replica.estimates_ms(now)[-1] / planned[-1]
            for replica in self.replicas
            if (planned := replica.plan.latency_ms) and planned[-1] > 0.0
        ]

    @property
    def in_flight(self) -> int:
        """Requests that are accepted and not yet answered."""
        return len(self._unassigned) + sum(replica.in_flight for replica in (*self.replicas, *self._leaving))

    def submit(self, inference: Inference) -> None:
        """Queue a request with the replica that the rule chooses.

        Raises `RefusedError`: 503, when it could not be answered in time.
        """
        self._counts.arrived += 1
        try:
            self._place(inference)
        except RefusedError as refusal:
            self._counts.refused += 1
            if self.tracer is not None:
                self.tracer.record_refusal(self.name, inference, refusal)
            raise

    def deadline_ms(self, timeout_ms: float | None) -> float:
        """Return until when a request is to be answered that gives its answer so long; None: the model's SLO.

        A request may wait for ten times the SLO, or ten seconds: who waits for an hour keeps the queue from others.
        """
        if timeout_ms is None:
            return self.slo_ms
        return min(timeout_ms, max(_LONGEST_MS, _LONGEST_SLOS * self.slo_ms))

    def foresee(self, urgency: Callable[[], Urgency], client: str = "", waited_ms: float = 0.0) -> None:
        """Refuse a request before its tensors are received if `submit` would refuse it, whichever replica it chose.

        Receiving them is most of what a refusal costs. A request that is traced is received, so that its span is told.
        Raises `RefusedError`: 503, when it could not be answered in time.

        Parameters
        ----------
        urgency : callable
            Returns how urgent it is; asked only where that matters.
        client : str
            Who sends it.
        waited_ms : float
            For how long the router has not read on. Where that alone makes it late it is refused by idle workers, too.
        """
        alive = [replica for replica in self.replicas if replica.is_alive]
        if self.tracer is not None or (not alive and not waited_ms):
            return
        if not alive:
            self._counts.arrived += 1
            self._counts.refused += 1
            raise self._no_worker()
        if not waited_ms and not all(replica.is_occupied for replica in alive):
            return
        now, asked = time.monotonic(), urgency()
        deadline_ms = self.deadline_ms(asked.timeout_ms)
        flow = flow_of(client, deadline_ms, self.slo_ms)
        loads = [replica.load(now, asked.priority, deadline_ms, flow) for replica in alive]
        times_ms = [expected_finish_ms(load) for load in loads]
        soonest_ms = min(times_ms)
        is_late = waited_ms > 0.0 and waited_ms + soonest_ms > self._allowed_ms(deadline_ms, now)
        if is_late or all(self._refuses(load, soonest_ms, waited_ms, deadline_ms, now) for load in loads):
            soonest = times_ms.index(soonest_ms)
            self._note_arrival(alive[soonest], loads[soonest], now, refused=deadline_ms >= self.slo_ms)
            self._counts.arrived += 1
            self._counts.refused += 1
            raise overload_refusal(self.name, waited_ms + soonest_ms, deadline_ms)

    def _place(self, inference: Inference) -> None:
        now = time.monotonic()
        alive = self._able(inference.rows)
        if not alive:
            raise self._no_worker()
        loads = self._loads(alive, inference, now)
        waited_ms, deadline_ms = 1000.0 * (now - inference.arrived), inference.deadline_ms
        chosen = self._choose(loads, waited_ms, deadline_ms, now) if len(loads) > 1 else 0
        load, replica = loads[chosen], alive[chosen]
        rows = expect_rows(load.waiting, load.joining, len(load.latency_ms))
        wait_ms = load.max_wait_ms
        expected_ms = finish_ms(load.waiting, load.oldest_wait_ms, load.busy_ms, rows, load.latency_ms, wait_ms)
        refused = self._refuses(load, expected_ms, waited_ms, deadline_ms, now)
        self._note_arrival(replica, load, now, refused and deadline_ms >= self.slo_ms)
        inference.expected_ms, inference.expected_rows = waited_ms + expected_ms, rows
        if refused or replica.queued > _MAX_WAITING:
            raise overload_refusal(self.name, inference.expected_ms, deadline_ms)
        replica.submit(inference, self.slo_ms)

    def _no_worker(self) -> RefusedError:
        message = f"model {self.name!r} has no worker at the moment"
        return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, message, 1.0, reason="no worker")

    def _note_arrival(self, replica: AnyReplica, load: ReplicaLoad, now: float, refused: bool) -> None:
        """Count a request that was sent to a replica; one that asks for less time than the SLO tells of no overload.

        Else whoever asks for the impossible could make the batches of all others wait to be filled.
        """
        replica.note_arrival(now, load, self._allowed_ms(self.slo_ms, now), refused)

    def _choose(self, loads: Sequence[ReplicaLoad], waited_ms: float, deadline_ms: float, now: float) -> int:
        """Return the replica of the rule; where the request would make others late there, the fastest that takes it."""
        chosen = self._rule.choose(loads)
        if not self._spoils_batch(loads[chosen], now):
            return chosen
        times_ms = [expected_finish_ms(load) for load in loads]
        able = [
            position
            for position, load in enumerate(loads)
            if not self._refuses(load, times_ms[position], waited_ms, deadline_ms, now)
        ]
        return min(able, key=times_ms.__getitem__, default=chosen)

    def _loads(self, replicas: Sequence[AnyReplica], inference: Inference, now: float) -> list[ReplicaLoad]:
        flow = flow_of(inference.client, inference.deadline_ms, self.slo_ms)
        return [replica.load(now, inference.priority, inference.deadline_ms, flow) for replica in replicas]

    def _refuses(self, load: ReplicaLoad, expected_ms: float, waited_ms: float, deadline_ms: float, now: float) -> bool:
        if load.waiting == 0 and load.idle > 0:  # whatever is expected of it, as `is_refused` says
            return False
        reserve = self._reserve.at(now)
        is_late = is_refused(load.waiting, load.idle, expected_ms, waited_ms, deadline_ms, reserve)
        return is_late or self._spoils_batch(load, now)

    def _spoils_batch(self, load: ReplicaLoad, now: float) -> bool:
        if load.waiting == 0:
            return False
        allowed_ms = self._allowed_ms(load.oldest_deadline_ms, now)
        wait_ms = load.max_wait_ms
        return makes_oldest_late(load.waiting, load.oldest_wait_ms, load.busy_ms, load.latency_ms, wait_ms, allowed_ms)

    def _allowed_ms(self, deadline_ms: float, now: float) -> float:
        """Return by when a request with this deadline must be answered to be let in."""
        return (1.0 - self._reserve.at(now)) * deadline_ms

    def reassign(self, inferences: list[Inference]) -> None:
        """Place accepted requests whose replica has no worker left; they wait when nobody has one.

        Each goes before what waits there already, behind those adopted before it: accepted first, served first.
        """
        now = time.monotonic()
        taken: dict[AnyReplica, int] = {}
        for inference in inferences:
            alive = self._able(inference.rows)
            if alive:
                chosen = alive[self._rule.choose(self._loads(alive, inference, now))]
                chosen.take_over(inference, taken.get(chosen, 0))
                taken[chosen] = taken.get(chosen, 0) + 1
            else:
                self._unassigned.append(inference)
        for replica in taken:
            replica.go_on()

    def _able(self, rows: int) -> list[AnyReplica]:
        """Return the replicas that live and whose batch holds so many rows."""
        return [replica for replica in self.replicas if replica.is_alive and replica.plan.batch >= rows]

    def on_worker_ready(self) -> None:
        """Place what waited for a worker; called when one is ready."""
        unassigned, self._unassigned = self._unassigned, []
        if unassigned:
            self.reassign(unassigned)

    def answer(self, inference: Inference, answer: BatchAnswer, position: int) -> None:
        """Hand an answer to whoever waits for it."""
        now = time.monotonic()
        if self.tracer is not None:
            self.tracer.record_answer(self.name, inference)
        # Whoever writes the answer gives the slot back when it is written.
        slot, inference.output_slot = inference.output_slot, None
        inference.on_done(inference, answer.outputs[position], slot)
        inference.release(self._arena)
        # Only what went the way it was foreseen tells how far off the forecast was; its client does not wait for that.
        # Who asks for less time than the SLO is late by little, and would have others refused for it.
        if inference.attempts == 1 and not inference.overtaken and inference.deadline_ms >= self.slo_ms:
            took_ms = 1000.0 * (now - inference.arrived)
            self._reserve.observe(inference.expected_ms, took_ms, inference.deadline_ms, now, answer.requests)

    def refuse(self, inference: Inference, refusal: RefusedError) -> None:
        """Count an accepted request that cannot be answered, and say so to whoever waits for it."""
        self._counts.failed += 1
        self._counts.failed_ns += int(1e9 * (time.monotonic() - inference.arrived))
        if self.tracer is not None:
            self.tracer.record_refusal(self.name, inference, refusal)
        self.discard(inference)
        inference.on_refused(inference, refusal)

    def forget_cancelled(self) -> None:
        """Drop waiting requests whose client has gone."""
        for replica in self.replicas:
            for inference in replica.drop_cancelled():
                self.discard(inference)

    def discard(self, inference: Inference) -> None:
        """Give back everything that a request held."""
        inference.release(self._arena)
        if inference.output_slot is not None:
            self._arena.give_back(inference.output_slot)
            inference.output_slot = None


def overload_refusal(model: str, expected_ms: float, deadline_ms: float) -> RefusedError:
    """Return the refusal of a request whose answer is expected so long after its arrival."""
    message = f"model {model!r} is overloaded: the answer would take about {expected_ms:.0f} ms of {deadline_ms:.0f}"
    retry_s = max(0.0, expected_ms - deadline_ms) / 1000.0
    return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, message, retry_s, overloaded=True)
