"""Which call is answered by what, and who may make it: known before any byte of a message has been read."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from gpuprof.serving.protocol.begun_question import QUESTION_PATH
from gpuprof.serving.protocol.grpc_descriptions import DescriptionCalls
from gpuprof.serving.protocol.grpc_inference import InferenceCalls
from gpuprof.serving.protocol.grpc_reader import MAX_SHORT_BYTES, MessageReader
from gpuprof.serving.protocol.grpc_refusals import end_call
from gpuprof.serving.protocol.grpc_stream import InferStream
from gpuprof.serving.protocol.open_inference import SERVICE, message_class, service_methods
from gpuprof.serving.protocol.peer_counts import PeerCounts, peer_of
from gpuprof.serving.protocol.protocol_parts import CountRefusal
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.security import Security
from gpuprof.serving.transport.wire import Buffer

#: Answers a call, given its messages or its only one, and the context.
Behaviour = Callable[[Any, Any], Awaitable[Any]]
_PROBES = "ServerLive", "ServerReady"
_PUBLIC_PREFIX = frozenset({*(f"/{SERVICE}/{name}" for name in _PROBES), "/grpc.health.v1.Health/Check", QUESTION_PATH})
#: Calls that grpcio has at a time, of which it refuses any more, and what is in them for those that ask for health and
#: for others. The rest are on their way here.
MAX_CALLS = 20_000
_MOST_CALLS, _MOST_PROBES = 8_000, 2_000


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
            await end_call(context, refusal)

        return grpc.stream_stream_rpc_method_handler(refuse)


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
        self._peers = PeerCounts(per_peer, _MOST_CALLS)
        #: Beside calls of such a client, or of others at its address, it can still ask for the server's health.
        self._probing = PeerCounts(per_peer, _MOST_PROBES)

    @property
    def turned_away(self) -> int:
        """Calls beyond those that an address may have."""
        return self._peers.turned_away + self._probing.turned_away

    @property
    def open_calls(self) -> int:
        """How many calls there are."""
        return len(self._peers) + len(self._probing)

    @property
    def clients(self) -> int:
        """How many clients have calls."""
        return self._peers.clients + self._probing.clients

    def limit(self, behaviour: Behaviour, is_probe: bool = False) -> Behaviour:
        """Return ``behaviour``, but that it ends the calls that it refuses, and those that are too many of a client.

        ``is_probe``: Whether it says at once how the server is; of such calls a client may have as many beside others.
        """
        peers = self._probing if is_probe else self._peers

        async def answer(messages: Any, context: Any) -> Any:
            peer = peer_of(context)
            is_one_more = peers.add(peer)
            try:
                if not is_one_more:
                    raise _too_many()
                return await behaviour(messages, context)
            except RefusedError as refusal:
                self.count_refusal(refusal)
                # What grpcio ends the call with keeps the refusal in a cycle, and with it the message.
                refusal.forget_origin()
                if not context.done():  # whoever waited for its message has told it already
                    await end_call(context, refusal)
            finally:
                if is_one_more:
                    peers.discard(peer)

        return answer

    def read_one(self, behaviour: Behaviour, parse: Callable[[Buffer], Any], is_probe: bool = False) -> Behaviour:
        """Return what reads the only message of a call, which is a short one, and has ``behaviour`` answer it.

        grpcio would receive it, however long, before the call is known here; so the call is registered as one that
        sends a stream, which on the wire is the same.
        """

        async def answer(_: object, context: Any) -> Any:
            request = await self._read_short(context, parse, self._receive_s)
            if request is None:
                raise RefusedError(HTTPStatus.BAD_REQUEST, "the call has no message")
            return await behaviour(request, context)

        return self.limit(answer, is_probe)

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
        message = await self._reader.read_message(context, limit_s, is_short=True)
        if message is None:
            return None
        self._reader.release(len(message))
        if len(message) > MAX_SHORT_BYTES:
            text = f"the message is larger than {MAX_SHORT_BYTES} bytes"
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        try:
            return parse(message)
        except DecodeError:
            text = "the message is not what this method takes"
            raise RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, text) from None


def inference_methods(
    router: Router, calls: InferenceCalls, limits: CallLimits, streams: set[InferStream]
) -> dict[str, Any]:
    """Return the handlers of the Open Inference Protocol by their paths; ``streams`` will hold those that are open."""
    described = DescriptionCalls(router)

    async def stream(_: object, context: Any) -> None:
        own = InferStream(calls, context, limits.count_refusal)
        streams.add(own)
        try:
            await own.run()
        finally:
            streams.discard(own)

    methods = {}
    for method in service_methods():
        if method.name == "ModelInfer":
            handler = grpc.stream_unary_rpc_method_handler(limits.limit(calls.infer))
        elif method.name == "ModelStreamInfer":
            handler = grpc.stream_stream_rpc_method_handler(limits.limit(stream))
        else:
            request, response = (message_class(one.name) for one in (method.input_type, method.output_type))
            answer = limits.read_one(described.handler(method), request.FromString, method.name in _PROBES)
            handler = grpc.stream_unary_rpc_method_handler(answer, None, response.SerializeToString)
        methods[f"/{SERVICE}/{method.name}"] = handler
    return methods


def _too_many() -> RefusedError:
    message = "the address has as many calls that are not answered yet as it may have"
    return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, message, 1.0, overloaded=True)


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1", "replace")
