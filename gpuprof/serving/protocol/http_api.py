"""The Open Inference Protocol over HTTP/1.1: routes, inference requests from body to answer, and their connections.

Large bodies are received straight into the arena and large answers sent from it. A framework would copy every tensor
several times; at half a megabyte a request, copies are most of the cost of serving. The peer of a connection is
trusted, a client on this machine or the edge: there are limits of size and time, and no further defence.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import cast
from urllib.parse import unquote

from gpuprof.serving.protocol.grpc_calls import GrpcCalls, status_headers
from gpuprof.serving.protocol.http_message import (
    ARRIVAL_HEADER,
    CLIENT_HEADER,
    COMPRESSIONS,
    CONTENT_BINARY,
    CONTENT_GRPC,
    CONTENT_JSON,
    MAX_DISCARDED_BYTES,
    ChunkedBody,
    HttpClient,
    HttpHead,
    Route,
    allow_only,
    is_own_host,
    read_head,
    refusal_headers,
    respond_json,
    too_large_refusal,
    write_head,
)
from gpuprof.serving.protocol.inference_service import MOST_CACHED, Descriptions, InferenceService, refuse_long_text
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
from gpuprof.serving.transport.arena import ALIGNMENT, Slot
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError, out_of_memory
from gpuprof.serving.transport.security import is_loopback
from gpuprof.serving.transport.wire import Buffer
from gpuprof.serving.watch.statistics import ProtocolFigures

_PUBLIC_PREFIX = b"/v2/health/"
_GRPC_PREFIXES = (b"/inference.", b"/grpc.")
#: Read size, and the maximum size of a head.
SCRATCH_BYTES = 1 << 16
#: Minimum transfer rate: its time for a body or an answer is added to the stall limit.
_LEAST_BYTES_PER_S = 1 << 20
#: Heads with these headers are not cached.
_UNCACHED = frozenset((b"expect", b"content-encoding", b"grpc-encoding"))
_ARRIVAL_LINE = b"\r\n" + ARRIVAL_HEADER + b": "


@dataclass(frozen=True, slots=True)
class CachedHead:
    """A parsed head of an inference with a small body, and its route."""

    head: HttpHead
    route: Route
    json_bytes: int
    peer: str  #: Address reported by the edge; empty on a direct connection.


class _Incoming:
    """A request whose body is being received."""

    def __init__(self, head: HttpHead, arrived: float) -> None:
        self.head, self.length = head, head.length
        self.body = RequestBody(b"", arrived=arrived)
        self.route: Route | None = None
        self.refusal: RefusedError | None = None  #: The answer; the body is discarded.
        self.received = 0
        self.chunks: ChunkedBody | None = None

    @property
    def is_discarded(self) -> bool:
        """Return whether the body is not needed."""
        return self.refusal is not None or self.route is None or not self.route.reads_body


class HttpConnection(asyncio.BufferedProtocol):
    """Reads requests in sequence and writes their answers.

    Attributes
    ----------
    busy : bool
        Whether a received request is unanswered.
    """

    def __init__(self, owner: HttpApi) -> None:
        self._owner = owner
        self.peer = self._address = ""
        self.busy = False
        self.on_disconnect: Callable[[], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._head: HttpHead | None = None
        self._incoming: _Incoming | None = None
        self._view: memoryview | None = None  #: Memory in the arena for the rest of a large body.
        self._pending = b""
        self._unsent: list[Slot] = []
        self._since = time.monotonic()  #: Begin of the request, or of the answer, or of the idle time.
        self._unsent_bytes = 0
        self._keep_alive = True
        self._is_new = True
        self._is_paused = self._client_ended = self._is_lingering = False

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; refuse a connection beyond the bound."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)  # `resume_writing` then reports the end of all sending
        address = transport.get_extra_info("peername")
        self.peer = self._address = str(address[0]) if isinstance(address, tuple) else ""
        if len(self._owner.connections) >= self._owner.max_connections:
            self._owner.turned_away += 1
            self._transport.write(write_head(503, CONTENT_JSON, 0, keep_alive=False, extra=b"Retry-After: 1\r\n"))
            self._transport.close()
        self._owner.connections.add(self)

    def get_buffer(self, hint: int) -> memoryview:
        """Return the buffer for the next bytes: the arena while a large body is being received."""
        if self._view is not None:
            return self._view
        return self._owner.scratch

    def buffer_updated(self, count: int) -> None:
        """Handle received bytes."""
        if self._view is not None:
            incoming = self._incoming
            assert incoming is not None
            incoming.received += count
            self._view = self._view[count:]
            self._finish_body(incoming)
            return
        if self._is_lingering:
            return
        if self.is_idle:
            self._since, self._is_new = time.monotonic(), False
        self._pending += self._owner.scratch[:count]
        if self._can_read:
            self._read_pending()
        elif len(self._pending) > SCRATCH_BYTES and self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Keep the connection open for writing while an answer is due: a client may half-close after its request."""
        self._client_ended = True
        return self.busy or self._unsent_bytes > 0

    def pause_writing(self) -> None:
        """Do nothing: `respond` checks the transport itself."""

    def resume_writing(self) -> None:
        """Free the memory of answers, all of which have been sent."""
        self._unsent_bytes = 0
        self._give_back_unsent()
        if self.is_idle:
            self._since = time.monotonic()
        if self._pending or self._client_ended:
            self._read_pending()

    def connection_lost(self, error: Exception | None) -> None:
        """Free everything."""
        self._owner.connections.discard(self)
        self._transport = None
        self._unsent_bytes = 0
        self._give_back_unsent()
        self._drop_incoming()
        if self.on_disconnect is not None:
            self.on_disconnect()

    # --- the request's side

    def respond(
        self,
        status: int,
        content_type: bytes,
        body: Buffer,
        tail: list[Buffer] | None = None,
        slot: Slot | None = None,
        extra: bytes = b"",
    ) -> None:
        """Answer the current request; ``slot``, which holds ``tail``, is released once the answer is sent."""
        self.on_disconnect = None
        self.busy = False
        transport = self._transport
        if transport is None or transport.is_closing():
            if slot is not None:
                self._owner.arena.give_back(slot)
            return
        size = len(body) + sum(map(len, tail)) if tail else len(body)
        keep_alive = self._keep_alive and not self._owner.router.draining
        head = write_head(status, content_type, size, keep_alive, extra)
        if slot is not None:
            self._unsent.append(slot)
        if self._head is not None and self._head.method == b"HEAD":
            transport.write(head)
        elif not tail:
            transport.write(head + body)
        elif size > INLINE_BYTES:
            transport.writelines([head + body, *tail])
        else:
            transport.write(b"".join((head, body, *tail)))
        self._unsent_bytes = transport.get_write_buffer_size()
        if self._unsent and not self._unsent_bytes:
            self._give_back_unsent()
        self._incoming = None
        self._since = time.monotonic()
        if not keep_alive:
            self._close_after_answer()
        elif self._pending or self._client_ended:
            asyncio.get_running_loop().call_soon(self._read_pending)

    def refuse(self, refusal: RefusedError) -> None:
        """Answer with an error, a gRPC error for gRPC calls."""
        if self._head is not None and self._head.is_grpc:
            self._owner.count_refusal(refusal, "grpc")
            self.respond(200, CONTENT_GRPC, b"", extra=status_headers(refusal))
            return
        self._owner.count_refusal(refusal)
        respond_json(self, refusal.status.value, {"error": refusal.message}, refusal_headers(refusal))

    # --- the server's side

    @property
    def is_idle(self) -> bool:
        """Return whether every request has been answered, and every answer sent."""
        return not (self.busy or self._incoming or self._pending or self._unsent_bytes)

    def can_close(self, now: float) -> bool:
        """Return whether closing loses no request; a new client may be about to send its first."""
        return self.is_idle and (not self._is_new or now - self._since > 1.0)

    def watch(self, now: float, stall_s: float, idle_s: float) -> None:
        """Close a connection that has been idle, or busy with a request or an answer, for too long."""
        if self.busy or self._transport is None:
            return
        if self.is_idle:
            if now - self._since > idle_s:
                self._transport.close()
            return
        size = self._unsent_bytes if self._incoming is None else self._incoming.length
        if now - self._since > stall_s + size / _LEAST_BYTES_PER_S:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection when everything has been sent."""
        if self._transport is not None:
            self._transport.close()

    # --- reading

    @property
    def _can_read(self) -> bool:
        return not (self.busy or self._is_lingering or self._unsent_bytes > SCRATCH_BYTES)

    def _read_pending(self) -> None:
        """Read requests from the pending bytes."""
        if self._transport is None or not self._can_read:
            return
        pending, self._pending = self._pending, b""
        self._pending = pending[self._read(pending) :]
        if self._client_ended and not self.busy and not self._unsent_bytes:
            self._transport.close()  # the rest of an incomplete request will not come
        elif self._is_paused and self._can_read and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def _read(self, data: bytes) -> int:
        """Read requests from ``data`` until one is incomplete or unanswered; return the position of the rest."""
        position, end = 0, len(data)
        while position < end and self._can_read:
            if self._incoming is not None:
                position = self._receive_body(self._incoming, data, position)
                continue
            stop = data.find(b"\r\n\r\n", position) + 4
            if stop < 4:
                if end - position >= SCRATCH_BYTES:
                    self._reject(RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the headers are too long"))
                break
            text, arrival = _split_arrival(data[position:stop])
            cached = self._owner.cached_heads.get(text)
            if cached is None or stop + cached.head.length > end:
                position = stop
                self._begin_request(text, arrival)
                continue
            position = stop + cached.head.length
            body = RequestBody(data[stop:position], cached.json_bytes, arrived=arrival)
            self._head, self._keep_alive, self.busy = cached.head, cached.head.keep_alive, True
            self.peer = cached.peer or self._address
            self._call(cached.route, cached.head, body)
        return position

    def _begin_request(self, text: bytes, arrival: float) -> None:
        """Parse a head and prepare to receive the body."""
        self._head = None
        try:
            head = self._head = read_head(text)
        except RefusedError as refusal:
            self._reject(refusal)
            return
        # No request may follow a chunked body: bytes behind its last chunk are not separated from the body.
        self._keep_alive = head.keep_alive and not head.chunked
        edge_peer = head.headers.get(CLIENT_HEADER, b"").decode("latin-1")
        self.peer = edge_peer or self._address
        incoming = self._incoming = _Incoming(head, arrival)
        try:
            self._set_route(incoming, self._owner.find_route(head))
        except RefusedError as refusal:
            if head.chunked or head.length > MAX_DISCARDED_BYTES or b"expect" in head.headers:
                self._reject(refusal)
                return
            # the traceback refers to this frame: a reference cycle per request
            incoming.refusal = refusal.with_traceback(None)
        else:
            self._cache_head(text, incoming, edge_peer)
        if head.headers.get(b"expect", b"").lower() == b"100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if incoming.chunks is None and not incoming.length:
            self._handle(incoming)

    def _set_route(self, incoming: _Incoming, route: Route) -> None:
        """Set the route; check the body against the head. Raises `RefusedError`: 413, 415, 400."""
        head = incoming.head
        incoming.route = route
        if head.coding is not None:
            if head.coding not in COMPRESSIONS or not route.reads_body:
                text = "only the bodies of inference requests may be compressed, by gzip or deflate"
                raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text)
            incoming.route = replace(route, refuse_early=None)  # its JSON cannot be read yet
        if head.chunked:
            incoming.chunks = ChunkedBody(route.max_body)
            return
        if head.length > route.max_body:
            raise too_large_refusal(route.max_body)
        # The header of a compressed body refers to the decompressed body.
        incoming.body.json_bytes = head.length if head.coding else head.find_json_length(head.length)

    def _cache_head(self, text: bytes, incoming: _Incoming, edge_peer: str) -> None:
        """Cache the head of an inference with a small body: a later equal head passes the same checks."""
        head, route = incoming.head, incoming.route
        if route is None or not route.reads_body or head.chunked or head.length > INLINE_BYTES:
            return
        if head.headers.keys() & _UNCACHED:
            return
        heads = self._owner.cached_heads
        if len(heads) >= MOST_CACHED:
            heads.clear()
        heads[text] = CachedHead(head, route, incoming.body.json_bytes, edge_peer)

    def _receive_body(self, incoming: _Incoming, data: bytes, position: int) -> int:
        """Move bytes of the body from ``data``; return where they end."""
        if incoming.chunks is not None:
            self._receive_chunks(incoming, incoming.chunks, data[position:])
            return len(data)
        count = min(len(data) - position, incoming.length - incoming.received)
        piece = memoryview(data)[position : position + count]
        try:
            if incoming.is_discarded:
                pass
            elif incoming.length <= INLINE_BYTES:
                incoming.body.data = bytes(incoming.body.data) + piece
            else:
                self._take_memory(incoming, piece)
        except RefusedError as refusal:
            # The rest of the body is discarded; where it is too long, the answer goes at once.
            incoming.refusal = refusal.with_traceback(None)
            self._release(incoming)
            if incoming.length > MAX_DISCARDED_BYTES:
                self._reject(refusal)
        incoming.received += count
        self._finish_body(incoming)
        return position + count

    def _receive_chunks(self, incoming: _Incoming, chunks: ChunkedBody, data: bytes) -> None:
        try:
            chunks.feed(data)
            if not chunks.is_complete:
                return
            if not incoming.is_discarded:
                size = len(chunks.data)
                json_bytes = size if incoming.head.coding else incoming.head.find_json_length(size)
                incoming.body = self._owner.service.hold(bytes(chunks.data), json_bytes, incoming.body.arrived)
        except RefusedError as refusal:
            self._reject(refusal)
        else:
            self._handle(incoming)

    def _take_memory(self, incoming: _Incoming, head: memoryview) -> None:
        """Reserve memory for a large body after reading its beginning, unless its request would be refused anyway."""
        route = incoming.route
        assert route is not None
        json_bytes = incoming.body.json_bytes
        if route.refuse_early is not None and json_bytes <= len(head):
            route.refuse_early(head[:json_bytes], self.peer)
        arena, body = self._owner.arena, incoming.body
        slot = arena.take(incoming.length + ALIGNMENT)
        if slot is None:
            raise out_of_memory()
        # The first tensor is aligned; a gRPC message usually ends with its only tensor.
        begin = incoming.length if incoming.head.is_grpc else json_bytes
        body.slot, body.offset = slot, slot.offset + -begin % ALIGNMENT
        body.data = arena.view(body.offset, incoming.length)
        body.data[: len(head)] = head
        self._view = body.data[len(head) :]

    def _finish_body(self, incoming: _Incoming) -> None:
        if incoming.received == incoming.length and self._incoming is incoming:
            self._view = None
            self._handle(incoming)

    def _handle(self, incoming: _Incoming) -> None:
        """Handle a request whose body is complete."""
        self.busy, self._incoming = True, None
        if incoming.refusal is not None or incoming.route is None:
            assert incoming.refusal is not None
            self.refuse(incoming.refusal)
            return
        self._call(incoming.route, incoming.head, incoming.body)

    def _call(self, route: Route, head: HttpHead, body: RequestBody) -> None:
        try:
            route.handle(self, head, body)
        except RefusedError as refusal:
            self._owner.service.release(body.slot)
            self.refuse(refusal)

    def _release(self, incoming: _Incoming) -> None:
        """Release the memory of an unneeded body."""
        self._view = None
        self._owner.service.release(incoming.body.slot)
        incoming.body.slot = None

    def _drop_incoming(self) -> None:
        if self._incoming is not None:
            self._release(self._incoming)
            self._incoming = None

    # --- the end

    def _reject(self, refusal: RefusedError) -> None:
        """Refuse an incomplete request, and close: the start of the next request is unknown."""
        self._drop_incoming()
        self._keep_alive = False
        self._is_lingering = True
        self.refuse(refusal)

    def _close_after_answer(self) -> None:
        """Close; with unread bytes half-close and read on, as a reset would destroy the answer (RFC 9112, 9.6)."""
        transport = self._transport
        if transport is None:
            return
        if not (self._is_lingering or self._pending) or not transport.can_write_eof():
            transport.close()
            return
        self._is_lingering = True
        self._pending = b""
        if self._is_paused:
            transport.resume_reading()
        transport.write_eof()
        asyncio.get_running_loop().call_later(2.0, self.close)

    def _give_back_unsent(self) -> None:
        for slot in self._unsent:
            self._owner.arena.give_back(slot)
        self._unsent = []


def _split_arrival(text: bytes) -> tuple[bytes, float]:
    """Return a head without the edge's arrival time, and the arrival on the monotonic clock."""
    now = time.monotonic()
    begin = text.find(_ARRIVAL_LINE)
    if begin < 0:
        return text, now
    end = text.find(b"\r\n", begin + 2)
    with suppress(ValueError):
        now -= max(0.0, time.time() - float(text[begin + len(_ARRIVAL_LINE) : end]))
    return text[:begin] + text[end:], now


class HttpApi:
    """Answers the requests of all connections.

    Parameters
    ----------
    router : Router
    settings : ServerSettings

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

    def __init__(self, router: Router, settings: ServerSettings) -> None:
        self.router, self.arena = router, router.arena
        self.max_connections = settings.max_connections
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
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
        self._descriptions = Descriptions(router)
        self.grpc = GrpcCalls(self.service)

    def find_route(self, head: HttpHead) -> Route:
        """Return the route of a request.

        Raises `RefusedError`: 401 without the token, 404 for an unknown address, 405 for a wrong method, 421 for
        another server's name.
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

        figures = ProtocolFigures(self._refusals, self.turned_away, self.count_edge_restarts())
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
