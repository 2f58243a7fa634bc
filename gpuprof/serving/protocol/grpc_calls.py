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
from typing import Any
from urllib.parse import quote

from google.protobuf.message import DecodeError

from gpuprof.serving.protocol.grpc_messages import (
    SERVICE,
    decode_infer,
    message_class,
    read_infer,
    service_methods,
    write_infer,
)
from gpuprof.serving.protocol.http_message import CONTENT_GRPC, HttpClient, HttpHead, Route
from gpuprof.serving.protocol.inference_service import MOST_CACHED, Descriptions, InferenceService, is_compressed
from gpuprof.serving.router.infer_request import InferRequest, RequestBody
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError
from gpuprof.serving.transport.wire import Buffer

HEALTH_CHECK = b"/grpc.health.v1.Health/Check"
STREAM_METHOD = "ModelStreamInfer"
#: HealthCheckRequest of the whole server and of the service, and HealthCheckResponse: SERVING, NOT_SERVING.
_HEALTH_REQUESTS = b"", b"\x0a%c%s" % (len(SERVICE), SERVICE.encode())
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
#: gRPC over HTTP2: TimeoutValue has at most 8 digits.
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNIT_MS = {b"H": 3.6e6, b"M": 6e4, b"S": 1e3, b"m": 1.0, b"u": 1e-3, b"n": 1e-6}
#: Codes of google.rpc.Code.
_CODES = {
    HTTPStatus.BAD_REQUEST: 3,  # INVALID_ARGUMENT
    HTTPStatus.REQUEST_TIMEOUT: 4,  # DEADLINE_EXCEEDED
    HTTPStatus.NOT_FOUND: 5,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: 8,  # RESOURCE_EXHAUSTED
    HTTPStatus.TOO_MANY_REQUESTS: 8,
    HTTPStatus.NOT_IMPLEMENTED: 12,
    HTTPStatus.INTERNAL_SERVER_ERROR: 13,
    HTTPStatus.SERVICE_UNAVAILABLE: 14,
    HTTPStatus.UNAUTHORIZED: 16,  # UNAUTHENTICATED
}


class GrpcCalls:
    """Answers unary calls.

    Parameters
    ----------
    service : InferenceService

    Attributes
    ----------
    public_paths : frozenset of bytes
        Paths that need no token.
    """

    def __init__(self, service: InferenceService) -> None:
        self._service, self._router = service, service.router
        self._layouts: dict[int, list[slice]] = {}  # by length of the message, where its raw contents lie
        answers = make_descriptions(service.router)
        self._routes = {HEALTH_CHECK: Route(self._check_health, reads_body=True)}
        for method in service_methods():
            path = f"/{SERVICE}/{method.name}".encode()
            if method.name == "ModelInfer":
                self._routes[path] = Route(self._infer, service.max_body_bytes, True)
            elif method.name in answers:
                kinds = [message_class(kind.name) for kind in (method.input_type, method.output_type)]
                self._routes[path] = Route(partial(_describe, answers[method.name], *kinds), reads_body=True)
        probes = (f"/{SERVICE}/{name}".encode() for name in ("ServerLive", "ServerReady"))
        self.public_paths = frozenset((HEALTH_CHECK, *probes))

    def find_route(self, path: bytes) -> Route:
        """Return the route of a call. Raises `RefusedError`: 501 for an unknown method."""
        route = self._routes.get(path)
        if route is None:
            name = path[:100].decode("latin-1")
            raise RefusedError(HTTPStatus.NOT_IMPLEMENTED, f"the server has no method {name}")
        return route

    def _check_health(self, connection: HttpClient, head: HttpHead, body: RequestBody) -> None:
        if body.data not in _HEALTH_REQUESTS:
            raise RefusedError(HTTPStatus.NOT_FOUND, "there is no such service")
        connection.respond(200, CONTENT_GRPC, _SERVING if self._router.is_ready else _NOT_SERVING)

    def _infer(self, client: HttpClient, head: HttpHead, body: RequestBody) -> None:
        timeout = head.headers.get(b"grpc-timeout")
        limit_ms = None if timeout is None else read_timeout_ms(timeout)
        # Clients leave small messages uncompressed, whatever the header says.
        if head.headers.get(b"grpc-encoding", b"identity") != b"identity" and is_compressed(body.data):
            self._service.inflate(body)
        model, request = self.read(body.data)
        self._service.submit(client, answer_infer, head.traceparent, limit_ms, model, request, body)

    def read(self, data: Buffer) -> tuple[ServedModel, InferRequest]:
        """Return the model and the request of a ModelInferRequest. Raises `RefusedError` when either is wrong."""
        spans = self._layouts.get(len(data))
        cached = self._service.cached.get(_key(data, spans)) if spans else None
        if cached is not None:
            return cached
        message = decode_infer(data)
        model = self._router.find(message.request.model_name, message.request.model_version)
        request = read_infer(model.spec, message, data)
        if len(self._layouts) == MOST_CACHED:
            self._layouts.clear()
        self._layouts[len(data)] = message.spans
        self._service.cache(_key(data, message.spans), message.text_bytes, model, request)
        return model, request


def _key(data: Buffer, spans: list[slice]) -> object:
    """Return a cache key, a message's bytes without its raw tensor contents, and the positions of these contents."""
    begin = 0
    parts: list[bytes | int] = []
    for span in spans:
        parts += (bytes(data[begin : span.start]), span.stop)
        begin = span.stop
    return (*parts, bytes(data[begin:]))


def answer_infer(
    model: ServedModel,
    client: HttpClient,
    request: InferRequest,
    _: Inference,
    outputs: list[OutputTensor],
    slot: Slot | None,
) -> None:
    """Send the answer of a ModelInfer call."""
    head, *tail = write_infer(model.spec, request, outputs)
    if slot is None:
        client.respond(200, CONTENT_GRPC, b"".join((head, *tail)))
    else:
        client.respond(200, CONTENT_GRPC, head, tail, slot)


def _describe(
    answer: Callable[[Any], dict[str, Any]],
    request_class: Any,
    response_class: Any,
    connection: HttpClient,
    head: HttpHead,
    body: RequestBody,
) -> None:
    try:
        request = request_class.FromString(bytes(body.data))
    except DecodeError:
        text = "the message is not what this method takes"
        raise RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, text) from None
    connection.respond(200, CONTENT_GRPC, response_class(**answer(request)).SerializeToString())


def read_timeout_ms(text: bytes) -> float | None:
    """Return the value of the header ``grpc-timeout`` in ms; None for a malformed value."""
    match = _TIMEOUT.fullmatch(text)
    return float(match[1]) * _UNIT_MS[match[2]] if match else None


def find_code(refusal: RefusedError) -> int:
    """Return the gRPC status code of a refusal."""
    if refusal.overloaded:
        return _CODES[HTTPStatus.TOO_MANY_REQUESTS]
    return _CODES.get(refusal.status, _CODES[HTTPStatus.INTERNAL_SERVER_ERROR])


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

    descriptions = Descriptions(router)

    def model_ready(request: Any) -> dict[str, Any]:
        ready = False
        with suppress(RefusedError):
            ready = router.find(request.name, request.version).is_ready
        return {"ready": ready}

    def repository_index(request: Any) -> dict[str, Any]:
        entries = descriptions.list_repository()
        return {"models": [entry for entry in entries if not request.ready or entry["state"] == "READY"]}

    return {
        "ServerLive": lambda request: {"live": True},
        "ServerReady": lambda request: {"ready": router.is_ready},
        "ServerMetadata": lambda request: descriptions.describe_server(),
        "ModelReady": model_ready,
        "ModelMetadata": lambda request: descriptions.describe_model(request.name, request.version),
        "ModelConfig": lambda request: {"config": descriptions.describe_config(request.name, request.version)},
        "ModelStatistics": lambda request: descriptions.describe_statistics(request.name, request.version),
        "RepositoryIndex": repository_index,
    }
