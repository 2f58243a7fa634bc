"""The Open Inference Protocol over HTTP: routes, and inference requests from body to answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from urllib.parse import unquote

from gpuprof.serving.protocol.grpc_calls import GrpcCalls
from gpuprof.serving.protocol.http_connection import ConnectionOwner
from gpuprof.serving.protocol.http_descriptions import HttpDescriptions
from gpuprof.serving.protocol.http_message import CONTENT_BINARY, CONTENT_JSON, HttpHead, is_own_host
from gpuprof.serving.protocol.http_route import HttpClient, ReceivedBody, Route, allow_only
from gpuprof.serving.protocol.infer_response import write_response
from gpuprof.serving.protocol.inference_service import InferenceService
from gpuprof.serving.protocol.large_texts import (
    ON_LOOP_BYTES,
    read_large_request,
    refuse_long_text,
    write_large_response,
)
from gpuprof.serving.protocol.protocol_figures import ProtocolFigures
from gpuprof.serving.router.infer_request import InferRequest, RequestBody, read_urgency
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError, out_of_memory
from gpuprof.serving.transport.server_timing import write_timing
from gpuprof.serving.transport.wire import Buffer
from gpuprof.serving.watch.stalls import StallMeter

_PUBLIC_PREFIX = b"/v2/health/"
_GRPC_PREFIXES = (b"/inference.", b"/grpc.")


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits of requests and access."""

    max_body_bytes: int = 64 << 20  #: Size limit of an inference request.
    max_connections: int = 16_384
    #: Returns whether the value of an Authorization header grants access; health needs none.
    admits: Callable[[bytes], bool] = lambda authorization: True
    #: Host names of the server, beside addresses and names without a dot; None: any. With its own host name, a web page
    #: could reach a server of the browser's machine (DNS rebinding).
    own_hosts: Collection[str] | None = None


class HttpApi(ConnectionOwner):
    """Answers the requests of all connections.

    Parameters
    ----------
    router : Router
    settings : ApiSettings
    stalls : StallMeter or None
        Reported in the metrics and with readiness.

    Attributes
    ----------
    service : InferenceService
    count_edge_restarts : callable
        Returns the number of restarts of the edge; None: no edge.
    """

    def __init__(
        self, router: Router, settings: ApiSettings = ApiSettings(), stalls: StallMeter | None = None
    ) -> None:  # fmt: skip
        super().__init__(router.arena, settings.max_connections)
        self.router = router
        self.count_edge_restarts: Callable[[], int | None] = lambda: None
        self.service = InferenceService(router, settings.max_body_bytes)
        self._settings = settings
        self._refusals: Counter[tuple[str, int, str]] = Counter()
        self._stalls = StallMeter(time.monotonic()) if stalls is None else stalls
        self._descriptions = HttpDescriptions(router, self._find_figures)
        self._grpc = GrpcCalls(self.service)

    @property
    def draining(self) -> bool:
        """Return whether connections close after their answer."""
        return self.router.draining

    def find_route(self, head: HttpHead) -> Route:
        """Return the route of a request.

        Raises
        ------
        RefusedError
            401 without the token, 404 for an unknown address, 405 for a wrong method, 421 for another server's name.
        """
        own_hosts, target = self._settings.own_hosts, head.target
        if own_hosts is not None and not is_own_host(head.headers.get(b"host", b""), own_hosts):
            raise RefusedError(HTTPStatus.MISDIRECTED_REQUEST, "the header Host names another server")
        is_public = target.startswith(_PUBLIC_PREFIX) or target in self._grpc.public_paths
        if not is_public and not self._settings.admits(head.headers.get(b"authorization", b"")):
            raise RefusedError(HTTPStatus.UNAUTHORIZED, "the request does not have the token of this server")
        return self._find_path(head)

    def forget_routes(self) -> None:
        """Forget the routes of cached heads: the models have changed."""
        self.cached_heads.clear()

    def _find_path(self, head: HttpHead) -> Route:
        path = head.target.split(b"?", 1)[0].decode("latin-1")
        words = [unquote(word) for word in path.strip("/").split("/")]
        method = "GET" if head.method == b"HEAD" else head.method.decode("latin-1")
        route = None
        match words:
            case ["v2", "models", name, "infer"]:
                return allow_only("POST", method, self._infer_route(self.router.find(name, "")))
            case ["v2", "models", name, "versions", version, "infer"]:
                return allow_only("POST", method, self._infer_route(self.router.find(name, version)))
            case _ if head.is_grpc and head.target.startswith(_GRPC_PREFIXES):
                route = self._grpc.find_route(head.target)
            case _:
                route = self._descriptions.find(words, method)
        if route is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"there is nothing at {path[:100]!r}")
        return route

    def _infer_route(self, model: ServedModel) -> Route:
        return Route(partial(self._infer, model), self._settings.max_body_bytes, True, partial(_refuse_early, model))

    def _find_figures(self) -> ProtocolFigures:
        return ProtocolFigures(self._refusals, self.turned_away, self._stalls, self.count_edge_restarts())

    def count_refusal(self, refusal: RefusedError, protocol: str = "http") -> None:
        """Count a refusal by protocol, status and reason."""
        self._refusals[protocol, refusal.status.value, refusal.reason] += 1

    def _infer(self, model: ServedModel, connection: HttpClient, head: HttpHead, received: ReceivedBody) -> None:
        traceparent = head.headers.get(b"traceparent", b"").decode("latin-1")

        def submit(model: ServedModel, request: InferRequest, slots: list[Slot]) -> None:
            on_answer = partial(self._answer_request, model, connection)
            self.service.submit(model, connection, request, slots, received.arrived, on_answer, traceparent)

        if head.coding is not None or received.body.json_bytes > ON_LOOP_BYTES:
            reader = partial(self._read_large, model, head)
            self.service.read_elsewhere(connection, received, head.coding is not None, reader, submit)
            return
        slots = [] if received.slot is None else [received.slot]
        try:
            request = model.read_request(received.body)
        except RefusedError as refusal:
            self.service.refuse(connection, refusal, slots)
        else:
            submit(model, request, slots)

    async def _read_large(
        self, model: ServedModel, head: HttpHead, body: RequestBody
    ) -> tuple[ServedModel, InferRequest]:
        json_bytes = head.find_json_length(len(body.data))
        refuse_long_text(json_bytes)
        if json_bytes <= ON_LOOP_BYTES:
            return model, model.read_request(RequestBody(body.data, json_bytes))
        return model, await self.service.run_beside(read_large_request, model.spec, bytes(body.data), json_bytes)

    def _answer_request(
        self,
        model: ServedModel,
        connection: HttpClient,
        request: InferRequest,
        inference: Inference,
        outputs: list[OutputTensor],
        slot: Slot | None,
    ) -> None:
        if _text_bytes(request, outputs) > ON_LOOP_BYTES:
            self.service.start_task(self._answer_large(model, connection, request, inference, outputs, slot))
            return
        try:
            text, tensors = write_response(model.spec, request, outputs)
        except RefusedError as refusal:
            self.service.refuse(connection, refusal, [] if slot is None else [slot])
        else:
            self._answer(connection, inference, text, tensors, slot)

    def _answer(
        self, connection: HttpClient, inference: Inference, text: bytes, tensors: list[Buffer], slot: Slot | None
    ) -> None:
        """Send an answer; its large parts lie in the arena until they are sent."""
        extra = write_timing(inference.times, time.monotonic() - inference.arrived)
        if tensors:
            extra += b"Inference-Header-Content-Length: %d\r\n" % len(text)
            connection.respond(200, CONTENT_BINARY, text, tensors, slot, extra)
            return
        if slot is not None:
            self.arena.give_back(slot)  # the text is all there is
        if len(text) <= INLINE_BYTES:
            connection.respond(200, CONTENT_JSON, text, extra=extra)
        elif (text_slot := self.arena.take(len(text))) is None:
            connection.refuse(out_of_memory())
        else:
            view = self.arena.view(text_slot.offset, len(text))
            view[:] = text
            connection.respond(200, CONTENT_JSON, b"", [view], text_slot, extra)

    async def _answer_large(
        self,
        model: ServedModel,
        connection: HttpClient,
        request: InferRequest,
        inference: Inference,
        outputs: list[OutputTensor],
        slot: Slot | None,
    ) -> None:
        """Answer with large tensors as JSON, written by another process."""
        copies = [OutputTensor(output.position, output.shape, bytes(output.data)) for output in outputs]
        head = replace(request, inputs=[])
        try:
            text, tensors = await self.service.run_beside(write_large_response, model.spec, head, copies)
        except RefusedError as refusal:
            connection.refuse(refusal)
        else:
            self._answer(connection, inference, text, tensors, None)
        finally:
            if slot is not None:
                self.arena.give_back(slot)


def _text_bytes(request: InferRequest, outputs: list[OutputTensor]) -> int:
    """Return the number of bytes of an answer's tensors as JSON."""
    if request.binary is None:
        return 0
    return sum(len(output.data) for output in outputs if output.position not in request.binary)


def _refuse_early(model: ServedModel, text: Buffer, client: str) -> None:
    """Refuse a request before its tensors have arrived if it could not be answered in time."""
    model.refuse_early(partial(read_urgency, text), client)
