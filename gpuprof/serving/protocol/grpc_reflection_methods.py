"""Server reflection of gRPC: which services there are, and how their messages look.

grpcio's own package (1.81) speaks v1alpha; many clients ask for v1 first, or for nothing else. The messages of both
have the same fields, so that one servicer answers both.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

from gpuprof.serving.protocol.grpc_health import HEALTH
from gpuprof.serving.protocol.grpc_methods import CallLimits
from gpuprof.serving.protocol.open_inference import SERVICE, protocol_pool

_ALPHA, _FINAL = "v1alpha", "v1"
_SERVICES = (reflection.SERVICE_NAME.replace(_ALPHA, _FINAL), reflection.SERVICE_NAME)


def reflection_methods(limits: CallLimits) -> dict[str, Any]:
    """Return the handlers of both versions by their paths."""
    described = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(described)
    text = text_format.MessageToString(described)
    pool = protocol_pool()
    pool.Add(described)
    pool.Add(text_format.Parse(text.replace(_ALPHA, _FINAL), descriptor_pb2.FileDescriptorProto()))
    servicer = reflection.aio.ReflectionServicer((SERVICE, HEALTH, *_SERVICES), pool)
    answer = limits.read_all(servicer.ServerReflectionInfo, reflection_pb2.ServerReflectionRequest.FromString)
    serialize = reflection_pb2.ServerReflectionResponse.SerializeToString
    handler = grpc.stream_stream_rpc_method_handler(answer, None, serialize)
    return {f"/{service}/ServerReflectionInfo": handler for service in _SERVICES}
