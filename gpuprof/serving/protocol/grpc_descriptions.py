"""The calls of the gRPC service that are no inference: what the server says of itself and of its models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from gpuprof.domain.public_name import version_order
from gpuprof.serving.protocol import descriptions
from gpuprof.serving.protocol.open_inference import message_class
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.inference import RefusedError


class DescriptionCalls:
    """Answers every call but inference."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._answers: dict[str, Callable[[Any], dict[str, Any]]] = {
            "ServerLive": lambda request: {"live": True},
            "ServerReady": lambda request: {"ready": router.is_ready},
            "ModelReady": self._model_ready,
            "ServerMetadata": lambda request: descriptions.server_metadata(),
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
        }

    def handler(self, method: Any) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return what answers the call that a descriptor names, given its message."""
        return partial(_answer, self._answers[method.name], message_class(method.output_type.name))

    def _model_ready(self, request: Any) -> dict[str, Any]:
        ready = False
        with suppress(RefusedError):
            ready = self._router.find(request.name, request.version).is_ready
        return {"ready": ready}

    def _model_metadata(self, request: Any) -> dict[str, Any]:
        model = self._router.find(request.name, request.version)
        known = sorted(self._router.models[request.name], key=version_order)
        return descriptions.model_metadata(model.spec, [request.version] if request.version else known)

    def _model_config(self, request: Any) -> dict[str, Any]:
        return {"config": descriptions.model_config(self._router.find(request.name, request.version))}

    def _model_statistics(self, request: Any) -> dict[str, Any]:
        if request.name:
            self._router.find(request.name, request.version)
        chosen = descriptions.chosen_statistics(self._router.models, request.name, request.version)
        return {"model_stats": chosen}

    def _repository_index(self, request: Any) -> dict[str, Any]:
        entries = descriptions.repository_index(self._router.models)
        return {"models": [entry for entry in entries if not request.ready or entry["state"] == "READY"]}


async def _answer(answer: Callable[[Any], dict[str, Any]], response: Any, request: Any, context: Any) -> Any:
    return response(**answer(request))
