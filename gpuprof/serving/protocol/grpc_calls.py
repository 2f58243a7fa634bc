"""Unary gRPC calls from the edge: an HTTP POST of a protobuf message, answered by another.

Envoy's filter ``grpc_http1_reverse_bridge`` terminates HTTP/2 and frames messages; a call's status travels in the
headers `status_headers`, which the edge turns into trailers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from google.protobuf.message import DecodeError

from gpuprof.domain.public_name import version_order
from gpuprof.serving.protocol import descriptions
from gpuprof.serving.protocol.grpc_messages import InferCall, LargeCall, open_call, write_infer
from gpuprof.serving.protocol.http_message import CONTENT_GRPC, HttpHead
from gpuprof.serving.protocol.http_route import HttpClient, ReceivedBody, Route
from gpuprof.serving.protocol.known_calls import KnownCalls
from gpuprof.serving.protocol.open_inference import SERVICE, message_class, service_methods
from gpuprof.serving.protocol.text_pool import is_compressed, place_inputs, read_large_call, refuse_long_text
from gpuprof.serving.router.infer_request import InferRequest, RequestBody
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError

if TYPE_CHECKING:
    from gpuprof.serving.protocol.http_api import HttpApi

HEALTH_CHECK = b"/grpc.health.v1.Health/Check"
STREAM_METHOD = "ModelStreamInfer"
#: Maximum size of a message, without raw tensors, that is read on the event loop.
_ON_LOOP_BYTES = 1 << 16
_MAX_SHORT_BYTES = 1 << 16
#: HealthCheckRequest of the whole server and of the service, and HealthCheckResponse: SERVING, NOT_SERVING.
_HEALTH_REQUESTS = b"", b"\x0a%c%s" % (len(SERVICE), SERVICE.encode())
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
#: gRPC over HTTP2: TimeoutValue has at most 8 digits.
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNIT_MS = {b"H": 3.6e6, b"M": 6e4, b"S": 1e3, b"m": 1.0, b"u": 1e-3, b"n": 1e-6}
#: Codes of google.rpc.Code.
_OVERLOADED, _INTERNAL = 8, 13
_CODES = {
    HTTPStatus.BAD_REQUEST: 3,  # INVALID_ARGUMENT
    HTTPStatus.REQUEST_TIMEOUT: 4,  # DEADLINE_EXCEEDED
    HTTPStatus.NOT_FOUND: 5,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: 8,  # RESOURCE_EXHAUSTED
    HTTPStatus.SERVICE_UNAVAILABLE: 14,
    HTTPStatus.UNAUTHORIZED: 16,  # UNAUTHENTICATED
}


class GrpcCalls:
    """Answers unary calls.

    Parameters
    ----------
    api : HttpApi
        Submits inferences.
    max_message_bytes : int
        Of an inference request.

    Attributes
    ----------
    public_paths : frozenset of bytes
        Paths that need no token.
    """

    def __init__(self, api: HttpApi, max_message_bytes: int) -> None:
        self._api, self._router = api, api.router
        self._known = KnownCalls()
        self.find_first_tensor = self._known.find_first_tensor
        answers = make_descriptions(api.router)
        self._routes = {HEALTH_CHECK: Route(self._check_health, _MAX_SHORT_BYTES, True)}
        for method in service_methods():
            path = f"/{SERVICE}/{method.name}".encode()
            if method.name == "ModelInfer":
                self._routes[path] = Route(self._infer, max_message_bytes, True)
            elif method.name in answers:
                kinds = [message_class(kind.name) for kind in (method.input_type, method.output_type)]
                self._routes[path] = Route(partial(_describe, answers[method.name], *kinds), _MAX_SHORT_BYTES, True)
        probes = (f"/{SERVICE}/{name}".encode() for name in ("ServerLive", "ServerReady"))
        self.public_paths = frozenset((HEALTH_CHECK, *probes))

    def find_route(self, path: bytes) -> Route:
        """Return the route of a call. Raises `RefusedError`: 501 for an unknown method."""
        route = self._routes.get(path)
        if route is None:
            name = path[:100].decode("latin-1")
            raise RefusedError(HTTPStatus.NOT_IMPLEMENTED, f"the server has no method {name}")
        return route

    def _check_health(self, connection: HttpClient, head: HttpHead, received: ReceivedBody) -> None:
        if received.body.data not in _HEALTH_REQUESTS:
            connection.refuse(RefusedError(HTTPStatus.NOT_FOUND, "there is no such service"))
        else:
            connection.respond(200, CONTENT_GRPC, _SERVING if self._router.is_ready else _NOT_SERVING)

    def _infer(self, connection: HttpClient, head: HttpHead, received: ReceivedBody) -> None:
        slots = [] if received.slot is None else [received.slot]
        # Clients leave small messages uncompressed, whatever the header says.
        encoding = head.headers.get(b"grpc-encoding", b"identity")
        if encoding != b"identity" and is_compressed(received.body.data):
            self._read_elsewhere(connection, head, received, None)
            return
        try:
            call = self._open(received.body)
            if isinstance(call, LargeCall):
                self._read_elsewhere(connection, head, received, call)
                return
            model = self._router.find(call.name, call.version)
            request = self._known.read_request(model.spec, call)
        except RefusedError as refusal:
            self._api.refuse(connection, refusal, slots)
        else:
            self._submit(model, request, connection, head, received.arrived, slots)

    def _open(self, body: RequestBody) -> InferCall | LargeCall:
        return self._known.find(body.data, body.offset) or open_call(body.data, _ON_LOOP_BYTES, body.offset)

    def _read_elsewhere(
        self, connection: HttpClient, head: HttpHead, received: ReceivedBody, call: LargeCall | None
    ) -> None:
        """Read a call in other threads and processes, because it is compressed or large beside its raw tensors."""
        gone: list[bool] = []
        connection.on_disconnect = partial(gone.append, True)
        self._api.start_task(self._read_and_submit(connection, gone, head, received, call))

    async def _read_and_submit(
        self, connection: HttpClient, gone: list[bool], head: HttpHead, received: ReceivedBody, call: LargeCall | None
    ) -> None:
        slot = received.slot
        try:
            opened: InferCall | LargeCall | None = call
            if opened is None:
                slot = None
                opened = self._open(RequestBody(await self._api.inflate(received), 0))
            model = self._router.find(opened.name, opened.version)
            if isinstance(opened, LargeCall):
                refuse_long_text(opened.text_bytes)
                request = await self._api.pool.run(read_large_call, model.spec, bytes(opened.data))
            else:
                request = self._known.read_request(model.spec, opened)
            request, slots = place_inputs(request, self._api.arena)
        except RefusedError as refusal:
            connection.refuse(refusal)
            return
        finally:
            if slot is not None:
                self._api.arena.give_back(slot)
        if gone:
            for placed in slots:
                self._api.arena.give_back(placed)
        else:
            self._submit(model, request, connection, head, received.arrived, slots)

    def _submit(
        self,
        model: ServedModel,
        request: InferRequest,
        connection: HttpClient,
        head: HttpHead,
        arrived: float,
        slots: list[Slot],
    ) -> None:
        timeout = head.headers.get(b"grpc-timeout")
        limit_ms = None if timeout is None else read_timeout_ms(timeout)
        traceparent = head.headers.get(b"traceparent", b"").decode("latin-1")
        done = partial(_answer_infer, model, request, connection)
        self._api.submit(model, connection, request, slots, arrived, done, traceparent, limit_ms)


def _answer_infer(
    model: ServedModel,
    request: InferRequest,
    connection: HttpClient,
    _: Inference,
    outputs: list[OutputTensor],
    slot: Slot | None,
) -> None:
    head, *tail = write_infer(model.spec, request, outputs)
    if slot is None:
        connection.respond(200, CONTENT_GRPC, b"".join((head, *tail)))
    else:
        connection.respond(200, CONTENT_GRPC, head, tail, slot)


def _describe(
    answer: Callable[[Any], dict[str, Any]],
    request_class: Any,
    response_class: Any,
    connection: HttpClient,
    head: HttpHead,
    received: ReceivedBody,
) -> None:
    try:
        request = request_class.FromString(bytes(received.body.data))
    except DecodeError:
        text = "the message is not what this method takes"
        connection.refuse(RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, text))
        return
    try:
        response = response_class(**answer(request))
    except RefusedError as refusal:
        connection.refuse(refusal)
    else:
        connection.respond(200, CONTENT_GRPC, response.SerializeToString())


def read_timeout_ms(text: bytes) -> float | None:
    """Return the value of the header ``grpc-timeout`` in ms; None for a malformed value."""
    match = _TIMEOUT.fullmatch(text)
    return float(match[1]) * _UNIT_MS[match[2]] if match else None


def find_code(refusal: RefusedError) -> int:
    """Return the gRPC status code of a refusal."""
    if refusal.status == HTTPStatus.NOT_IMPLEMENTED:
        return 12
    return _OVERLOADED if refusal.overloaded else _CODES.get(refusal.status, _INTERNAL)


def status_headers(refusal: RefusedError) -> bytes:
    """Return the header lines from which the edge makes a refusal's trailers."""
    message = quote(refusal.message, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~")
    lines = b"x-grpc-status: %d\r\nx-grpc-message: %s\r\n" % (find_code(refusal), message.encode())
    if refusal.retry_after_s is not None:
        # gRFC A6: delay for clients that retry by their service config.
        lines += b"x-grpc-pushback-ms: %d\r\n" % (int(1000 * refusal.retry_after_s) + 1)
    return lines


def make_descriptions(router: Router) -> dict[str, Callable[[Any], dict[str, Any]]]:
    """Return the functions for all methods but inference, by name: from a message to a response's fields."""

    def model_ready(request: Any) -> dict[str, Any]:
        ready = False
        with suppress(RefusedError):
            ready = router.find(request.name, request.version).is_ready
        return {"ready": ready}

    def model_metadata(request: Any) -> dict[str, Any]:
        model = router.find(request.name, request.version)
        versions = [request.version] if request.version else sorted(router.models[request.name], key=version_order)
        return descriptions.model_metadata(model.spec, versions)

    def model_config(request: Any) -> dict[str, Any]:
        return {"config": descriptions.model_config(router.find(request.name, request.version))}

    def model_statistics(request: Any) -> dict[str, Any]:
        if request.name:
            router.find(request.name, request.version)
        return {"model_stats": descriptions.chosen_statistics(router.models, request.name, request.version)}

    def repository_index(request: Any) -> dict[str, Any]:
        entries = descriptions.repository_index(router.models)
        return {"models": [entry for entry in entries if not request.ready or entry["state"] == "READY"]}

    return {
        "ServerLive": lambda request: {"live": True},
        "ServerReady": lambda request: {"ready": router.is_ready},
        "ServerMetadata": lambda request: descriptions.server_metadata(),
        "ModelReady": model_ready,
        "ModelMetadata": model_metadata,
        "ModelConfig": lambda request: {
            "config": descriptions.model_config(router.find(request.name, request.version))
        },
        "ModelStatistics": model_statistics,
        "RepositoryIndex": repository_index,
    }
