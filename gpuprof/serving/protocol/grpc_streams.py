"""gRPC streams behind the edge: ModelStreamInfer, health's Watch and reflection, by plain grpcio on a Unix socket."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from gpuprof.serving.protocol.grpc_calls import STREAM_METHOD
from gpuprof.serving.protocol.grpc_messages import (
    SERVICE,
    decode_infer,
    protocol_pool,
    write_infer,
    write_stream_error,
    write_streamed,
)
from gpuprof.serving.protocol.http_api import HttpApi
from gpuprof.serving.protocol.http_message import HttpClient
from gpuprof.serving.router.infer_request import InferRequest, RequestBody
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError
from gpuprof.serving.transport.wire import Buffer


class StreamServer:
    """Serves streams on a Unix socket. ``api``: counts refusals."""

    def __init__(self, api: HttpApi) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core would print every mistake of a client
        import grpc
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection, reflection_pb2

        self._api, self._service = api, api.service
        self._statuses = health_pb2.HealthCheckResponse
        limits = ("grpc.max_receive_message_length", api.service.max_body_bytes), ("grpc.max_send_message_length", -1)
        self._server = grpc.aio.server(options=limits)
        self._end_of_stream = grpc.aio.EOF
        self._unavailable = grpc.StatusCode.UNAVAILABLE
        handler = grpc.stream_stream_rpc_method_handler(self._infer)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {STREAM_METHOD: handler}),)
        )
        self._health = health.aio.HealthServicer()
        self._is_ready: bool | None = None
        self._is_draining = asyncio.Event()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for module in (health_pb2, reflection_pb2):
            protocol_pool().AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        services = SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME
        reflection.enable_server_reflection(services, self._server, protocol_pool())

    async def start(self, path: str) -> None:
        """Listen on a Unix socket."""
        self._server.add_insecure_port(f"unix:{path}")
        await self._server.start()
        await self.watch()

    async def watch(self) -> None:
        """Notify health watchers of changes of readiness; called periodically."""
        if (is_ready := self._service.router.is_ready) != self._is_ready:
            self._is_ready = is_ready
            for service in ("", SERVICE):
                await self._health.set(service, self._statuses.SERVING if is_ready else self._statuses.NOT_SERVING)

    def drain(self) -> None:
        """End each stream when its requests have been answered."""
        self._is_draining.set()

    async def close(self) -> None:
        """Close the socket and all streams."""
        await self._server.stop(None)

    async def _infer(self, _: object, context: Any) -> None:
        """Answer the requests of a stream in the order of completion; a refusal does not end it."""
        client = str(dict(context.invocation_metadata() or ()).get("x-gpuprof-client", ""))
        permits, writing = asyncio.Semaphore(64), asyncio.Lock()  # reading pauses at 64 unanswered requests

        async def answer(message: bytes) -> None:
            data = await self._answer(message, client)
            async with writing:
                await context.write(data)
            permits.release()

        async with asyncio.TaskGroup() as answers:
            while (message := await self._read(context)) is not None:
                await permits.acquire()
                answers.create_task(answer(message))
        if self._is_draining.is_set():
            await context.abort(self._unavailable, "the server is stopping")

    async def _read(self, context: Any) -> bytes | None:
        """Return the next message; None at the end of the stream, and when the server is stopping."""
        reading = asyncio.ensure_future(context.read())
        draining = asyncio.ensure_future(self._is_draining.wait())
        try:
            await asyncio.wait((reading, draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            reading.cancel()  # without effect where it is done
        if not reading.done() or reading.cancelled():
            return None
        message = reading.result()
        return None if message is self._end_of_stream else bytes(message)

    async def _answer(self, message: bytes, peer: str) -> bytes:
        """Return the ModelStreamInferResponse of a request. When cancelled, it cancels the request."""
        client, request_id = _StreamClient(peer), ""
        body = RequestBody(message, arrived=time.monotonic())
        try:
            request_id = decode_infer(message).request.id
            model, request = self._api.grpc.read(message)
            body = self._service.hold(message, 0, body.arrived)
            self._service.submit(client, self._respond, "", None, model, request, body)
        except RefusedError as refusal:
            self._service.release(body.slot)
            client.refuse(refusal)
        try:
            return await client.answer
        except RefusedError as refusal:
            self._api.count_refusal(refusal, "grpc")
            return write_stream_error(refusal.message, request_id)
        except asyncio.CancelledError:
            if client.on_disconnect is not None:
                client.on_disconnect()
            raise

    def _respond(
        self,
        model: ServedModel,
        client: HttpClient,
        request: InferRequest,
        _: Inference,
        outputs: list[OutputTensor],
        slot: Slot | None,
    ) -> None:
        client.respond(200, b"", b"".join(write_streamed(write_infer(model.spec, request, outputs))))
        self._service.release(slot)


class _StreamClient:
    """The `HttpClient` of a request of a stream."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.on_disconnect: Callable[[], None] | None = None
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def respond(
        self,
        status: int,
        content_type: bytes,
        body: Buffer,
        tail: list[Buffer] | None = None,
        slot: Slot | None = None,
        extra: bytes = b"",
    ) -> None:
        """Set the answer."""
        if not self.answer.done():
            self.answer.set_result(bytes(body))

    def refuse(self, refusal: RefusedError) -> None:
        """Set the refusal."""
        if not self.answer.done():
            self.answer.set_exception(refusal)
