"""grpc.health.v1: whether the server can answer, told once (Check, List) or at every change (Watch).

The service of grpcio's own package (1.81) has no List. It also holds a lock while it writes to a watcher: one that
reads nothing keeps whoever tells it of a change waiting, and of two watchers the first to leave takes the other's
notice with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import cache
from http import HTTPStatus
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, message_factory, text_format
from grpc_health.v1 import health_pb2

from gpuprof.serving.protocol.grpc_methods import CallLimits
from gpuprof.serving.protocol.open_inference import protocol_pool
from gpuprof.serving.transport.inference import RefusedError

HEALTH = "grpc.health.v1.Health"
_SERVING, _NOT_SERVING, _UNKNOWN = (
    health_pb2.HealthCheckResponse.ServingStatus.Value(name) for name in ("SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
)
#: What the package's description of the protocol lacks: List, which returns a map.
_LIST_MESSAGES = """
message_type { name: "HealthListRequest" }
message_type {
  name: "HealthListResponse"
  field {
    name: "statuses" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE
    type_name: ".grpc.health.v1.HealthListResponse.StatusesEntry"
  }
  nested_type {
    name: "StatusesEntry"
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field {
      name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE
      type_name: ".grpc.health.v1.HealthCheckResponse"
    }
    options { map_entry: true }
  }
}
"""


class HealthService:
    """Answers the calls of grpc.health.v1: the same of the whole server, ``""``, and of each of its services.

    Parameters
    ----------
    services : collection of str

    Examples
    --------
    >>> health = HealthService(["inference"])
    >>> health.tell(is_serving=True)
    """

    def __init__(self, services: Collection[str]) -> None:
        self._services = ("", *services)
        self._is_serving = self._has_ended = False
        self._changed = asyncio.Event()

    def tell(self, is_serving: bool) -> None:
        """Say from now on whether the server can answer, to those that watch, too, without waiting for them."""
        if is_serving != self._is_serving and not self._has_ended:
            self._is_serving = is_serving
            self._wake_watchers()

    def end(self) -> None:
        """Say for good that the server cannot answer, and end the calls of those that watch."""
        self._is_serving, self._has_ended = False, True
        self._wake_watchers()

    async def check(self, request: Any, context: Any) -> Any:
        """Answer Check. Raises `RefusedError` where there is no such service."""
        if request.service not in self._services:
            raise RefusedError(HTTPStatus.NOT_FOUND, "there is no such service")
        return _message("HealthCheckResponse")(status=self._find_status(request.service))

    async def list(self, request: Any, context: Any) -> Any:
        """Answer List."""
        response = _message("HealthListResponse")()
        for service in self._services:
            response.statuses[service].status = self._find_status(service)
        return response

    async def watch(self, request: Any, context: Any) -> None:
        """Answer Watch: write the state now and whenever it has changed."""
        told = None
        while True:
            changed, status = self._changed, self._find_status(request.service)
            if status != told:
                await context.write(_message("HealthCheckResponse")(status=status))
                told = status
            if self._has_ended and changed is self._changed:
                return
            await changed.wait()

    def _find_status(self, service: str) -> int:
        if service not in self._services:
            return int(_UNKNOWN)
        return int(_SERVING if self._is_serving else _NOT_SERVING)

    def _wake_watchers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _describe() -> bytes:
    """Return the description of the protocol, with List."""
    described = descriptor_pb2.FileDescriptorProto()
    health_pb2.DESCRIPTOR.CopyToProto(described)
    methods = described.service[0].method
    if not any(method.name == "List" for method in methods):
        text_format.Merge(_LIST_MESSAGES, described)
        package = f".{described.package}."
        methods.add(name="List", input_type=f"{package}HealthListRequest", output_type=f"{package}HealthListResponse")
    return bytes(described.SerializeToString())


def health_methods(service: HealthService, limits: CallLimits) -> dict[str, Any]:
    """Return the handlers of the calls by their paths."""
    one, many = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
    handlers = {"Check": (service.check, one), "List": (service.list, one), "Watch": (service.watch, many)}
    methods = {}
    for name, (behaviour, make_handler) in handlers.items():
        method = _service().methods_by_name[name]
        request, response = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))
        answer = limits.read_one(behaviour, request.FromString, is_probe=name == "Check")
        methods[f"/{HEALTH}/{name}"] = make_handler(answer, None, response.SerializeToString)
    return methods


@cache
def _service() -> Any:
    """Return the descriptor of the service, which who asks for reflection finds beside that of inference."""
    protocol_pool().AddSerializedFile(_describe())
    return protocol_pool().FindServiceByName(HEALTH)


def _message(name: str) -> Any:
    """Return the class of a message."""
    return message_factory.GetMessageClass(_service().file.message_types_by_name[name])
