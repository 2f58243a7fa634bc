"""The Open Inference Protocol over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from google.protobuf.message import DecodeError

from gpuprof.errors import InputError
from gpuprof.serving.protocol import descriptions
from gpuprof.serving.protocol.grpc_call import GrpcCall, GrpcMethod, GrpcStatus, Message
from gpuprof.serving.protocol.grpc_messages import (
    InferCall,
    as_streamed,
    before_tensors,
    first_tensor,
    protocol,
    read_infer,
    read_urgency,
    write_infer,
)
from gpuprof.serving.protocol.http2_connection import SCRATCH_BYTES, Http2Connection
from gpuprof.serving.protocol.http2_stream import Http2Stream, Receiver
from gpuprof.serving.protocol.http_api import kin
from gpuprof.serving.router.infer_request import InferRequest
from gpuprof.serving.router.public_name import version_order
from gpuprof.serving.router.router import Router, deadline_ms
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError
from gpuprof.serving.transport.security import OPEN, Security
from gpuprof.serving.transport.wire import Buffer

_SERVICE = "GRPCInferenceService"
_FOR_EVERYBODY = ("ServerLive", "ServerReady")
_MAX_PLAIN_BYTES = 1 << 20
_DRAIN_TICK_S = 0.05
_STATUSES = {
    HTTPStatus.BAD_REQUEST: GrpcStatus.INVALID_ARGUMENT,
    HTTPStatus.NOT_FOUND: GrpcStatus.NOT_FOUND,
    HTTPStatus.SERVICE_UNAVAILABLE: GrpcStatus.UNAVAILABLE,
}


class GrpcApi:
    """Answers the calls of the service on all connections.

    Parameters
    ----------
    router : Router
    max_message_bytes : int
        Of an inference request.
    security : Security
        What calls must have in their metadata (``authorization``), and the certificate; whether the server lives and
        is ready is told to everybody.
    """

    def __init__(self, router: Router, max_message_bytes: int, security: Security = OPEN) -> None:
        self.arena = router.arena
        self.scratch = bytearray(SCRATCH_BYTES)
        self.connections: set[Http2Connection] = set()
        self._router = router
        self._security = security
        self._listener: asyncio.Server | None = None
        self._methods = self._find_methods(max_message_bytes)

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port.

        Raises
        ------
        InputError
            When the port is taken.
        """
        loop = asyncio.get_running_loop()
        context = self._security.grpc_context
        try:
            self._listener = await loop.create_server(
                lambda: Http2Connection(self), host, port, ssl=context, backlog=1024
            )
        except OSError:
            raise InputError(f"port {port} is taken on {host}", "choose another with --grpc-port") from None
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        """Take no more calls and wait for those that are there."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.leave()
        deadline = time.monotonic() + grace_s
        while not all(connection.is_idle for connection in self.connections) and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_TICK_S)
        self.close()

    def close(self) -> None:
        """Close the port and all connections."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close()

    def watch(self, now: float, stall_s: float, idle_s: float) -> None:
        """Close connections that have stood still for so long in the middle of something, or with nothing to do."""
        for connection in list(self.connections):
            still_s = now - connection.touched
            if connection.is_idle:
                if still_s > idle_s:
                    connection.leave()
                    connection.close()
            elif connection.is_stuck and still_s > stall_s:
                connection.abort()

    def open(self, stream: Http2Stream, headers: dict[bytes, bytes]) -> Receiver:
        """Return the call that a stream brings, which may have ended already."""
        path = headers.get(b":path", b"")
        method = self._methods.get(path)
        call = GrpcCall(stream, headers, method or _NO_METHOD, self.arena)
        everybody = path.rsplit(b"/", 1)[-1].decode("latin-1") in _FOR_EVERYBODY
        if not everybody and not self._security.admits(headers.get(b"authorization", b"")):
            call.fail(GrpcStatus.UNAUTHENTICATED, "the call does not have the token of this server")
        elif method is None:
            call.fail(GrpcStatus.UNIMPLEMENTED, "there is no such method")
        return call

    def _find_methods(self, max_message_bytes: int) -> dict[bytes, GrpcMethod]:
        """Return what answers each path."""
        known = protocol()
        methods = {}
        for method in known.methods[_SERVICE]:
            path = f"/{known.package}.{_SERVICE}/{method.name}".encode()
            if method.request == "ModelInferRequest":
                handle = self._stream_infer if method.streams_in else self._infer
                foresee = None if method.streams_in else self._foresee
                methods[path] = GrpcMethod(handle, max_message_bytes, method.streams_in, first_tensor, foresee)
            else:
                answer = getattr(self, f"_{_snake(method.name)}")
                methods[path] = GrpcMethod(partial(_plain, answer, known.message(method.request)), _MAX_PLAIN_BYTES)
        return methods

    def _server_live(self, request: Any) -> Any:
        return protocol().message("ServerLiveResponse")(live=True)

    def _server_ready(self, request: Any) -> Any:
        return protocol().message("ServerReadyResponse")(ready=self._router.is_ready)

    def _model_ready(self, request: Any) -> Any:
        ready = False
        with suppress(RefusedError):
            ready = self._router.find(request.name, request.version).is_ready
        return protocol().message("ModelReadyResponse")(ready=ready)

    def _server_metadata(self, request: Any) -> Any:
        return protocol().message("ServerMetadataResponse")(**descriptions.server_metadata())

    def _model_metadata(self, request: Any) -> Any:
        model = self._router.find(request.name, request.version)
        known = sorted(self._router.models[request.name], key=version_order)
        versions = [request.version] if request.version else known
        return protocol().message("ModelMetadataResponse")(**descriptions.model_metadata(model.spec, versions))

    def _model_config(self, request: Any) -> Any:
        config = descriptions.model_config(self._router.find(request.name, request.version))
        return protocol().message("ModelConfigResponse")(config=config)

    def _model_statistics(self, request: Any) -> Any:
        if request.name:
            self._router.find(request.name, request.version)
        chosen = descriptions.chosen_statistics(self._router.models, request.name, request.version)
        return protocol().message("ModelStatisticsResponse")(model_stats=chosen)

    def _repository_index(self, request: Any) -> Any:
        entries = descriptions.repository_index(self._router.models)
        ready = [entry for entry in entries if not request.ready or entry["state"] == "READY"]
        return protocol().message("RepositoryIndexResponse")(models=ready)

    def _infer(self, call: GrpcCall, message: Message) -> None:
        """Ask the model, and answer the call when it has."""
        asked = self._read(call, message)
        if asked is not None:
            self._ask(call, message, asked, call.answer, partial(_refuse, call))

    def _foresee(self, call: GrpcCall, beginning: Buffer) -> None:
        """End a call whose tensors have not come yet if it could not be answered in time."""
        request = before_tensors(beginning)
        if request is None:
            return
        try:
            self._router.find(request.model_name, request.model_version).foresee(partial(read_urgency, request))
        except RefusedError as refusal:
            _refuse(call, refusal)

    def _stream_infer(self, call: GrpcCall, message: Message) -> None:
        """Answer each request of a stream when it is done, errors as messages."""
        request = self._read(call, message)
        if request is None:
            return

        def answered(parts: list[Any], slot: Slot | None = None) -> None:
            call.answer(as_streamed(parts), slot)
            call.settle()

        def refused(refusal: RefusedError) -> None:
            failed = protocol().message("ModelStreamInferResponse")(error_message=refusal.message)
            failed.infer_response.id = request.message.id
            call.answer([failed.SerializeToString()])
            call.settle()

        self._ask(call, message, request, answered, refused)

    def _read(self, call: GrpcCall, message: Message) -> InferCall | None:
        """Return what a message says; None when it is none, which the client has been told."""
        try:
            return InferCall.decode(message.data, None if message.slot is None else message.offset)
        except DecodeError:
            if message.slot is not None:
                self.arena.give_back(message.slot)
            call.fail(GrpcStatus.INTERNAL, "the message is no ModelInferRequest")
            return None

    def _ask(
        self,
        call: GrpcCall,
        message: Message,
        request: InferCall,
        answered: Callable[[list[Any], Slot | None], None],
        refused: Callable[[RefusedError], None],
    ) -> None:
        """Submit an inference; one of the two callables is called, perhaps at once."""
        held = [] if message.slot is None else [message.slot]
        inference = None
        try:
            model = self._router.find(request.message.model_name, request.message.model_version)
            asked, slots = read_infer(model.spec, request, self.arena)
            held += slots
            inference = self._inference(call, model, asked, answered, refused)
            inference.arrived, inference.slots = message.arrived, held
            call.waiting.add(inference)
            model.submit(inference)
        except RefusedError as refusal:
            if inference is not None:
                call.waiting.discard(inference)
            for slot in held:
                self.arena.give_back(slot)
            refused(refusal)

    def _inference(
        self,
        call: GrpcCall,
        model: ServedModel,
        asked: InferRequest,
        answered: Callable[[list[Any], Slot | None], None],
        refused: Callable[[RefusedError], None],
    ) -> Inference:
        def done(inference: Inference, outputs: list[OutputTensor], slot: Slot | None) -> None:
            call.waiting.discard(inference)
            answered(write_infer(model.spec, asked, outputs), slot)

        def not_done(inference: Inference, refusal: RefusedError) -> None:
            call.waiting.discard(inference)
            refused(refusal)

        return Inference(
            asked.rows, asked.inputs, asked.outputs, 0.0, deadline_ms(model, asked), done, not_done,
            priority=asked.priority, kin=kin(model, asked),
            traceparent=call.headers.get(b"traceparent", b"").decode("latin-1"),
        )  # fmt: skip


def _plain(answer: Callable[[Any], Any], request: Any, call: GrpcCall, message: Message) -> None:
    """Answer a call that is no inference at once."""
    try:
        response = answer(request.FromString(bytes(message.data)))
    except DecodeError:
        call.fail(GrpcStatus.INTERNAL, "the message is not what this method takes")
    except RefusedError as refusal:
        _refuse(call, refusal)
    else:
        call.answer([response.SerializeToString()])


def _refuse(call: GrpcCall, refusal: RefusedError) -> None:
    """End a call with the status that stands for a refusal."""
    status = _STATUSES.get(refusal.status, GrpcStatus.INTERNAL)
    if refusal.overloaded:
        status = GrpcStatus.RESOURCE_EXHAUSTED
    more = []
    if refusal.retry_after_s is not None:
        more.append((b"grpc-retry-pushback-ms", b"%d" % (int(1000 * refusal.retry_after_s) + 1)))
    call.fail(status, refusal.message, more)


def _no_method(call: GrpcCall, message: Message) -> None:
    raise AssertionError("a call without a method has ended before its message")


_NO_METHOD = GrpcMethod(_no_method, 0)


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
