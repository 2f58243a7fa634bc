"""Clients that read slowly, close, half-close and cancel, over HTTP, gRPC and both with TLS: what they get is counted.

Each request has a byte of its own of which its tensor is made, and the model gives back what it is given, so that any
other byte in an answer is somebody else's, or memory that was free.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

import numpy as np

#: What a client does with a request that it has sent.
MANNERS = ("reads", "reads slowly", "half-closes", "closes", "cancels")
#: Which protocols there are.
SCHEMES = ("http", "https", "grpc", "grpcs")
_PAUSE_S = 0.02
_TIMEOUT_S = 60.0
_RECEIVE_BUFFER = 1 << 15
#: A channel has a connection of its own, and takes what it asked for.
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens; ``authority`` is the certificate (PEM) of one with TLS, ``token`` what it asks for."""

    scheme: str
    host: str
    port: int
    authority: str = ""
    token: str = ""


@dataclass(frozen=True)
class ClientRequest:
    """One request: how it is sent, for which model and with how large a tensor."""

    endpoint: Endpoint
    manner: str
    model: str
    row_bytes: int
    mark: int


@dataclass(frozen=True)
class Got:
    """Whole answers, bytes in all answers that were not the client's own, and requests that were refused."""

    answers: int = 0
    foreign: int = 0
    refused: int = 0

    def __add__(self, other: Got) -> Got:
        return Got(self.answers + other.answers, self.foreign + other.foreign, self.refused + other.refused)


def send_all(requests: Sequence[ClientRequest], at_once: int) -> Got:
    """Send requests, so many at once; return what came of all."""
    with ThreadPoolExecutor(at_once) as pool:
        return sum(pool.map(send, requests), Got())


def send(request: ClientRequest) -> Got:
    """Send one request and do with its answer what its manner says."""
    return _send_grpc(request) if request.endpoint.scheme.startswith("grpc") else _send_http(request)


def _send_http(request: ClientRequest) -> Got:
    where = request.endpoint
    with suppress(OSError, HTTPException), connect(where) as connection:
        connection.sendall(http_request(request))
        if request.manner == "closes":
            return Got()
        if request.manner == "cancels":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not an end
            return Got()
        if request.manner == "half-closes" and not isinstance(connection, ssl.SSLSocket):
            connection.shutdown(socket.SHUT_WR)
        if request.manner == "reads slowly":
            time.sleep(_PAUSE_S)
        answer = HTTPResponse(connection)
        answer.begin()
        body = _read_slowly(answer) if request.manner == "reads slowly" else answer.read()
        if answer.status != 200:
            return Got(refused=1)
        tensor = body[int(answer.headers["Inference-Header-Content-Length"]) :]
        return Got(1, _foreign(tensor, request) + abs(len(tensor) - request.row_bytes))
    return Got()


def _read_slowly(answer: HTTPResponse) -> bytes:
    parts = []
    while part := answer.read(1 << 17):
        parts.append(part)
        time.sleep(_PAUSE_S / 4.0)
    return b"".join(parts)


def connect(where: Endpoint) -> socket.socket:
    """Return a connection whose buffer takes little, so that answers back up."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    connection.settimeout(_TIMEOUT_S)
    connection.connect((where.host, where.port))
    if where.scheme != "https":
        return connection
    context = ssl.create_default_context(cadata=where.authority)
    context.check_hostname = False
    return context.wrap_socket(connection)


def http_request(request: ClientRequest) -> bytes:
    """Return a request with a binary tensor at its end."""
    entry: dict[str, Any] = {"name": "INPUT0", "datatype": "FP32", "shape": [1, request.row_bytes // 4]}
    entry["parameters"] = {"binary_data_size": request.row_bytes}
    text = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    lines = [
        f"POST /v2/models/{request.model}/infer HTTP/1.1",
        f"Host: {request.endpoint.host}",
        f"Authorization: Bearer {request.endpoint.token}",
        f"Content-Length: {len(text) + request.row_bytes}",
        f"Inference-Header-Content-Length: {len(text)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + text + bytes([request.mark]) * request.row_bytes


def _send_grpc(request: ClientRequest) -> Got:
    import grpc
    from tritonclient.grpc import service_pb2

    metadata = (("authorization", f"Bearer {request.endpoint.token}"),)
    with open_channel(request.endpoint) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        begun = call.future(grpc_message(request), timeout=_TIMEOUT_S, metadata=metadata)
        if request.manner == "closes":
            return Got()  # with the channel
        if request.manner == "cancels":
            time.sleep(_PAUSE_S)
            begun.cancel()
        try:
            answer = service_pb2.ModelInferResponse.FromString(begun.result())
        except grpc.RpcError:
            return Got(refused=1)
        except grpc.FutureCancelledError:
            return Got()
    (tensor,) = answer.raw_output_contents
    return Got(1, _foreign(tensor, request) + abs(len(tensor) - request.row_bytes))


def grpc_message(request: ClientRequest) -> bytes:
    """Return a ModelInferRequest with a raw tensor at its end."""
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferRequest(model_name=request.model)
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, request.row_bytes // 4])
    message.raw_input_contents.append(bytes([request.mark]) * request.row_bytes)
    data: bytes = message.SerializeToString()
    return data


def open_channel(where: Endpoint) -> Any:
    """Return a channel with a connection of its own."""
    import grpc

    address = f"{where.host}:{where.port}"
    if where.scheme == "grpc":
        return grpc.insecure_channel(address, _OPTIONS)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(where.authority.encode()), _OPTIONS)


def _foreign(tensor: bytes, request: ClientRequest) -> int:
    return int((np.frombuffer(tensor, np.uint8) != request.mark).sum())
