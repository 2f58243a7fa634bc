"""No client ever sees a byte of another: the memory of an answer is given back when the transport has let go of it."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.slow_reader import SlowGrpcReader, SlowHttpReader, foreign_bytes
from bench.strange_clients import MANNERS, ClientRequest, Endpoint, send_all
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, map_of, replica, running

pytestmark = serves_in_real_time

ROW_BYTES = 600_000
REQUESTS = 40
TOKEN = "a-token-of-the-tests-0123456789"
#: Name, path and bytes of a row: in the message, in the arena, and more than a socket's buffer takes.
MODELS = (("little", "null:4k", 4000), ("large", "null:600k", 600_000), ("huge", "null:8m", 8_000_000))


def addresses(server: RunningServer) -> dict[str, tuple[str, int]]:
    """Return host and port by scheme."""
    words = [word.split("://") for word in server.line.split() if "://" in word]
    return {scheme: (where.rsplit(":", 1)[0], int(where.rsplit(":", 1)[1])) for scheme, where in words}


def count_answered(server: RunningServer, model: str) -> int:
    """Return how many requests have been answered by the model's workers."""
    return int(server.get(f"/v2/models/{model}/stats")[1]["model_stats"][0]["inference_count"])


def count_buffered(server: RunningServer) -> float:
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
    size = ROW_BYTES if scheme == "grpc" else 10 * ROW_BYTES  # on one connection, or on one each
    requests = REQUESTS if scheme == "grpc" else REQUESTS // 4
    document = map_of({"large": f"null:{size}"}, [replica("large")], slo_ms=60_000.0)
    with running(tmp_path, document, "--grpc-port", "0") as server:
        host, port = addresses(server)[scheme]
        reader = (SlowHttpReader if scheme == "http" else SlowGrpcReader)(host, port, "large", size, requests)
        assert eventually(lambda: count_answered(server, "large") >= requests // 4)
        if half_closes:  # some answers are on their way, as far as the socket takes them, others not yet there
            reader.half_close()
        for number in range(20):
            other = np.full(size, number, np.uint8).tobytes()
            assert infer_binary(server, "large", other) == other
        tensors = reader.read_answers()
        reader.close()
        assert foreign_bytes(tensors) == 0
        whole = sum(len(tensor) == size for tensor in tensors)
        assert whole == requests or (half_closes and scheme == "grpc")  # whose calls end with their connection
        assert eventually(lambda: count_buffered(server) == 0)


@dataclass(frozen=True)
class Servers:
    """A server by HTTP and gRPC, and one with TLS and a token."""

    plain: RunningServer
    secured: RunningServer
    endpoints: tuple[Endpoint, ...]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    directory = tmp_path_factory.mktemp("servers")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    files = [directory / name for name in ("chain.pem", "key.pem", "token")]
    certificate.cert_chain_pems[0].write_to_path(files[0])
    certificate.private_key_pem.write_to_path(files[1])
    files[2].write_text(TOKEN)
    for file in files[1:]:
        file.chmod(0o600)
    guards = ["--tls-cert", str(files[0]), "--tls-key", str(files[1]), "--token-file", str(files[2])]
    document = map_of(
        {name: path for name, path, _ in MODELS}, [replica(name, sm_share_pct=30.0) for name, _, _ in MODELS], 60_000.0
    )
    for name in ("plain", "secured"):
        (directory / name).mkdir()
    options = ("--grpc-port", "0", "--buffer-mb", "1024")
    with (
        running(directory / "plain", document, *options) as plain,
        running(directory / "secured", document, *options, *guards) as secured,
    ):
        secured.token, secured.context = TOKEN, ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
        pem = authority.cert_pem.bytes().decode()
        endpoints = [Endpoint(scheme, *where) for scheme, where in addresses(plain).items()]
        endpoints += [Endpoint(scheme, *where, pem, TOKEN) for scheme, where in addresses(secured).items()]
        yield Servers(plain, secured, tuple(endpoints))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_client_finds_a_byte_that_is_not_its_own_whatever_others_do(servers: Servers, data: st.DataObject) -> None:
    one = st.builds(
        ClientRequest,
        st.sampled_from(servers.endpoints),
        st.sampled_from(MANNERS),
        st.just(""),
        st.just(0),
        mark=st.integers(1, 200),
    )
    drawn = data.draw(st.lists(st.tuples(one, st.sampled_from(MODELS)), min_size=8, max_size=40))
    requests = [replace(request, model=name, row_bytes=size) for request, (name, _, size) in drawn]
    got = send_all(requests, at_once=16)
    assert (got.foreign, got.refused) == (0, 0)
    assert got.answers >= sum(request.manner in ("reads", "reads slowly") for request in requests)
    assert eventually(lambda: count_buffered(servers.plain) == count_buffered(servers.secured) == 0)
