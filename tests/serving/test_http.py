"""The protocol over HTTP, as clients and as bytes on a socket."""

import json
import socket
import time
from contextlib import closing
from http.client import HTTPConnection

import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuprof.load.load import LoadSettings, RequestStream, run_load
from gpuprof.load.target import Target
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, read_answer

pytestmark = serves_in_real_time

TENSOR = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.5]}
BODY = json.dumps({"inputs": [TENSOR]}).encode()


def post(body: bytes, *lines: str, path: str = "/v2/models/small/infer") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", *lines]
    if not any(line.lower().startswith(("content-length", "transfer")) for line in lines):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


def test_the_client_of_triton_finds_everything_it_asks_for(null_server: RunningServer) -> None:
    client = triton.InferenceServerClient(null_server.address)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("small", "1")
    assert not client.is_model_ready("nobody")
    assert client.get_server_metadata()["name"] == "gpuprof"
    metadata = client.get_model_metadata("small")
    assert metadata["inputs"] == [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 1]}]
    config = client.get_model_config("small")
    assert (config["max_batch_size"], config["input"][0]["dims"]) == (4, [1])
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 1000
    index = client.get_model_repository_index()
    assert {(entry["name"], entry["version"], entry["state"]) for entry in index} == {
        ("small", "1", "READY"),
        ("large", "1", "READY"),
    }
    client.close()


@pytest.mark.parametrize(
    ("algorithm", "binary", "model", "size"),
    [("gzip", True, "large", 150_000), ("deflate", False, "large", 150_000), ("gzip", False, "small", 1)],
)
def test_the_client_of_triton_may_compress_its_requests(
    null_server: RunningServer, algorithm: str, binary: bool, model: str, size: int
) -> None:
    client = triton.InferenceServerClient(null_server.address)
    array = np.random.default_rng(0).standard_normal((1, size), np.float32)
    tensor = triton.InferInput("INPUT0", [1, size], "FP32")
    tensor.set_data_from_numpy(array, binary_data=binary)
    result = client.infer(model, [tensor], request_compression_algorithm=algorithm)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
    client.close()


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize(("model", "size"), [("small", 1), ("large", 150_000)])
def test_tensors_come_back_as_they_went(
    null_server: RunningServer, binary_in: bool, binary_out: bool, model: str, size: int
) -> None:
    client = triton.InferenceServerClient(null_server.address)
    sent = np.random.default_rng(1).standard_normal((1, size)).astype(np.float32)
    tensor = triton.InferInput("INPUT0", [1, size], "FP32")
    tensor.set_data_from_numpy(sent, binary_data=binary_in)
    output = triton.InferRequestedOutput("OUTPUT0", binary_data=binary_out)
    result = client.infer(model, [tensor], outputs=[output], request_id="a7")
    assert np.array_equal(result.as_numpy("OUTPUT0"), sent)
    assert result.get_response()["id"] == "a7"
    client.close()
    assert eventually(lambda: b"gpuprof_buffer_bytes 0.0" in null_server.get("/metrics")[1])


def test_statistics_count_what_was_done(null_server: RunningServer) -> None:
    before = null_server.get("/v2/models/small/stats")[1]["model_stats"][0]
    null_server.infer("small", [1.0])
    null_server.infer("small", [1.0, 2.0])  # refused: it has the wrong shape
    after = null_server.get("/v2/models/small/versions/1/stats")[1]["model_stats"][0]
    assert after["inference_stats"]["success"]["count"] == before["inference_stats"]["success"]["count"] + 1
    assert after["inference_stats"]["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]
    assert len(null_server.get("/v2/models/stats")[1]["model_stats"]) == 2


def test_an_answer_says_where_its_time_went_and_load_keeps_it_apart(null_server: RunningServer) -> None:
    target = Target.parse(null_server.url)
    for model, size, binary in (("small", 1, True), ("large", 150_000, True), ("large", 150_000, False)):
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, size], "data": [0.5] * size}
        body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": binary}})
        with closing(HTTPConnection(target.host, target.port, timeout=60)) as connection:
            began = time.monotonic()
            connection.request("POST", f"/v2/models/{model}/infer", body)
            answer = connection.getresponse()
            took_ms = 1000.0 * (time.monotonic() - began)
            assert answer.status == 200
            timings = dict(entry.strip().split(";dur=") for entry in answer.headers["Server-Timing"].split(","))
        assert list(timings) == ["queue", "infer", "total"]
        assert 0.0 < float(timings["queue"]) + float(timings["infer"]) < float(timings["total"]) < took_ms
    load = LoadSettings(duration_s=0.5, warmup_s=0.0, clients=1)
    outcome = run_load(target, [RequestStream("small", 100.0, 10_000.0)], load)
    (result,), (stages,) = outcome.results, outcome.stages
    assert result.server_mean_ms is not None and result.mean_ms is not None
    assert 0.0 < result.server_mean_ms < result.mean_ms
    assert stages["network_ms"] == pytest.approx(result.mean_ms - result.server_mean_ms)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models/nobody", 404),
        ("GET", "/v2/models/small/versions/9", 404),
        ("GET", "/v2/models/small/versions/1/ready", 200),
        ("POST", "/v2/models/nobody/infer", 404),
        ("GET", "/v2/models/small/infer", 405),
        ("DELETE", "/v2", 405),
        ("HEAD", "/v2", 200),
        ("GET", "/v2/models/" + "x" * 5000, 404),
        ("GET", "/v2/models/%73mall/ready?a=b", 200),
    ],
)
def test_every_address_answers_with_its_status(null_server: RunningServer, method: str, path: str, status: int) -> None:
    assert null_server.get(path, method)[0] == status


def test_an_unknown_model_is_named_with_the_nearest(null_server: RunningServer) -> None:
    assert "did you mean 'small'" in null_server.get("/v2/models/smal")[1]["error"]


def test_a_body_may_be_chunked(null_server: RunningServer) -> None:
    half = len(BODY) // 2
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:half], BODY[half:], b""))
    with null_server.connect() as connection:
        connection.sendall(post(chunks, "Transfer-Encoding: chunked"))
        assert read_answer(connection)[0] == 200


def test_a_client_that_asks_first_is_told_to_go_on(null_server: RunningServer) -> None:
    with null_server.connect() as connection:
        connection.sendall(post(b"", "Expect: 100-continue", f"Content-Length: {len(BODY)}"))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(BODY)
        assert read_answer(connection)[0] == 200


def test_a_client_may_close_its_side_after_asking(null_server: RunningServer) -> None:
    with null_server.connect() as connection:
        connection.sendall(post(BODY))
        connection.shutdown(socket.SHUT_WR)
        assert read_answer(connection)[0] == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /v2 HTTP/9.9\r\n\r\n", 400),
        (post(b"", "Content-Length: -5"), 400),
        (post(b"", "Content-Length: 5", "Content-Length: 6"), 400),
        (post(b"", "Content-Length: 99999999999999999999"), 400),
        (post(BODY, "Transfer-Encoding: chunked", "Content-Length: 4"), 400),
        (post(b"nonsense\r\n", "Transfer-Encoding: chunked"), 400),
        (post(b"", "Transfer-Encoding: gzip, chunked"), 400),
        (b"GET /v2 HTTP/1.1\r\n" + b"a: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (post(b"", "Content-Length: 2147483648"), 413),
        (post(BODY, "Content-Encoding: br"), 415),
        (post(BODY, "Inference-Header-Content-Length: 9999"), 400),
        (post(BODY, "Inference-Header-Content-Length: x"), 400),
        (post(b"{", "Inference-Header-Content-Length: 0"), 400),
    ],
)
def test_what_is_no_request_gets_an_error_alone(null_server: RunningServer, request_: bytes, status: int) -> None:
    with null_server.connect() as connection:
        connection.sendall(request_)
        answer = connection.recv(20)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert null_server.infer("small", [1.0])[0] == 200


def test_half_a_request_harms_nobody_and_leaves_nothing(null_server: RunningServer) -> None:
    half = post(b"x" * 300_000, "Content-Length: 600000", path="/v2/models/large/infer")
    connections = [null_server.connect() for _ in range(20)]
    for connection in connections:
        connection.sendall(half)
    assert null_server.infer("small", [1.0])[0] == 200
    for connection in connections:
        connection.close()
    assert eventually(lambda: b"\ngpuprof_buffer_bytes 0.0" in null_server.get("/metrics")[1])


def test_a_client_that_does_not_read_its_answers_delays_only_itself(null_server: RunningServer) -> None:
    values = [0.0] * 150_000
    body = json.dumps({"inputs": [{**TENSOR, "shape": [1, 150_000], "data": values}]}).encode()
    with null_server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(post(body, path="/v2/models/large/infer"))
        time.sleep(0.2)
        assert null_server.infer("small", [1.0])[0] == 200


HEADS = st.sampled_from(
    ["Content-Length: 7", "Connection: close", "Transfer-Encoding: chunked", "Expect: 100-continue", "Upgrade: h2c"]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["GET", "POST", "PUT", "OPTIONS", "CONNECT"]),
    st.sampled_from(
        ["/v2", "/v2/models/small/infer", "/v2/models/large/infer", "/metrics", "/v2/repository/index", "*"]
    ),
    st.lists(HEADS, max_size=3),
    st.binary(max_size=200),
)
def test_whatever_is_sent_the_answer_is_no_server_error(
    null_server: RunningServer, method: str, path: str, heads: list[str], body: bytes
) -> None:
    with null_server.connect() as connection:
        connection.sendall("\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *heads, "", ""]).encode() + body)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    assert not answer or answer.startswith((b"HTTP/1.1 1", b"HTTP/1.1 2", b"HTTP/1.1 4")), answer


def test_a_batch_in_one_request_is_answered_row_by_row(null_server: RunningServer) -> None:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [3, 1], "data": [1.0, 2.0, 3.0]}
    status, answer = null_server.get("/v2/models/small/infer", "POST", json.dumps({"inputs": [tensor]}).encode())
    assert (status, answer["outputs"][0]["shape"], answer["outputs"][0]["data"]) == (200, [3, 1], [1.0, 2.0, 3.0])
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [5, 1], "data": [0.0] * 5}
    status, answer = null_server.get("/v2/models/small/infer", "POST", json.dumps({"inputs": [tensor]}).encode())
    assert status == 400 and "batches of 1 to 4" in answer["error"]


def test_a_name_of_another_server_is_not_answered(null_server: RunningServer) -> None:
    assert null_server.get("/v2", Host="evil.example.org")[0] == 421
    assert null_server.get("/v2", Host="localhost:1")[0] == 200


def test_router_and_idle_workers_are_small(null_server: RunningServer) -> None:
    import psutil

    router = psutil.Process(null_server.process.pid)
    assert router.memory_info().rss < 150e6
    assert all(worker.memory_info().rss < 150e6 for worker in null_server.workers())


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v2", "GET, HEAD"),
        ("/v2/models/small/infer", "POST"),
        ("/v2/repository/index", "POST"),
        ("/metrics", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_which_are_allowed(null_server: RunningServer, path: str, allowed: str) -> None:
    connection = null_server.client()
    connection.request("DELETE", path)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert (answer.status, answer.getheader("Allow")) == (405, allowed)
