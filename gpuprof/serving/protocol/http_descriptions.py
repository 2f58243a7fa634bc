"""The HTTP addresses without inference: health, metrics, metadata and statistics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from gpuprof.serving.protocol.descriptions import Descriptions
from gpuprof.serving.protocol.http_message import CONTENT_JSON, HttpHead
from gpuprof.serving.protocol.http_route import HttpClient, Route, allow_only, respond_json
from gpuprof.serving.router.infer_request import RequestBody
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.watch.statistics import ProtocolFigures

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
        self._described = Descriptions(router)
        self._find_figures = find_figures

    def find(self, words: list[str], method: str) -> Route | None:
        """Return the route for these path segments; None: none.

        Raises
        ------
        RefusedError
            404 for an unknown model, 405 for a method that the address does not have.
        """
        descriptions = self._described
        match words:
            case ["v2", "repository", "index"]:
                return allow_only("POST", method, _simple(_document(descriptions.list_repository)))
            case ["metrics"]:
                answer: Answer | None = self._metrics
            case ["v2"]:
                answer = _document(descriptions.describe_server)
            case ["v2", "health", "live"]:
                answer = partial(_status, lambda: True)
            case ["v2", "health", "ready"]:
                answer = self._ready
            case ["v2", "models", "stats"]:
                answer = _document(descriptions.describe_statistics)
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
                return _document(partial(self._described.describe_model, name, version))
            case ["ready"]:
                return partial(_status, lambda: self._router.find(name, version).is_ready)
            case ["config"]:
                return _document(partial(self._described.describe_config, name, version))
            case ["stats"]:
                return _document(partial(self._described.describe_statistics, name, version))
        return None

    def _ready(self, connection: HttpClient) -> None:
        """Answer whether every model is ready, with refusals, stalls of the router and accuracy of estimates.

        This needs no authentication, so no model is named: of the estimates, only the minimum and the maximum are
        reported, relative to the plan.
        """
        figures, refusals = self._find_figures(), Counter[str]()
        for (_, _, reason), count in sorted(figures.refusals.items()):
            refusals[reason] += count
        now = time.monotonic()
        slowdowns = [slowdown for model in self._router.list_models() for slowdown in model.list_slowdowns(now)]
        state = {
            "ready": self._router.is_ready,
            "models_not_served": len(self._router.faults.keys() - {m.public for m in self._router.list_entries()}),
            "refused": refusals,
            "stalls": {
                "count": figures.stalls.count,
                "longest_s": round(figures.stalls.longest_s, 3),
            },
            "estimates": {
                "least_of_planned": round(min(slowdowns), 3) if slowdowns else None,
                "most_of_planned": round(max(slowdowns), 3) if slowdowns else None,
            },
            "edge_restarts": figures.edge_restarts,
        }
        respond_json(connection, 200 if self._router.is_ready else 503, state)

    def _metrics(self, connection: HttpClient) -> None:
        from gpuprof.serving.protocol.metrics import CONTENT_TYPE, render_metrics

        connection.respond(200, CONTENT_TYPE, render_metrics(self._router, self._find_figures()))


def _document(describe: Callable[[], object]) -> Answer:
    """Return what answers with a JSON document."""
    return lambda connection: respond_json(connection, 200, describe())


def _simple(answer: Answer) -> Route:
    """Return a route without a body."""

    def handle(connection: HttpClient, head: HttpHead, body: RequestBody) -> None:
        try:
            answer(connection)
        except RefusedError as refusal:
            connection.refuse(refusal)

    return Route(handle)


def _status(check: Callable[[], bool], connection: HttpClient) -> None:
    if check():
        connection.respond(200, CONTENT_JSON, b"")
    else:
        respond_json(connection, 503, {"error": "not ready"})
