"""The Open Inference Protocol over HTTP: routes, and inference requests from body to answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from urllib.parse import unquote

from gpuprof.serving.protocol.descriptions import Descriptions
from gpuprof.serving.protocol.grpc_calls import GrpcCalls
from gpuprof.serving.protocol.http_connection import SCRATCH_BYTES, CachedHead, HttpConnection
from gpuprof.serving.protocol.http_message import (
    CONTENT_BINARY,
    CONTENT_JSON,
    HttpClient,
    HttpHead,
    Route,
    allow_only,
    is_own_host,
    respond_json,
)
from gpuprof.serving.protocol.inference_service import InferenceService, refuse_long_text
from gpuprof.serving.router.infer_request import (
    InferRequest,
    RequestBody,
    read_json_urgency,
    read_request,
    write_response,
)
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.server_settings import ServerSettings
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError, out_of_memory
from gpuprof.serving.transport.security import is_loopback
from gpuprof.serving.transport.wire import Buffer
from gpuprof.serving.watch.statistics import ProtocolFigures, StallMeter

_PUBLIC_PREFIX = b"/v2/health/"
_GRPC_PREFIXES = (b"/inference.", b"/grpc.")


class HttpApi:
    """Answers the requests of all connections.

    Parameters
    ----------
    router : Router
    settings : ServerSettings
    stalls : StallMeter or None
        Reported in the metrics and with readiness.

    Attributes
    ----------
    service : InferenceService
    grpc : GrpcCalls
    connections : set of HttpConnection
    turned_away : int
        Connections beyond the bound.
    cached_heads : dict
        Heads of requests with their routes, since most clients send the same head again and again.
    count_edge_restarts : callable
        Returns the number of restarts of the edge; None: no edge.
    """

    def __init__(self, router: Router, settings: ServerSettings, stalls: StallMeter | None = None) -> None:
        self.router, self.arena = router, router.arena
        self.max_connections = settings.max_connections
        self.scratch = bytearray(SCRATCH_BYTES)
        self.connections: set[HttpConnection] = set()
        self.turned_away = 0
        self.cached_heads: dict[bytes, CachedHead] = {}
        router.on_change(self.cached_heads.clear)
        self.count_edge_restarts: Callable[[], int | None] = lambda: None
        self.service = InferenceService(router, settings.max_body_bytes)
        self._security, self._max_body_bytes = settings.security, settings.max_body_bytes
        # The server's host names, beside addresses and names without a dot; None: any. With its own host name, a web
        # page could reach a server of the browser's machine (DNS rebinding). Behind the edge, Host is the client's
        # business.
        guarded = settings.http_through_edge or settings.security.token or not is_loopback(settings.host)
        self._own_hosts = None if guarded else {settings.host.lower(), "localhost.localdomain"}
        self._refusals: Counter[tuple[str, int, str]] = Counter()
        self._stalls = StallMeter(time.monotonic()) if stalls is None else stalls
        self._descriptions = Descriptions(router)
        self.grpc = GrpcCalls(self.service)

    def find_route(self, head: HttpHead) -> Route:
        """Return the route of a request.

        Raises
        ------
        RefusedError
            401 without the token, 404 for an unknown address, 405 for a wrong method, 421 for another server's name.
        """
        target = head.target
        if self._own_hosts is not None and not is_own_host(head.headers.get(b"host", b""), self._own_hosts):
            raise RefusedError(HTTPStatus.MISDIRECTED_REQUEST, "the header Host names another server")
        is_public = target.startswith(_PUBLIC_PREFIX) or target in self.grpc.public_paths
        if not is_public and not self._security.admits(head.headers.get(b"authorization", b"")):
            raise RefusedError(HTTPStatus.UNAUTHORIZED, "the request does not have the token of this server")
        return self._find_path(head)

    def _find_path(self, head: HttpHead) -> Route:
        path = head.target.split(b"?", 1)[0].decode("latin-1")
        words = [unquote(word) for word in path.strip("/").split("/")]
        method = "GET" if head.method == b"HEAD" else head.method.decode("latin-1")
        described, router = self._descriptions, self.router
        route = None
        match words:
            case ["v2", "models", name, "infer"]:
                return allow_only("POST", method, self._infer_route(router.find(name, "")))
            case ["v2", "models", name, "versions", version, "infer"]:
                return allow_only("POST", method, self._infer_route(router.find(name, version)))
            case ["v2", "repository", "index"]:
                return allow_only("POST", method, _document(described.list_repository))
            case _ if head.is_grpc and head.target.startswith(_GRPC_PREFIXES):
                return self.grpc.find_route(head.target)
            case ["metrics"]:
                route = Route(self._answer_metrics)
            case ["v2"]:
                route = _document(described.describe_server)
            case ["v2", "health", "live"]:
                route = _status(lambda: True)
            case ["v2", "health", "ready"]:
                route = _status(lambda: router.is_ready)
            case ["v2", "models", "stats"]:
                route = _document(described.describe_statistics)
            case ["v2", "models", name, "versions", version, *rest]:
                route = self._find_of_model(name, version, rest)
            case ["v2", "models", name, *rest]:
                route = self._find_of_model(name, "", rest)
        if route is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"there is nothing at {path[:100]!r}")
        return allow_only("GET", method, route)

    def _find_of_model(self, name: str, version: str, rest: list[str]) -> Route | None:
        described, router = self._descriptions, self.router
        router.find(name, version)
        match rest:
            case []:
                return _document(partial(described.describe_model, name, version))
            case ["ready"]:
                return _status(lambda: router.find(name, version).is_ready)
            case ["config"]:
                return _document(partial(described.describe_config, name, version))
            case ["stats"]:
                return _document(partial(described.describe_statistics, name, version))
        return None

    def _infer_route(self, model: ServedModel) -> Route:
        def refuse_early(text: Buffer, client: str) -> None:
            model.refuse_early(partial(read_json_urgency, text), client)

        return Route(partial(self._infer, model), self._max_body_bytes, True, refuse_early)

    def _answer_metrics(self, client: HttpClient, head: HttpHead, body: RequestBody) -> None:
        from gpuprof.serving.protocol.metrics import CONTENT_TYPE, render_metrics

        figures = ProtocolFigures(self._refusals, self.turned_away, self._stalls, self.count_edge_restarts())
        client.respond(200, CONTENT_TYPE, render_metrics(self.router, figures))

    def count_refusal(self, refusal: RefusedError, protocol: str = "http") -> None:
        """Count a refusal by protocol, status and reason."""
        self._refusals[protocol, refusal.status.value, refusal.reason] += 1

    def _infer(self, model: ServedModel, client: HttpClient, head: HttpHead, body: RequestBody) -> None:
        if head.coding is not None:
            self.service.inflate(body)
            body.json_bytes = head.find_json_length(len(body.data))
        request = self._read(model, body)
        self.service.submit(client, self._answer_request, head.traceparent, None, model, request, body)

    def _read(self, model: ServedModel, body: RequestBody) -> InferRequest:
        data, size = body.data, body.json_bytes
        refuse_long_text(size)
        if size == len(data):
            return read_request(model.spec, body)
        key = model, bytes(data[:size]), len(data)  # they determine everything but the values of the tensors
        cached = self.service.cached.get(key)
        if cached is not None:
            return cached[1]
        request = read_request(model.spec, body)
        self.service.cache(key, size, model, request)
        return request

    def _answer_request(
        self,
        model: ServedModel,
        client: HttpClient,
        request: InferRequest,
        inference: Inference,
        outputs: list[OutputTensor],
        slot: Slot | None,
    ) -> None:
        """Send an answer; its large parts lie in the arena until they are sent."""
        try:
            text, tensors = write_response(model.spec, request, outputs)
        except RefusedError as refusal:
            self.service.release(slot)
            client.refuse(refusal)
            return
        queue_ms, infer_ms = inference.times.queue / 1e6, inference.times.infer / 1e6
        total_ms = 1e3 * (time.monotonic() - inference.arrived)
        # Source: W3C, Server Timing.
        extra = b"Server-Timing: queue;dur=%.3f, infer;dur=%.3f, total;dur=%.3f\r\n" % (queue_ms, infer_ms, total_ms)
        if tensors:
            extra += b"Inference-Header-Content-Length: %d\r\n" % len(text)
            client.respond(200, CONTENT_BINARY, text, tensors, slot, extra)
            return
        self.service.release(slot)  # the text is all there is
        if len(text) <= INLINE_BYTES:
            client.respond(200, CONTENT_JSON, text, extra=extra)
        elif (text_slot := self.arena.take(len(text))) is None:
            client.refuse(out_of_memory())
        else:
            view = self.arena.view(text_slot.offset, len(text))
            view[:] = text
            client.respond(200, CONTENT_JSON, b"", [view], text_slot, extra)


def _document(describe: Callable[[], object]) -> Route:
    """Return a route to a JSON document."""
    return Route(lambda client, head, body: respond_json(client, 200, describe()))


def _status(check: Callable[[], bool]) -> Route:
    """Return a route to a status without content."""

    def handle(client: HttpClient, head: HttpHead, body: RequestBody) -> None:
        if check():
            client.respond(200, CONTENT_JSON, b"")
        else:
            respond_json(client, 503, {"error": "not ready"})

    return Route(handle)
