"""The messages and calls of the Open Inference Protocol, compiled by protoc from ``open_inference.proto``.

python -m grpc_tools.protoc -I. --descriptor_set_out=open_inference.binpb open_inference.proto

The descriptor is loaded into a separate pool: generated code would be registered in the global pool, where other
packages may have registered the same protocol. A test compiles the source again and compares.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"


@cache
def protocol_pool() -> descriptor_pool.DescriptorPool:
    """Return the descriptors of the protocol."""
    data = files("gpuprof.serving.protocol").joinpath("open_inference.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.Add(file)
    return pool


@cache
def message_class(name: str) -> Any:
    """Return the class of a message, ``"ModelInferRequest"``."""
    return message_factory.GetMessageClass(protocol_pool().FindMessageTypeByName(f"inference.{name}"))


@cache
def field_number(message: str, field: str) -> int:
    """Return the number of a field of a message."""
    number: int = message_class(message).DESCRIPTOR.fields_by_name[field].number
    return number


def service_methods() -> list[Any]:
    """Return the descriptors of the calls."""
    return list(protocol_pool().FindServiceByName(SERVICE).methods)
