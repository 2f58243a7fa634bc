"""gRPC streams behind the edge: ModelStreamInfer, health's Watch and reflection, by plain grpcio on a Unix socket."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuprof.serving.protocol.grpc_calls import STREAM_METHOD
from gpuprof.serving.protocol.grpc_messages import (
    InferCall,
    LargeCall,
    open_call,
    read_infer,
    write_infer,
    write_stream_error,
    write_streamed,
)
from gpuprof.serving.protocol.open_inference import SERVICE, protocol_pool
from gpuprof.serving.protocol.text_pool import place_inputs, read_large_call, refuse_long_text
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError
from gpuprof.serving.transport.wire import Buffer

if TYPE_CHECKING:
    from gpuprof.serving.protocol.http_api import HttpApi

#: Limit of unanswered requests of a stream, beyond which reading pauses.
_DEPTH = 64
_ON_LOOP_BYTES = 1 << 16
_KNOWN_SERVICES = ("", SERVICE)


class StreamServer:
    """Serves streams on a Unix socket. Messages: `HttpApi` has the pool and the router."""

    def __init__(self, api: HttpApi, max_message_bytes: int) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core would print every mistake of a client
        import grpc
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc

        self._api = api
        self._streams: set[_Stream] = set()
        self._statuses = health_pb2.HealthCheckResponse
        options = [("grpc.max_receive_message_length", max_message_bytes), ("grpc.max_send_message_length", -1)]
        self._server = grpc.aio.server(options=options)
        handler = grpc.stream_stream_rpc_method_handler(self._infer)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {STREAM_METHOD: handler}), _reflection_handler())
        )
        self._health = health.aio.HealthServicer()
        self._is_ready: bool | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, path: str) -> None:
        """Listen on a Unix socket."""
        self._server.add_insecure_port(f"unix:{path}")
        await self._server.start()
        await self.watch()

    async def watch(self) -> None:
        """Notify health watchers of changes of readiness; called periodically."""
        if (is_ready := self._api.router.is_ready) != self._is_ready:
            self._is_ready = is_ready
            for service in _KNOWN_SERVICES:
                await self._health.set(service, self._statuses.SERVING if is_ready else self._statuses.NOT_SERVING)

    def drain(self) -> None:
        """End each stream when its requests have been answered."""
        for stream in self._streams:
            stream.stop()

    async def close(self) -> None:
        """Close the socket and all streams."""
        await self._server.stop(None)

    async def _infer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        import grpc

        stream = _Stream(self._api, context)
        self._streams.add(stream)
        reader = asyncio.ensure_future(stream.read(requests))
        try:
            while (answer := await stream.answers.get()) is not None:
                yield answer
            if not stream.client_ended:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        finally:
            self._streams.discard(stream)
            reader.cancel()
            stream.cancel()


class _Stream:
    """A stream, whose answers leave in the order of completion."""

    def __init__(self, api: HttpApi, context: Any) -> None:
        self._api = api
        metadata = dict(context.invocation_metadata() or ())
        self._client = str(metadata.get("x-gpuprof-client", ""))
        self.answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._permits = asyncio.Semaphore(_DEPTH)
        self._clients: set[_StreamClient] = set()
        self._is_last = self.client_ended = False

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        """Submit requests until the client has sent its last."""
        async for message in requests:
            await self._permits.acquire()
            client = _StreamClient(self._client, self._settle)
            self._clients.add(client)
            try:
                await self._submit(message, client)
            except RefusedError as refusal:
                client.refuse(refusal)
        self.client_ended = True
        self.stop()

    def stop(self) -> None:
        """End the stream when everything has been answered."""
        self._is_last = True
        self._finish()

    def cancel(self) -> None:
        """Cancel the requests of a client that has disconnected."""
        for client in list(self._clients):
            if client.on_disconnect is not None:
                client.on_disconnect()

    async def _submit(self, message: bytes, client: _StreamClient) -> None:
        api, arrived = self._api, time.monotonic()
        call: InferCall | LargeCall = open_call(message, _ON_LOOP_BYTES)
        client.id = call.id
        model = api.router.find(call.name, call.version)
        if isinstance(call, LargeCall):
            refuse_long_text(call.text_bytes)
            request = await api.pool.run(read_large_call, model.spec, message)
        else:
            request = read_infer(model.spec, call)
        request, slots = place_inputs(request, api.arena)

        def done(_: Inference, outputs: list[OutputTensor], slot: Slot | None) -> None:
            client.respond(200, b"", b"".join(write_streamed(write_infer(model.spec, request, outputs))))
            if slot is not None:
                api.arena.give_back(slot)

        api.submit(model, client, request, slots, arrived, done)

    def _settle(self, client: _StreamClient, answer: bytes | RefusedError) -> None:
        self._clients.discard(client)
        if isinstance(answer, RefusedError):
            self._api.count_refusal(answer, "grpc")
            answer = write_stream_error(answer.message, client.id)
        self.answers.put_nowait(answer)
        self._permits.release()
        self._finish()

    def _finish(self) -> None:
        if self._is_last and not self._clients:
            self.answers.put_nowait(None)


class _StreamClient:
    """The `HttpClient` of a request of a stream."""

    def __init__(self, peer: str, settle: Callable[[_StreamClient, bytes | RefusedError], None]) -> None:
        self.peer, self.id = peer, ""
        self.on_disconnect: Callable[[], None] | None = None
        self._settle = partial(settle, self)

    def respond(
        self,
        status: int,
        content_type: bytes,
        body: Buffer,
        tail: list[Buffer] | None = None,
        slot: Slot | None = None,
        extra: bytes = b"",
    ) -> None:
        """Send an answer as a single message."""
        self._settle(bytes(body))

    def respond_json(self, status: int, document: object, extra: bytes = b"") -> None:
        """Raise: no answer of a stream is JSON."""
        raise NotImplementedError

    def refuse(self, refusal: RefusedError) -> None:
        """Send an error as a message of the stream, which continues."""
        self._settle(refusal)


def _reflection_handler() -> Any:
    """Return the handler of server reflection, v1 and v1alpha, whose messages have the same fields."""
    import grpc
    from google.protobuf import descriptor_pb2, text_format
    from grpc_health.v1 import health_pb2
    from grpc_reflection.v1alpha import reflection, reflection_pb2

    pool = protocol_pool()
    described, health = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(described)
    health_pb2.DESCRIPTOR.CopyToProto(health)
    text = text_format.MessageToString(described)
    pool.Add(health)
    pool.Add(described)
    pool.Add(text_format.Parse(text.replace("v1alpha", "v1"), descriptor_pb2.FileDescriptorProto()))
    names = (reflection.SERVICE_NAME.replace("v1alpha", "v1"), reflection.SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer((SERVICE, "grpc.health.v1.Health", *names), pool)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {f"/{name}/ServerReflectionInfo": method for name in names}

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
        """Finds the reflection service by both of its names."""

        def service(self, call: Any) -> Any:
            """Return the handler of a call, None for other services."""
            return methods.get(call.method)

    return Handler()
