"""No client ever sees a byte of another: the memory of an answer is given back when the transport has let go of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.slow_reader import SlowGrpcReader, SlowHttpReader, foreign_bytes
from tests.serving.running import RunningServer, eventually, map_of, replica, running

ROW_BYTES = 600_000
REQUESTS = 40


def addresses(server: RunningServer) -> dict[str, tuple[str, int]]:
    """Return host and port by scheme."""
    words = [word.split("://") for word in server.line.split() if "://" in word]
    return {scheme: (where.rsplit(":", 1)[0], int(where.rsplit(":", 1)[1])) for scheme, where in words}


def answered(server: RunningServer, model: str) -> int:
    """Return how many requests have been answered by the model's workers."""
    return int(server.get(f"/v2/models/{model}/stats")[1]["model_stats"][0]["inference_count"])


def buffered(server: RunningServer) -> float:
    """Return the bytes that requests and answers hold."""
    lines = server.get("/metrics")[1].decode().splitlines()
    return float(next(line for line in lines if line.startswith("gpuprof_buffer_bytes ")).split()[1])


def infer_binary(server: RunningServer, model: str, values: bytes) -> bytes:
    entry: dict[str, Any] = {"name": "INPUT0", "datatype": "FP32", "shape": [1, len(values) // 4]}
    entry["parameters"] = {"binary_data_size": len(values)}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    connection = server.client()
    connection.request(
        "POST", f"/v2/models/{model}/infer", head + values, {"Inference-Header-Content-Length": str(len(head))}
    )
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == 200, body
    return body[int(answer.headers["Inference-Header-Content-Length"]) :]


@pytest.mark.parametrize("half_closes", [False, True])
@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_slow_reader_gets_its_own_tensors_whatever_others_do_meanwhile(
    tmp_path: Path, scheme: str, half_closes: bool
) -> None:
    document = map_of({"large": "null:600k"}, [replica("large")], slo_ms=60_000.0)
    with running(tmp_path, document, "--grpc-port", "0") as server:
        host, port = addresses(server)[scheme]
        reader = (SlowHttpReader if scheme == "http" else SlowGrpcReader)(host, port, "large", ROW_BYTES, REQUESTS)
        assert eventually(lambda: answered(server, "large") >= REQUESTS // 4)
        if half_closes:  # some answers are on their way, as far as the socket takes them, others not yet there
            reader.half_close()
        for number in range(20):
            other = np.full(ROW_BYTES, number, np.uint8).tobytes()
            assert infer_binary(server, "large", other) == other
        tensors = reader.read()
        reader.close()
        assert foreign_bytes(tensors) == 0
        whole = sum(len(tensor) == ROW_BYTES for tensor in tensors)
        assert whole == REQUESTS or (half_closes and scheme == "grpc")  # whose calls end with their connection
        assert eventually(lambda: buffered(server) == 0)
