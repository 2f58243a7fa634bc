"""A model as the router serves it: its replicas, the choice among them, and its statistics."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus

from gpuprof.routing import RoutingRule, expected_finish_ms, is_hopeless
from gpuprof.serving.router.merged_replica import MemberReplica
from gpuprof.serving.router.public_name import PublicName
from gpuprof.serving.router.replica import Replica
from gpuprof.serving.router.worker_link import BatchAnswer
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import Inference, RefusedError
from gpuprof.serving.transport.metadata import ModelSpec
from gpuprof.serving.watch.statistics import ModelStatistics, summed
from gpuprof.serving.watch.tracing import RequestTracer

#: A replica of one model, or what a model sees of one that serves several.
AnyReplica = Replica | MemberReplica
_MAX_WAITING = 20_000  # requests, whatever the SLO allows


class ServedModel:
    """Routes the requests of one model.

    Parameters
    ----------
    name : str
    slo_ms : float
    rule : RoutingRule
    arena : Arena
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
        self.percentile = percentile
        self.replicas: list[AnyReplica] = []
        self.tracer: RequestTracer | None = None
        self._counts = ModelStatistics()
        self._leaving: list[AnyReplica] = []
        self._rule = rule
        self._arena = arena
        self._loop = asyncio.get_running_loop()
        self._orphans: list[Inference] = []
        self._spec: ModelSpec | None = None

    @property
    def spec(self) -> ModelSpec:
        """Inputs and outputs; known once a worker is ready."""
        assert self._spec is not None
        return self._spec

    @spec.setter
    def spec(self, spec: ModelSpec) -> None:
        self._spec = spec

    @property
    def is_ready(self) -> bool:
        """Whether any replica lives."""
        return any(replica.is_alive for replica in self.replicas)

    @property
    def statistics(self) -> ModelStatistics:
        """What was counted here and by all replicas, those that were retired included."""
        return summed(self.counts())

    def counts(self) -> list[ModelStatistics]:
        """Return what makes up `statistics`: what was counted here, and by each replica."""
        return [self._counts, *(replica.statistics for replica in (*self.replicas, *self._leaving))]

    def leave(self, replica: AnyReplica) -> None:
        """Give a replica no more requests; those that wait there go to others if there are others."""
        self.replicas.remove(replica)
        self._leaving.append(replica)
        if self.is_ready:
            self.adopt(replica.empty())

    def left(self, replica: AnyReplica) -> None:
        """Forget a replica that has answered what it had, and keep what it has counted."""
        self._leaving.remove(replica)
        self._counts.add(replica.statistics)

    @property
    def in_flight(self) -> int:
        """Requests that are accepted and not yet answered."""
        return len(self._orphans) + sum(replica.in_flight for replica in (*self.replicas, *self._leaving))

    def submit(self, inference: Inference) -> None:
        """Queue a request with the replica that the rule chooses.

        Raises
        ------
        RefusedError
            503, when it could not be answered in time.
        """
        self._counts.arrived += 1
        try:
            self._place(inference)
        except RefusedError as refusal:
            self._counts.refused += 1
            if self.tracer is not None:
                self.tracer.refused(self.name, inference, refusal)
            raise

    def _place(self, inference: Inference) -> None:
        now = time.monotonic()
        alive = self._able(inference.rows)
        if not alive:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, f"model {self.name!r} has no worker at the moment", 1.0)
        loads = [replica.load(now) for replica in alive]
        chosen = self._rule.choose(loads)
        finish_ms = expected_finish_ms(loads[chosen])
        waited_ms = 1000.0 * (now - inference.arrived)
        if is_hopeless(finish_ms, waited_ms, inference.deadline_ms) and loads[chosen].waiting:
            raise overloaded(self.name, finish_ms + waited_ms - inference.deadline_ms)
        if loads[chosen].waiting > _MAX_WAITING:
            raise overloaded(self.name, finish_ms)
        alive[chosen].submit(inference)

    def adopt(self, inferences: list[Inference]) -> None:
        """Place accepted requests whose replica has no worker left; they wait when nobody has one.

        Each goes before what waits there already, behind those adopted before it: accepted first, served first.
        """
        now = time.monotonic()
        taken: dict[AnyReplica, int] = {}
        for inference in inferences:
            alive = self._able(inference.rows)
            if alive:
                chosen = alive[self._rule.choose([replica.load(now) for replica in alive])]
                chosen.take_over(inference, taken.get(chosen, 0))
                taken[chosen] = taken.get(chosen, 0) + 1
            else:
                self._orphans.append(inference)
        for replica in taken:
            replica.go_on()

    def _able(self, rows: int) -> list[AnyReplica]:
        """Return the replicas that live and whose batch holds so many rows."""
        return [replica for replica in self.replicas if replica.is_alive and replica.plan.batch >= rows]

    def revive(self) -> None:
        """Place what waited for a worker; called when one is ready."""
        orphans, self._orphans = self._orphans, []
        if orphans:
            self.adopt(orphans)

    def answer(self, inference: Inference, answer: BatchAnswer, position: int) -> None:
        """Hand an answer to whoever waits for it."""
        if self.tracer is not None:
            self.tracer.answered(self.name, inference)
        slot, inference.output_slot = inference.output_slot, None
        inference.on_done(inference, answer.outputs[position], slot)
        inference.release(self._arena)

    def refuse(self, inference: Inference, refusal: RefusedError) -> None:
        """Count an accepted request that cannot be answered, and say so to whoever waits for it."""
        self._counts.failed += 1
        self._counts.failed_ns += int(1e9 * (time.monotonic() - inference.arrived))
        if self.tracer is not None:
            self.tracer.refused(self.name, inference, refusal)
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


def overloaded(model: str, late_ms: float) -> RefusedError:
    """Return the refusal of a request that would be ``late_ms`` too late."""
    message = f"model {model!r} is overloaded: the answer would be {late_ms:.0f} ms too late"
    return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, message, max(0.0, late_ms / 1000.0), overloaded=True)
