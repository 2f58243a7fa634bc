"""Which call is answered by what, and who may make it: known before any byte of a message has been read."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from gpuprof.serving.protocol.grpc_descriptions import DescriptionCalls
from gpuprof.serving.protocol.grpc_inference import InferenceCalls, peer_of
from gpuprof.serving.protocol.grpc_reader import MessageReader
from gpuprof.serving.protocol.grpc_stream import InferStream
from gpuprof.serving.protocol.open_inference import SERVICE, message_class, protocol_pool, service_methods
from gpuprof.serving.protocol.peer_counts import PeerCounts
from gpuprof.serving.protocol.protocol_parts import CountRefusal
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.security import Security
from gpuprof.serving.transport.wire import Buffer

#: Answers a call, given its messages or its only one, and the context.
Behaviour = Callable[[Any, Any], Awaitable[Any]]
#: Of a message that is no inference.
_MAX_SHORT_BYTES = 1 << 16
_HEALTH = "grpc.health.v1.Health"
_PUBLIC_PREFIX = frozenset({f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady", f"/{_HEALTH}/Check"})
_STATUSES = {
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.REQUEST_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}


class GuardedMethods(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    """Finds what answers a call, and refuses one without the token before its message is received.

    Parameters
    ----------
    methods : mapping of str to RpcMethodHandler
        By path.
    security : Security
        What calls must have in their metadata (``authorization``); whether the server lives and is ready is told to
        everybody.
    count_refusal : callable
        Told what is refused.
    """

    def __init__(self, methods: Mapping[str, Any], security: Security, count_refusal: CountRefusal) -> None:
        self._methods = methods
        self._security = security
        self._count_refusal = count_refusal
        # Reads no message: for the token, it must not matter what else was sent.
        text = "the call does not have the token of this server"
        self._unauthenticated = self._refuse_by(RefusedError(HTTPStatus.UNAUTHORIZED, text))

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a call; None where there is no such method."""
        path = handler_call_details.method
        metadata = handler_call_details.invocation_metadata or ()
        if self._security.token and path not in _PUBLIC_PREFIX:
            values = [value for key, value in metadata if key == "authorization"]
            if len(values) != 1 or not self._security.admits(_as_bytes(values[0])):
                return self._unauthenticated
        return self._methods.get(path)

    def _refuse_by(self, refusal: RefusedError) -> Any:
        async def refuse(_: object, context: Any) -> None:
            self._count_refusal(refusal)
            await _abort_with(context, refusal)

        return grpc.stream_stream_rpc_method_handler(refuse)


class _HandlerCollector:
    """Stands where grpc's generated code expects a server, and keeps what it registers."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Take over the methods of a service."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Take over the methods of a service by their names."""
        self.methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


class CallLimits:
    """Has every call read its messages through one reader, and lets an address have only so many calls at once.

    Parameters
    ----------
    reader : MessageReader
    receive_s : float
        How long the message of a call may take to arrive.
    per_peer : int
    count_refusal : callable
        Told what is refused.
    """

    def __init__(self, reader: MessageReader, receive_s: float, per_peer: int, count_refusal: CountRefusal) -> None:
        self.count_refusal = count_refusal
        self._reader = reader
        self._receive_s = receive_s
        self.peers = PeerCounts(per_peer)

    def limit(self, behaviour: Behaviour) -> Behaviour:
        """Return ``behaviour``, but that it ends the calls that it refuses, and those that are too many of a client."""

        async def answer(messages: Any, context: Any) -> Any:
            peer = peer_of(context)
            is_one_more = self.peers.add(peer)
            try:
                if not is_one_more:
                    raise _too_many(self.peers.per_peer)
                return await behaviour(messages, context)
            except RefusedError as refusal:
                self.count_refusal(refusal)
                await _abort_with(context, refusal)
            finally:
                if is_one_more:
                    self.peers.discard(peer)

        return answer

    def read_one(self, behaviour: Behaviour, parse: Callable[[Buffer], Any]) -> Behaviour:
        """Return what reads the only message of a call, which is a short one, and has ``behaviour`` answer it.

        grpcio would receive it, however long, before the call is known here; so the call is registered as one that
        sends a stream, which on the wire is the same.
        """

        async def answer(_: object, context: Any) -> Any:
            request = await self._read_short(context, parse, self._receive_s)
            if request is None:
                raise RefusedError(HTTPStatus.BAD_REQUEST, "the call has no message")
            return await behaviour(request, context)

        return self.limit(answer)

    def read_all(
        self, behaviour: Callable[[Any, Any], AsyncIterator[Any]], parse: Callable[[Buffer], Any]
    ) -> Behaviour:
        """Return what reads a stream of short messages, and writes what ``behaviour`` yields for them."""

        async def answer(_: object, context: Any) -> None:
            async def requests() -> AsyncIterator[Any]:
                while (request := await self._read_short(context, parse, math.inf)) is not None:
                    yield request

            async for response in behaviour(requests(), context):
                await context.write(response)

        return self.limit(answer)

    async def _read_short(self, context: Any, parse: Callable[[Buffer], Any], limit_s: float) -> Any:
        message = await self._reader.read_message(context, limit_s)
        if message is None:
            return None
        self._reader.release(len(message))
        if len(message) > _MAX_SHORT_BYTES:
            text = f"the message is larger than {_MAX_SHORT_BYTES} bytes"
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        try:
            return parse(message)
        except DecodeError:
            text = "the message is not what this method takes"
            raise RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, text) from None


def inference_methods(router: Router, calls: InferenceCalls, limits: CallLimits) -> dict[str, Any]:
    """Return the handlers of the Open Inference Protocol by their paths."""
    described = DescriptionCalls(router)

    async def stream(_: object, context: Any) -> None:
        await InferStream(calls, context, limits.count_refusal).run()

    methods = {}
    for method in service_methods():
        if method.name == "ModelInfer":
            handler = grpc.stream_unary_rpc_method_handler(limits.limit(calls.infer))
        elif method.name == "ModelStreamInfer":
            handler = grpc.stream_stream_rpc_method_handler(limits.limit(stream))
        else:
            request, response = (message_class(one.name) for one in (method.input_type, method.output_type))
            answer = limits.read_one(described.handler(method), request.FromString)
            handler = grpc.stream_unary_rpc_method_handler(answer, None, response.SerializeToString)
        methods[f"/{SERVICE}/{method.name}"] = handler
    return methods


def standard_methods(health_servicer: health.aio.HealthServicer, limits: CallLimits) -> dict[str, Any]:
    """Return the handlers of gRPC's own services by their paths: health and server reflection."""
    pool = protocol_pool()
    for described in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        pool.AddSerializedFile(described.serialized_pb)
    names = (SERVICE, _HEALTH, reflection.SERVICE_NAME)
    collected = _HandlerCollector()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, collected)
    reflected = reflection.aio.ReflectionServicer(names, pool)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, collected)
    return {path: _limit_standard(handler, limits) for path, handler in collected.methods.items()}


def _limit_standard(handler: Any, limits: CallLimits) -> Any:
    """Return a handler of grpc's generated code as one that reads through the reader of all calls."""
    parse, serialize = handler.request_deserializer, handler.response_serializer
    if handler.request_streaming:
        answer = limits.read_all(handler.stream_stream, parse)
    elif handler.response_streaming:
        answer = limits.read_one(handler.unary_stream, parse)
    else:
        return grpc.stream_unary_rpc_method_handler(limits.read_one(handler.unary_unary, parse), None, serialize)
    return grpc.stream_stream_rpc_method_handler(answer, None, serialize)


def _too_many(per_peer: int) -> RefusedError:
    message = f"the address has {per_peer} calls that are not answered yet, as many as it may have"
    return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, message, 1.0, overloaded=True)


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1", "replace")


async def _abort_with(context: Any, refusal: RefusedError) -> NoReturn:
    """End a call with the status that stands for a refusal."""
    code = _STATUSES.get(refusal.status, grpc.StatusCode.INTERNAL)
    if refusal.overloaded:
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers: tuple[tuple[str, str], ...] = ()
    if refusal.retry_after_s is not None:
        # gRFC A6: a client that retries by its service config waits so long.
        trailers = (("grpc-retry-pushback-ms", str(int(1000 * refusal.retry_after_s) + 1)),)
    await context.abort(code, refusal.message, trailers)
    raise AssertionError("a call that was aborted goes on")
