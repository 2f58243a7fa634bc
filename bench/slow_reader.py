"""A client that asks for large answers and does not read them for a while: `bench.reliability` and the tests use it.

It speaks HTTP/1.1, and gRPC by frames of its own, because no ordinary client leaves its socket unread: it lets the
server send as much as it will, and takes nothing. The model must give back what it is given.
"""

from __future__ import annotations

import json
import socket
import struct
from http.client import HTTPResponse
from typing import Any

import numpy as np

#: What every byte of the tensors of this client is.
MARK = 0x5A
_RECEIVE_BUFFER = 1 << 16
_WIDEST = (1 << 31) - 1
_TIMEOUT_S = 120.0


def foreign_bytes(tensors: list[bytes]) -> int:
    """Return how many bytes of the tensors are not this client's."""
    return sum(int((np.frombuffer(tensor, np.uint8) != MARK).sum()) for tensor in tensors)


class SlowHttpReader:
    """Asks on connections of HTTP/1.1, one request each.

    Parameters
    ----------
    host, port, model : str, int, str
    row_bytes : int
        Of a request's tensor.
    requests : int
    """

    def __init__(self, host: str, port: int, model: str, row_bytes: int, requests: int) -> None:
        tensor = bytes([MARK]) * row_bytes
        entry: dict[str, Any] = {"name": "INPUT0", "datatype": "FP32", "shape": [1, row_bytes // 4]}
        entry["parameters"] = {"binary_data_size": row_bytes}
        text = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(text) + row_bytes}\r\n"
        head += f"Inference-Header-Content-Length: {len(text)}\r\n\r\n"
        self._sockets = [_connect(host, port) for _ in range(requests)]
        for one in self._sockets:
            one.sendall(head.encode() + text + tensor)

    def read_answers(self) -> list[bytes]:
        """Return the tensors of the answers; what was refused is missing."""
        tensors = []
        for one in self._sockets:
            answer = HTTPResponse(one)
            answer.begin()
            body = answer.read()
            if answer.status == 200:
                tensors.append(body[int(answer.headers["Inference-Header-Content-Length"]) :])
        return tensors

    def half_close(self) -> None:
        """Send no more."""
        for one in self._sockets:
            one.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the sockets."""
        for one in self._sockets:
            one.close()


class SlowGrpcReader:
    """Asks on one connection of HTTP/2, whose windows are as wide as they can be.

    Parameters
    ----------
    host, port, model : str, int, str
    row_bytes : int
        Of a request's tensor.
    requests : int
    """

    def __init__(self, host: str, port: int, model: str, row_bytes: int, requests: int) -> None:
        import h2.config
        import h2.connection
        import h2.settings

        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self._http2 = h2.connection.H2Connection(config)
        self._http2.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                h2.settings.SettingCodes.ENABLE_PUSH: 0,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: _WIDEST,
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 100,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: 1 << 16,
            },
        )
        self._socket = _connect(host, port)
        self._http2.initiate_connection()
        self._http2.increment_flow_control_window(_WIDEST - 65535)
        self._is_open = True
        self._row_bytes = row_bytes
        self._answers: dict[int, bytearray] = {}
        self._ended: set[int] = set()
        message = _grpc_message(model, row_bytes)
        headers = [
            (":method", "POST"),
            (":path", "/inference.GRPCInferenceService/ModelInfer"),
            (":scheme", "http"),
            (":authority", host),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
        for _ in range(requests):
            self._ask(headers, message)

    def read_answers(self) -> list[bytes]:
        """Return the tensors of the answers, as far as they came; what was refused is missing."""
        while len(self._ended) < len(self._answers):
            if not self._receive():
                break
        return [_tensor(answer, self._row_bytes) for answer in self._answers.values() if answer]

    def half_close(self) -> None:
        """Send no more."""
        self._is_open = False
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _ask(self, headers: list[tuple[str, str]], message: bytes) -> None:
        """Send a request; only what the windows need is read meanwhile."""
        stream = self._http2.get_next_available_stream_id()
        self._answers[stream] = bytearray()
        self._http2.send_headers(stream, headers)
        position = 0
        while position < len(message):
            window = min(self._http2.local_flow_control_window(stream), self._http2.max_outbound_frame_size)
            if not window:
                self._socket.sendall(self._http2.data_to_send())
                self._receive()
                continue
            piece = message[position : position + window]
            position += len(piece)
            self._http2.send_data(stream, piece, end_stream=position == len(message))
        self._socket.sendall(self._http2.data_to_send())

    def _receive(self) -> bool:
        """Take some of what the server sends; return whether it has not gone."""
        import h2.events

        data = self._socket.recv(1 << 16)
        for event in self._http2.receive_data(data) if data else ():
            if isinstance(event, h2.events.DataReceived):
                self._answers[event.stream_id] += event.data
            elif isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset)):
                self._ended.add(event.stream_id)
        if self._is_open:
            self._socket.sendall(self._http2.data_to_send())
        return bool(data)


def _connect(host: str, port: int) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)  # what it takes without being read
    connection.settimeout(_TIMEOUT_S)
    connection.connect((host, port))
    return connection


def _grpc_message(model: str, row_bytes: int) -> bytes:
    request = _message("ModelInferRequest")(model_name=model)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, row_bytes // 4])
    request.raw_input_contents.append(bytes([MARK]) * row_bytes)
    data: bytes = request.SerializeToString()
    return struct.pack(">BI", 0, len(data)) + data


def _tensor(answer: bytearray, row_bytes: int) -> bytes:
    """Return what has come of the tensor, which stands at the end of the message."""
    return bytes(answer[5 + int.from_bytes(answer[1:5], "big") - row_bytes :])


def _message(name: str) -> Any:
    from tritonclient.grpc import service_pb2

    return getattr(service_pb2, name)
