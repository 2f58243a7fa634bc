"""A replica that serves several models with a merged graph: a common queue, and a view for each model.

A request of a model enters the queue as a request of the whole graph: its own tensors, and tensors without rows for
the inputs of the other models. A batch holds the oldest requests that fit, of any model, so each model has its own
number of rows in it, possibly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from gpuprof.domain.public_name import PublicName
from gpuprof.serving.router.request_queue import Flow
from gpuprof.serving.router.served_replica import ReplicaOwner, ReplicaPlan, ServedReplica
from gpuprof.serving.router.worker_handle import WorkerHandle
from gpuprof.serving.router.worker_link import BatchAnswer
from gpuprof.serving.transport.inference import Inference, InputTensor, OutputTensor, RefusedError
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec
from gpuprof.serving.watch.statistics import BatchStatistics, ModelStatistics

if TYPE_CHECKING:
    from gpuprof.rules.routing import ReplicaLoad


@dataclass(frozen=True, slots=True)
class PlannedMember:
    """A model of a merged file."""

    model: str  #: Name of the model in the map.
    #: ``inputs``, ``outputs``: Its own name of each tensor, in its order, and the name in the merged file.
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    path: str | None = None  #: The model's own file, whose path may contain a version.

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """Return the inputs and outputs of the model, selected from the merged file's."""

        def pick_tensors(
            pairs: Sequence[tuple[str, str]], tensors: Sequence[TensorSpec], index: dict[str, int]
        ) -> tuple[TensorSpec, ...]:
            return tuple(replace(tensors[index[merged]], name=own) for own, merged in pairs)

        inputs = pick_tensors(self.inputs, whole.inputs, whole.input_index)
        outputs = pick_tensors(self.outputs, whole.outputs, whole.output_index)
        public = PublicName.of(self.model, self.path)
        return ModelSpec(public.name, public.version, whole.platform, inputs, outputs, whole.max_batch)


@dataclass(frozen=True, slots=True)
class _MemberRequest:
    """The fields of a member's inference that its form for the merged graph replaces."""

    member: MemberReplica
    inputs: list[InputTensor]
    wanted: list[int] | None
    batch_key: object


class MemberReplica:
    """The view of a merged replica for one of its models, with the interface of a `ServedReplica`."""

    def __init__(self, whole: MergedReplica, member: PlannedMember, model: ReplicaOwner) -> None:
        self.member = member
        self.model = model
        self.statistics = ModelStatistics()
        self.in_flight = 0
        self._whole = whole

    @property
    def plan(self) -> ReplicaPlan:
        """Batching of the merged replica."""
        return self._whole.plan

    @property
    def workers(self) -> list[WorkerHandle]:
        """The workers of the merged replica, which its models share."""
        return self._whole.workers

    @property
    def specs(self) -> list[ModelSpec]:
        """Inputs and outputs of the model, as each live worker reports them."""
        return [self.member.spec(worker.spec) for worker in self.workers if worker.spec is not None]

    @property
    def batches(self) -> dict[int, BatchStatistics]:
        """Times of the merged batches by their number of rows; predictions are of these."""
        return self._whole.batches

    def estimates_ms(self, now: float) -> Sequence[float]:
        """Return the expected time of a merged batch by its number of rows; 0 for unknown times."""
        return self._whole.estimates_ms(now)

    @property
    def is_alive(self) -> bool:
        """Return whether any worker is ready."""
        return self._whole.is_alive

    @property
    def waiting_rows(self) -> int:
        """Rows of this model in the queue."""
        return sum(inference.rows for inference in self._whole.waiting() if _member_request(inference).member is self)

    @property
    def queued(self) -> int:
        """Requests of all models that wait for a worker."""
        return self._whole.queued

    @property
    def is_occupied(self) -> bool:
        """Return whether a new request has to wait, for other requests or for a worker."""
        return self._whole.is_occupied

    def load(self, now: float, priority: int, deadline_ms: float, flow: Flow = ("", False)) -> ReplicaLoad:
        """Return the work of all models ahead of a new request, for the routing rule."""
        return self._whole.load(now, priority, deadline_ms, flow)

    def record_arrival(self, now: float, load: ReplicaLoad, allowed_ms: float, refused: bool) -> None:
        """Count a request sent here by the routing rule, admitted if its answer takes at most ``allowed_ms``."""
        self._whole.record_arrival(now, load, allowed_ms, refused)

    def submit(self, inference: Inference, slo_ms: float = math.inf) -> None:
        """Queue a request."""
        self._to_merged_request(inference)
        self._whole.submit(inference, slo_ms)

    def requeue(self, inferences: list[Inference]) -> None:
        """Put accepted requests back at the head of the queue, in their order."""
        for inference in inferences:
            self._to_merged_request(inference)
        self._whole.requeue(inferences)

    def add_reassigned(self, inference: Inference, position: int) -> None:
        """Insert an accepted request of another replica at ``position`` of the queue, without sending it yet."""
        self._to_merged_request(inference)
        self._whole.add_reassigned(inference, position)

    def send_batches(self) -> None:
        """Send all due batches."""
        self._whole.send_batches()

    def drop_cancelled(self) -> list[Inference]:
        """Remove and return the model's requests whose client has disconnected."""
        return self._remove_waiting(lambda inference: inference.cancelled)

    def empty(self) -> list[Inference]:
        """Remove and return all waiting requests of the model."""
        return self._remove_waiting(lambda inference: True)

    def _remove_waiting(self, which: object) -> list[Inference]:
        assert callable(which)
        mine = self._whole.remove(lambda inference: _member_request(inference).member is self and which(inference))
        for inference in mine:
            self.leave(inference)
        return mine

    def _to_merged_request(self, inference: Inference) -> None:
        """Turn a request of the model into a request of the merged graph."""
        whole = next(worker.spec for worker in self.workers if worker.spec is not None)
        inference.member_request = _MemberRequest(self, inference.inputs, inference.wanted, inference.batch_key)
        own = {merged: tensor for (_, merged), tensor in zip(self.member.inputs, inference.inputs, strict=True)}
        inference.inputs = [own.get(spec.name) or InputTensor([0, *spec.shape[1:]], b"") for spec in whole.inputs]
        positions = [whole.output_index[merged] for _, merged in self.member.outputs]
        wanted = range(len(positions)) if inference.wanted is None else inference.wanted
        inference.wanted = [positions[position] for position in wanted]
        # Apart from the batch, merged models have fixed shapes: all requests may share a batch.
        inference.batch_key = None
        self.in_flight += 1

    def leave(self, inference: Inference) -> None:
        """Turn a request of the merged graph back into a request of the model."""
        request = _member_request(inference)
        inference.inputs, inference.wanted, inference.batch_key = request.inputs, request.wanted, request.batch_key
        inference.member_request = None
        self.in_flight -= 1

    def outputs(self, tensors: Sequence[OutputTensor]) -> list[OutputTensor]:
        """Return outputs of the merged graph as the model's, by its own positions."""
        whole = next(worker.spec for worker in self.workers if worker.spec is not None)
        own = {whole.output_index[merged]: position for position, (_, merged) in enumerate(self.member.outputs)}
        return [replace(tensor, position=own[tensor.position]) for tensor in tensors]


class MergedReplica(ServedReplica):
    """The replica shared by its models; see `ServedReplica`."""

    def __init__(
        self, plan: ReplicaPlan, workers: list[WorkerHandle], members: Sequence[tuple[PlannedMember, ReplicaOwner]]
    ) -> None:
        self.members = tuple(MemberReplica(self, member, model) for member, model in members)
        super().__init__(plan, workers, _MemberOwners(self.members), ModelStatistics())

    def statistics_of(self, inference: Inference) -> ModelStatistics:
        """Return the statistics of the request's own model."""
        return _member_request(inference).member.statistics

    def count_batch(self, inferences: list[Inference], answer: BatchAnswer) -> None:
        """Count a batch, and for each model in it the model's own rows and requests."""
        super().count_batch(inferences, answer)
        for member in self.members:
            of_member = [inference for inference in inferences if _member_request(inference).member is member]
            if of_member:
                rows = sum(inference.rows for inference in of_member)
                member.statistics.add_batch(rows, len(of_member), answer.gather_ns, answer.infer_ns, answer.scatter_ns)


class _MemberOwners:
    """Passes answers, refusals and reassignments on to the requests' own models."""

    def __init__(self, members: Sequence[MemberReplica]) -> None:
        self._members = members

    def answer(self, inference: Inference, answer: BatchAnswer, position: int) -> None:
        """Hand on an answer, its outputs by the model's own positions."""
        member = _member_request(inference).member
        outputs = member.outputs(answer.outputs[position])
        member.leave(inference)
        member.model.answer(inference, replace(answer, outputs=[outputs]), 0)

    def refuse(self, inference: Inference, refusal: RefusedError) -> None:
        """Hand on a refusal."""
        member = _member_request(inference).member
        member.leave(inference)
        member.model.refuse(inference, refusal)

    def reassign(self, inferences: list[Inference]) -> None:
        """Give requests back to their models, which send them to other replicas."""
        for member in self._members:
            asked = [(one, one.member_request) for one in inferences]
            of_member = [
                one for one, request in asked if isinstance(request, _MemberRequest) and request.member is member
            ]
            for inference in of_member:
                member.leave(inference)
            member.model.reassign(of_member)

    def on_worker_ready(self) -> None:
        """Notify every model that a worker is ready."""
        for member in self._members:
            member.model.on_worker_ready()


def _member_request(inference: Inference) -> _MemberRequest:
    return cast("_MemberRequest", inference.member_request)
