"""A model within a merged model: its requests become requests of the merged model, and the answers its own again.

A request has its own inputs, and the merged model's other inputs without rows. Queue, batches and workers belong to the
merged model, which is like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpuprof.domain.deployment import PublicName
from gpuprof.graph.merged_model import MergedMember
from gpuprof.serving.router.infer_request import Urgency
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.inference import Inference, InputTensor, OutputTensor
from gpuprof.serving.transport.metadata import ModelSpec
from gpuprof.serving.watch.statistics import ModelStatistics


@dataclass(frozen=True, slots=True)
class PlannedMember:
    """A model of a merged model: its public name, its SLO, and its inputs and outputs in the merged file."""

    public: PublicName
    slo_ms: float
    tensors: MergedMember

    def spec(self, merged: ModelSpec) -> ModelSpec:
        """Return the inputs and outputs of the model, selected from the merged model's."""
        inputs = [replace(merged.inputs[merged.input_index[v.merged]], name=v.name) for v in self.tensors.inputs]
        outputs = [replace(merged.outputs[merged.output_index[v.merged]], name=v.name) for v in self.tensors.outputs]
        return ModelSpec(
            self.public.name, self.public.version, merged.platform, tuple(inputs), tuple(outputs), merged.max_batch
        )


class MemberModel(ServedModel):
    """Translates the requests of a member of the model ``merged``, whose counts it shares."""

    def __init__(self, merged: ServedModel, member: PlannedMember) -> None:
        super().__init__(merged.name, member.slo_ms, merged.arena, merged.reserve.percentile, member.public)
        self._whole = merged
        self.replicas = merged.replicas
        self.spec = member.spec(merged.spec)
        self._inputs = {value.merged: position for position, value in enumerate(member.tensors.inputs)}
        self._outputs = [merged.spec.output_index[value.merged] for value in member.tensors.outputs]

    def submit(self, inference: Inference) -> None:
        """Queue a request with the merged model. Raises `RefusedError`: 503, when it could not be answered in time."""
        member_inputs, inputs = inference.inputs, self._whole.spec.inputs
        inference.inputs = [
            InputTensor([0, *tensor.shape[1:]], b"") if position is None else member_inputs[position]
            for tensor, position in ((tensor, self._inputs.get(tensor.name)) for tensor in inputs)
        ]
        # All outputs of the member are requested: in a batch, their presence shows which requests have rows in them.
        positions = range(len(self._outputs)) if inference.wanted is None else inference.wanted
        inference.wanted = self._outputs
        # Apart from the batch, merged models have fixed shapes: all requests may share a batch.
        inference.batch_key = None
        answer = inference.on_done

        def on_done(inference: Inference, outputs: list[OutputTensor], slot: Slot | None) -> None:
            by_position = {tensor.position: tensor for tensor in outputs}
            answer(inference, [replace(by_position[self._outputs[place]], position=place) for place in positions], slot)

        inference.on_done = on_done
        self._whole.submit(inference)

    def list_statistics(self) -> list[ModelStatistics]:
        """Return the parts of the merged model's statistics."""
        return self._whole.list_statistics()

    def refuse_early(self, urgency: Callable[[], Urgency], client: str = "") -> None:
        """Refuse a request before its tensors are received; see `ServedModel.refuse_early`."""
        self._whole.refuse_early(urgency, client)
