"""The router: all served models behind a common entry for all protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from types import MappingProxyType

from gpuprof.domain.deployment import PublicName, version_order
from gpuprof.graph.merged_model import MergedMember
from gpuprof.serving.router.infer_request import Urgency
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Arena, Slot
from gpuprof.serving.transport.datatypes import ModelSpec
from gpuprof.serving.transport.inference import Inference, InputTensor, OutputTensor, RefusedError
from gpuprof.serving.watch.statistics import ModelStatistics, SpanTracer


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
        """Queue a request with the merged model. Raises `RefusedError`: 503, if it would miss its deadline."""
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


class Router:
    """Finds models by name and version. ``tracer``: records the requests' outcomes."""

    def __init__(self, arena: Arena, tracer: SpanTracer | None = None) -> None:
        self.arena = arena
        self.tracer = tracer
        #: By public name and version: the members of a merged model in its place.
        self.models: dict[str, dict[str, ServedModel]] = {}
        self._served: list[ServedModel] = []
        self.faults: Mapping[PublicName, str] = {}  #: Reasons why models of the map are not served.
        self.draining = False
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the set of models has changed."""
        self._listeners.append(listener)

    def publish(
        self,
        models: Sequence[ServedModel],
        members: Mapping[str, Sequence[PlannedMember]] = MappingProxyType({}),
        faults: Mapping[PublicName, str] = MappingProxyType({}),
    ) -> None:
        """Serve exactly these models from now on.

        ``members``: by merged model, the models in its place; ``faults``: by model, the reason why it is not served.
        """
        self._served, self.models, self.faults = list(models), {}, faults
        for model in models:
            model.tracer = self.tracer
            entries: list[ServedModel] = [MemberModel(model, member) for member in members.get(model.name, ())]
            for entry in entries or [model]:
                self.models.setdefault(entry.public.name, {})[entry.public.version] = entry
        for listener in self._listeners:
            listener()

    def find_by_map_name(self, model: str) -> ServedModel | None:
        """Return the served model with this name in the map, or None."""
        return next((served_model for served_model in self.list_models() if served_model.name == model), None)

    def find(self, name: str, version: str = "") -> ServedModel:
        """Return a model by its public name; without a version the newest.

        Raises `RefusedError`: 404, or 503 for a model of the map that is not served.
        """
        versions = self.models.get(name, {})
        if version in versions:
            return versions[version]
        if versions and not version:
            return versions[max(versions, key=version_order)]
        for public, reason in self.faults.items():
            if public.name == name and version in ("", public.version):
                text = f"model {name!r} is not served: {reason}"
                raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, text, reason="not served")
        if versions:
            ordered = ", ".join(sorted(versions, key=version_order))
            text = f"model {name!r} has no version {version[:100]!r} (it has {ordered})"
        else:
            import difflib

            matches = difflib.get_close_matches(name[:100], list(self.models), n=1, cutoff=0.4)
            hint = f"did you mean {matches[0]!r}?" if matches else f"known: {', '.join(sorted(self.models))}"
            text = f"unknown model {name[:100]!r} ({hint})"
        raise RefusedError(HTTPStatus.NOT_FOUND, text)

    def list_models(self) -> list[ServedModel]:
        """Return every version of every model of the map, merged models among them."""
        return self._served

    def list_entries(self) -> list[ServedModel]:
        """Return every version of every model that clients can ask for."""
        return [model for versions in self.models.values() for model in versions.values()]

    @property
    def is_ready(self) -> bool:
        """Return whether every model has a live worker, and the router is not draining."""
        return not self.draining and all(model.is_ready for model in self.list_models())

    @property
    def in_flight(self) -> int:
        """Accepted requests without an answer."""
        return sum(model.in_flight for model in self.list_models())
