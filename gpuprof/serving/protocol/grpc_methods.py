"""Which call is answered by what, and who may make it: known before any byte of a message has been read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from gpuprof.serving.protocol.grpc_descriptions import DescriptionCalls
from gpuprof.serving.protocol.grpc_inference import InferenceCalls
from gpuprof.serving.protocol.grpc_stream import InferStream
from gpuprof.serving.protocol.open_inference import SERVICE, protocol_pool, service_methods
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.security import Security

_HEALTH = "grpc.health.v1.Health"
_FOR_EVERYBODY = frozenset({f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady", f"/{_HEALTH}/Check"})


class GuardedMethods(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    """Finds what answers a call, and refuses one without the token before its message is received.

    Parameters
    ----------
    methods : mapping of str to RpcMethodHandler
        By path.
    security : Security
        What calls must have in their metadata (``authorization``); whether the server lives and is ready is told to
        everybody.
    """

    def __init__(self, methods: Mapping[str, Any], security: Security) -> None:
        self._methods = methods
        self._security = security

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a call; None where there is no such method."""
        path = handler_call_details.method
        if self._security.token and path not in _FOR_EVERYBODY:
            metadata = handler_call_details.invocation_metadata or ()
            values = [value for key, value in metadata if key == "authorization"]
            if len(values) != 1 or not self._security.admits(_as_bytes(values[0])):
                return _UNAUTHENTICATED
        return self._methods.get(path)


class _Collected:
    """Stands where grpc's generated code expects a server, and keeps what it registers."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


def inference_methods(router: Router, calls: InferenceCalls) -> dict[str, Any]:
    """Return the handlers of the Open Inference Protocol by their paths."""
    described = DescriptionCalls(router)

    async def stream(_: object, context: Any) -> None:
        await InferStream(calls, context).run()

    methods = {}
    for method in service_methods():
        if method.name == "ModelInfer":
            handler = grpc.stream_unary_rpc_method_handler(calls.infer)
        elif method.name == "ModelStreamInfer":
            handler = grpc.stream_stream_rpc_method_handler(stream)
        else:
            handler = grpc.unary_unary_rpc_method_handler(described.handler(method))
        methods[f"/{SERVICE}/{method.name}"] = handler
    return methods


def standard_methods(health_servicer: health.aio.HealthServicer) -> dict[str, Any]:
    """Return the handlers of gRPC's own services by their paths: health and server reflection."""
    pool = protocol_pool()
    for described in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        pool.AddSerializedFile(described.serialized_pb)
    names = (SERVICE, _HEALTH, reflection.SERVICE_NAME)
    collected = _Collected()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, collected)
    reflected = reflection.aio.ReflectionServicer(names, pool)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, collected)
    return collected.methods


async def _refuse(_: object, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not have the token of this server")


#: Reads no message: for the token, it must not matter what else was sent.
_UNAUTHENTICATED = grpc.stream_stream_rpc_method_handler(_refuse)


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1", "replace")
