"""The Open Inference Protocol over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

import grpc
import grpc.aio

from gpuprof.errors import InputError
from gpuprof.serving.protocol import descriptions
from gpuprof.serving.protocol.grpc_messages import InferCall, as_streamed, protocol, read_infer, write_infer
from gpuprof.serving.protocol.http_api import kin
from gpuprof.serving.router.public_name import version_order
from gpuprof.serving.router.router import Router, deadline_ms
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError
from gpuprof.serving.transport.security import OPEN, Security

#: Of the call at hand.
_traceparent: ContextVar[str] = ContextVar("traceparent", default="")
_SERVICE = "GRPCInferenceService"
_CODES = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}


class GrpcApi:
    """Answers the calls of the service.

    Parameters
    ----------
    router : Router
    max_message_bytes : int
    security : Security
        What calls must have in their metadata (``authorization``), and the certificate.
    """

    def __init__(self, router: Router, max_message_bytes: int, security: Security = OPEN) -> None:
        self._router = router
        self._security = security
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # or a port that is taken would be shared without a word
        ]
        self._server = grpc.aio.server(options=options, interceptors=[_Doorkeeper(security)] if security.token else [])
        self._server.add_generic_rpc_handlers((self._handlers(),))

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port.

        Raises
        ------
        InputError
            When the port is taken.
        """
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._add_port(where)
        except RuntimeError:
            bound = 0
        if not bound:
            raise InputError(f"port {port} is taken on {host}", "choose another with --grpc-port")
        await self._server.start()
        return int(bound)

    def _add_port(self, where: str) -> int:
        security = self._security
        if security.context is None:
            return int(self._server.add_insecure_port(where))
        pair = security.key.encode(), security.certificate.encode()
        return int(self._server.add_secure_port(where, grpc.ssl_server_credentials([pair])))

    async def stop(self, grace_s: float) -> None:
        """Take no more calls and wait for those that are there."""
        await self._server.stop(grace_s)

    def _handlers(self) -> grpc.GenericRpcHandler:
        known = protocol()
        handlers = {}
        for method in known.methods[_SERVICE]:
            answer = getattr(self, f"_{_snake(method.name)}")
            make = grpc.stream_stream_rpc_method_handler if method.streams_in else grpc.unary_unary_rpc_method_handler
            infers = method.request == "ModelInferRequest"  # its tensors are not protobuf's to copy
            handlers[method.name] = make(
                answer if method.streams_in else _translated(answer),
                InferCall.decode if infers else known.message(method.request).FromString,
                None if infers else known.message(method.response).SerializeToString,
            )
        return grpc.method_handlers_generic_handler(f"{known.package}.{_SERVICE}", handlers)

    async def _server_live(self, request: Any) -> Any:
        return protocol().message("ServerLiveResponse")(live=True)

    async def _server_ready(self, request: Any) -> Any:
        return protocol().message("ServerReadyResponse")(ready=self._router.is_ready)

    async def _model_ready(self, request: Any) -> Any:
        try:
            ready = self._router.find(request.name, request.version).is_ready
        except RefusedError:
            ready = False
        return protocol().message("ModelReadyResponse")(ready=ready)

    async def _server_metadata(self, request: Any) -> Any:
        return protocol().message("ServerMetadataResponse")(**descriptions.server_metadata())

    async def _model_metadata(self, request: Any) -> Any:
        model = self._router.find(request.name, request.version)
        known = sorted(self._router.models[request.name], key=version_order)
        versions = [request.version] if request.version else known
        return protocol().message("ModelMetadataResponse")(**descriptions.model_metadata(model.spec, versions))

    async def _model_config(self, request: Any) -> Any:
        config = descriptions.model_config(self._router.find(request.name, request.version))
        return protocol().message("ModelConfigResponse")(config=config)

    async def _model_statistics(self, request: Any) -> Any:
        if request.name:
            self._router.find(request.name, request.version)
        chosen = descriptions.chosen_statistics(self._router.models, request.name, request.version)
        return protocol().message("ModelStatisticsResponse")(model_stats=chosen)

    async def _repository_index(self, request: Any) -> Any:
        entries = descriptions.repository_index(self._router.models)
        ready = [entry for entry in entries if not request.ready or entry["state"] == "READY"]
        return protocol().message("RepositoryIndexResponse")(models=ready)

    async def _model_infer(self, call: InferCall) -> bytes:
        model = self._router.find(call.message.model_name, call.message.model_version)
        arrived = time.monotonic()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        asked, slots = read_infer(model.spec, call, self._router.arena)

        def done(inference: Inference, outputs: list[OutputTensor], slot: Slot | None) -> None:
            if not answer.done():
                answer.set_result(write_infer(model.spec, asked, outputs))
            if slot is not None:
                self._router.arena.give_back(slot)

        def refused(inference: Inference, refusal: RefusedError) -> None:
            if not answer.done():
                answer.set_exception(refusal)

        inference = Inference(
            asked.rows, asked.inputs, asked.outputs, arrived, deadline_ms(model, asked), done, refused,
            priority=asked.priority, slots=slots, kin=kin(model, asked), traceparent=_traceparent.get(),
        )  # fmt: skip
        try:
            model.submit(inference)
        except RefusedError:
            inference.release(self._router.arena)
            raise
        try:
            return await answer
        except asyncio.CancelledError:
            inference.cancelled = True
            raise

    async def _model_stream_infer(self, calls: AsyncIterator[InferCall], context: Any) -> AsyncIterator[bytes]:
        """Answer each request of a stream when it is done, errors as messages."""
        _traceparent.set(_parent(context))
        answers: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def one(call: InferCall) -> None:
            try:
                await answers.put(as_streamed(await self._model_infer(call)))
            except RefusedError as refusal:
                failed = protocol().message("ModelStreamInferResponse")(error_message=refusal.message)
                failed.infer_response.id = call.message.id
                await answers.put(failed.SerializeToString())

        async def read() -> None:
            tasks = set()
            async for call in calls:
                task = asyncio.ensure_future(one(call))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
            await answers.put(None)

        reader = asyncio.ensure_future(read())
        try:
            while (answer := await answers.get()) is not None:
                yield answer
        finally:
            reader.cancel()


class _Doorkeeper(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets only calls with the token in; whether the server lives and is ready is told to everybody."""

    def __init__(self, security: Security) -> None:
        self._security = security

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        said = dict(details.invocation_metadata).get("authorization", "")
        text = said if isinstance(said, bytes) else said.encode()
        if self._security.admits(text) or details.method.rsplit("/", 1)[-1] in _FOR_EVERYBODY:
            return await continuation(details)
        return _TURN_AWAY[details.method.endswith("StreamInfer")]


async def _turn_away(request: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not have the token of this server")


_FOR_EVERYBODY = ("ServerLive", "ServerReady")
_TURN_AWAY = (
    grpc.unary_unary_rpc_method_handler(_turn_away),
    grpc.stream_stream_rpc_method_handler(_turn_away),
)


def _parent(context: Any) -> str:
    """Return the client's span that a call belongs to, as W3C Trace Context writes it; empty: none."""
    return next((str(value) for key, value in context.invocation_metadata() or () if key == "traceparent"), "")


def _translated(answer: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Turn refusals into gRPC's status codes."""

    async def call(request: Any, context: Any) -> Any:
        _traceparent.set(_parent(context))
        try:
            return await answer(request)
        except RefusedError as refusal:
            code = _CODES.get(refusal.status, grpc.StatusCode.INTERNAL)
            if refusal.overloaded:
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
            if refusal.retry_after_s is not None:
                context.set_trailing_metadata((("grpc-retry-pushback-ms", str(int(1000 * refusal.retry_after_s) + 1)),))
            await context.abort(code, refusal.message)

    return call


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
