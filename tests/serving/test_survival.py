"""What a server must survive: workers that die under load, full disks, floods; and whom it turns away when."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, map_of, read_answer, replica, running
from tests.serving.test_reliability import figure

pytestmark = serves_in_real_time


def test_two_gigabytes_of_json_do_not_fill_the_memory(tmp_path: Path) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")])) as server:  # with the limits that it has by itself
        router = psutil.Process(server.process.pid)
        before, peak = router.memory_info().rss, 0
        chunk = b"%x\r\n%s\r\n" % (1 << 20, b"[" * (1 << 20))
        head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        with server.connect() as connection:
            connection.sendall(head)
            try:
                for _ in range(2048):
                    connection.sendall(chunk)
                    peak = max(peak, router.memory_info().rss)
            except OSError:
                pass  # it was closed, as it must be
        assert peak - before < 300e6
        assert server.infer("m", [1.0])[0] == 200


def ask(server: RunningServer, timeout_us: int | None = None) -> tuple[int, dict[str, str], Any]:
    import http.client

    request: dict[str, Any] = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
    if timeout_us is not None:
        request["parameters"] = {"timeout": timeout_us}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v2/models/m/infer", json.dumps(request))
    answer = connection.getresponse()
    text = json.loads(answer.read())
    connection.close()
    return answer.status, dict(answer.getheaders()), text


@pytest.mark.slow
def test_only_what_can_no_longer_meet_its_slo_is_refused_and_told_when_to_come_again(tmp_path: Path) -> None:
    # One at a time, 1 s each: of those that come at once, the SLO of 4.5 s leaves time for four.
    document = map_of({"m": "null:4"}, [replica("m", latency_ms=1000.0)], slo_ms=4500.0)
    with running(tmp_path, document, "--simulate") as server, ThreadPoolExecutor(16) as pool:
        answers = [future.result() for future in [pool.submit(ask, server) for _ in range(9)]]
        accepted = [answer for answer in answers if answer[0] == 200]
        refused = [answer for answer in answers if answer[0] == 503]
        assert len(accepted) + len(refused) == 9
        assert 3 <= len(accepted) <= 5  # a machine that is busy may take them in later than they were sent
        for _, headers, text in refused:
            assert int(headers["Retry-After"]) >= 1
            assert "overloaded" in text["error"]
        figures = server.get("/v2/models/m/stats")[1]["model_stats"][0]["inference_stats"]
        assert figures["fail"]["count"] == len(refused)
        assert server.get("/v2/health/ready")[1]["refused"] == {"overload": len(refused)}
        # Whoever has more time is let in, and whoever has less is not.
        busy = [pool.submit(ask, server) for _ in range(4)]
        assert eventually(lambda: figure(server, "gpuprof_queue_requests") >= 2)
        assert ask(server, timeout_us=30_000_000)[0] == 200
        assert [future.result()[0] for future in busy].count(200) >= 3


def test_a_large_request_is_refused_by_its_json_before_its_tensor_has_come(tmp_path: Path) -> None:
    # One at a time, 1 s each: one runs, one is at hand, one waits, and of the fourth it is known that it is late.
    document = map_of({"m": "null:600k"}, [replica("m", latency_ms=1000.0)], slo_ms=3500.0)
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 150_000]}
    text = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": 600_000}}]}).encode()
    head = (
        "POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(text) + 600_000}\r\n\r\n"
    ).encode()
    with running(tmp_path, document, "--simulate") as server, ThreadPoolExecutor(4) as pool:
        body = text + bytes(600_000)
        headers = {"Inference_Header_Content_Length": str(len(text))}
        busy = [pool.submit(server.get, "/v2/models/m/infer", "POST", body, **headers) for _ in range(4)]
        assert eventually(lambda: figure(server, "gpuprof_queue_requests") >= 1)
        assert eventually(lambda: _count_refused(server) >= 1)
        before = _count_refused(server)
        with server.connect() as connection:
            connection.sendall(head + text + bytes(1000))
            assert eventually(lambda: _count_refused(server) == before + 1)
            connection.sendall(bytes(599_000))
            status, answer = read_answer(connection)
            assert status == 503 and b"overloaded" in answer
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_answer(connection)[0] == 200
        assert {future.result()[0] for future in busy} == {200, 503}
        assert _count_refused(server) == before + 1


def _count_refused(server: RunningServer) -> int:
    statistics = server.get("/v2/models/m/stats")[1]["model_stats"][0]["inference_stats"]
    return int(statistics["fail"]["count"])


def test_over_grpc_overload_is_resource_exhausted_with_a_pushback(tmp_path: Path) -> None:
    size = 600_000
    document = map_of({"m": f"null:{size}"}, [replica("m", latency_ms=1000.0)], slo_ms=2500.0)
    with running(tmp_path, document, "--simulate", "--grpc-port", "0") as server:
        address = next(word for word in server.line.split() if word.startswith("grpc://")).removeprefix("grpc://")
        tensor = service_pb2.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, size // 4])
        request = service_pb2.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[bytes(size)])
        with grpc.insecure_channel(address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            calls = [stub.ModelInfer.future(request, timeout=30) for _ in range(8)]
            refusals = [call for call in calls if call.exception() is not None]
            assert 1 <= len(calls) - len(refusals) <= 3
            assert {call.code() for call in refusals} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            for call in refusals:
                assert int(dict(call.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
