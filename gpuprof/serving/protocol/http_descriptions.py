"""The HTTP addresses without inference: health, metrics, metadata and statistics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from gpuprof.domain.public_name import version_order
from gpuprof.serving.protocol import descriptions
from gpuprof.serving.protocol.http_message import CONTENT_JSON, HttpHead
from gpuprof.serving.protocol.http_route import HttpClient, ReceivedBody, Route, allow_only
from gpuprof.serving.protocol.protocol_figures import ProtocolFigures
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.inference import RefusedError

Answer = Callable[[HttpClient], None]


class HttpDescriptions:
    """Answers requests at all addresses other than inference.

    Parameters
    ----------
    router : Router
    find_figures : callable
        Returns the counts of the protocols.
    """

    def __init__(self, router: Router, find_figures: Callable[[], ProtocolFigures]) -> None:
        self._router = router
        self._find_figures = find_figures

    def find(self, words: list[str], method: str) -> Route | None:
        """Return the route for these path segments; None: none.

        Raises
        ------
        RefusedError
            404 for an unknown model, 405 for a method that the address does not have.
        """
        match words:
            case ["v2", "repository", "index"]:
                return allow_only("POST", method, _simple(self._index))
            case ["metrics"]:
                answer: Answer | None = self._metrics
            case ["openapi.json"]:
                answer = self._openapi
            case ["v2"]:
                answer = _answer_server_metadata
            case ["v2", "health", "live"]:
                answer = partial(_status, lambda: True)
            case ["v2", "health", "ready"]:
                answer = self._ready
            case ["v2", "models", "stats"]:
                answer = partial(self._statistics, "", "")
            case ["v2", "models", name, "versions", version, *rest]:
                answer = self._find_of_model(name, version, rest)
            case ["v2", "models", name, *rest]:
                answer = self._find_of_model(name, "", rest)
            case _:
                answer = None
        return None if answer is None else allow_only("GET", method, _simple(answer))

    def _find_of_model(self, name: str, version: str, rest: list[str]) -> Answer | None:
        self._router.find(name, version)
        match rest:
            case []:
                return partial(self._metadata, name, version)
            case ["ready"]:
                return partial(_status, lambda: self._router.find(name, version).is_ready)
            case ["config"]:
                return partial(self._config, name, version)
            case ["stats"]:
                return partial(self._statistics, name, version)
        return None

    def _ready(self, connection: HttpClient) -> None:
        """Answer whether every model is ready, with refusals, stalls of the router and accuracy of estimates.

        This needs no authentication, so no model is named: of the estimates, only the minimum and the maximum are
        reported, relative to the plan.
        """
        figures, refused = self._find_figures(), Counter[str]()
        for (_, _, reason), count in sorted(figures.refusals.items()):
            refused[reason] += count
        now = time.monotonic()
        slowdowns = [slowdown for model in self._router.list_models() for slowdown in model.list_slowdowns(now)]
        state = {
            "ready": self._router.is_ready,
            "refused": refused,
            "stalls": {
                "count": figures.stalls.count,
                "longest_s": round(figures.stalls.longest_s, 3),
                "longest_own_s": round(figures.stalls.longest_own_s, 3),
                "longest_computed_s": round(figures.stalls.longest_computed_s, 3),
            },
            "estimates": {
                "least_of_planned": round(min(slowdowns), 3) if slowdowns else None,
                "most_of_planned": round(max(slowdowns), 3) if slowdowns else None,
            },
            "edge_restarts": figures.edge_restarts,
        }
        connection.respond_json(200 if self._router.is_ready else 503, state)

    def _metrics(self, connection: HttpClient) -> None:
        from gpuprof.serving.protocol.metrics import CONTENT_TYPE, render_metrics

        connection.respond(200, CONTENT_TYPE, render_metrics(self._router, self._find_figures()))

    def _openapi(self, connection: HttpClient) -> None:
        from gpuprof.serving.protocol.openapi import document

        connection.respond_json(200, document(model.spec for model in self._router.list_entries()))

    def _index(self, connection: HttpClient) -> None:
        connection.respond_json(200, descriptions.repository_index(self._router.models))

    def _metadata(self, name: str, version: str, connection: HttpClient) -> None:
        model = self._router.find(name, version)
        versions = [version] if version else sorted(self._router.models[name], key=version_order)
        connection.respond_json(200, descriptions.model_metadata(model.spec, versions))

    def _config(self, name: str, version: str, connection: HttpClient) -> None:
        connection.respond_json(200, descriptions.model_config(self._router.find(name, version)))

    def _statistics(self, name: str, version: str, connection: HttpClient) -> None:
        chosen = descriptions.chosen_statistics(self._router.models, name, version)
        connection.respond_json(200, {"model_stats": chosen})


def _answer_server_metadata(connection: HttpClient) -> None:
    connection.respond_json(200, descriptions.server_metadata())


def _simple(answer: Answer) -> Route:
    """Return a route without a body."""

    def handle(connection: HttpClient, head: HttpHead, received: ReceivedBody) -> None:
        try:
            answer(connection)
        except RefusedError as refusal:
            connection.refuse(refusal)

    return Route(handle)


def _status(good: Callable[[], bool], connection: HttpClient) -> None:
    if good():
        connection.respond(200, CONTENT_JSON, b"")
    else:
        connection.respond_json(503, {"error": "not ready"})
