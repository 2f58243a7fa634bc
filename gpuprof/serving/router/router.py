"""The router: all served models behind a common entry for all protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType

from gpuprof.domain.deployment import PublicName, version_order
from gpuprof.serving.router.member_model import MemberModel, PlannedMember
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.watch.tracing import RequestTracer

_COMPARED_CHARACTERS = 100


class Router:
    """Finds models by name and version. ``tracer``: records the requests' outcomes."""

    def __init__(self, arena: Arena, tracer: RequestTracer | None = None) -> None:
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

            # Comparison takes quadratic time in the length of the name, which the client chooses.
            matches = difflib.get_close_matches(name[:_COMPARED_CHARACTERS], list(self.models), n=1, cutoff=0.4)
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
