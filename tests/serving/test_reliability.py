"""What must hold when workers die or hang, when there is too much to do, and when the server is told to stop."""

import http.client
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gpuprof.errors import UnavailableError
from gpuprof.machine.cgroup import own_cores, quota_parent
from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, has_ended, map_of, read_answer, replica, running

pytestmark = serves_in_real_time


class Askers:
    """Threads that ask for one answer after another, each with a value of its own that comes back, or ``answer``."""

    def __init__(self, server: RunningServer, model: str, count: int, answer: list[float] | None = None) -> None:
        self._answer = answer
        self.statuses: list[int] = []
        self.wrong: list[Any] = []
        self.lost: list[str] = []
        self._server = server
        self._model = model
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(1000 * number,)) for number in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, value: int) -> None:
        connection = self._server.client()
        while not self._stop.is_set():
            value += 1
            tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [float(value)]}
            try:
                connection.request("POST", f"/v2/models/{self._model}/infer", json.dumps({"inputs": [tensor]}))
                answer = connection.getresponse()
                text = answer.read()
            except ConnectionRefusedError:
                break  # the server no longer takes connections
            except (OSError, http.client.HTTPException) as error:
                self.lost.append(repr(error))
                break
            self.statuses.append(answer.status)
            if answer.status == 200 and json.loads(text)["outputs"][0]["data"] != (self._answer or [float(value)]):
                self.wrong.append((value, text))
        connection.close()


def figure(server: RunningServer, name: str) -> float:
    text = server.get("/metrics")[1].decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


def has_restarted(server: RunningServer, times: int) -> bool:
    return figure(server, "gpuprof_worker_restarts_total") == times


@pytest.fixture
def two_replicas() -> dict[str, Any]:
    return map_of({"m": "null:4"}, [replica("m"), replica("m")])


@pytest.mark.slow
def test_killed_workers_lose_no_accepted_request_beside_another(tmp_path: Path, two_replicas: dict[str, Any]) -> None:
    with running(tmp_path, two_replicas) as server:
        with Askers(server, "m", 6) as askers:
            for kills in range(4):
                assert eventually(lambda: figure(server, "gpuprof_workers_ready") == 2)
                server.workers()[0].kill()
                assert eventually(partial(has_restarted, server, kills + 1))
            assert eventually(lambda: figure(server, "gpuprof_workers_ready") == 2)
        assert askers.wrong == askers.lost == []
        assert len(askers.statuses) > 100
        assert set(askers.statuses) == {200}


def test_without_another_replica_the_accepted_wait_for_the_restart(tmp_path: Path) -> None:
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m")])) as server:
        with Askers(server, "m", 4) as askers:
            time.sleep(0.3)
            (killed,) = server.workers()
            killed.kill()
            assert eventually(lambda: [worker.pid for worker in server.workers()] not in ([], [killed.pid]))
            assert eventually(lambda: server.get("/v2/health/ready")[0] == 200)
            time.sleep(0.3)
        assert askers.wrong == askers.lost == []
        assert set(askers.statuses) <= {200, 503}
        assert askers.statuses[-1] == 200
        assert server.infer("m", [1.0])[0] == 200


def test_a_worker_that_hangs_is_replaced_and_its_request_answered(tmp_path: Path, two_replicas: dict[str, Any]) -> None:
    with running(tmp_path, two_replicas, "--hang-s", "0.6") as server:
        for worker in (first := server.workers()):
            worker.suspend()
        assert server.infer("m", [3.0])[1]["outputs"][0]["data"] == [3.0]
        assert eventually(lambda: all(has_ended(worker) for worker in first))
        assert eventually(lambda: len(server.workers()) == 2)


def test_a_server_that_stops_answers_what_it_accepted(tmp_path: Path, two_replicas: dict[str, Any]) -> None:
    with running(tmp_path, two_replicas) as server:
        workers = server.workers()
        with Askers(server, "m", 6) as askers:
            time.sleep(0.3)
            code, errors = server.stop(signal.SIGINT)
        assert (code, errors) == (0, "drained\n")
        assert askers.wrong == askers.lost == []
        assert set(askers.statuses) == {200}
        assert eventually(lambda: all(has_ended(worker) for worker in workers))


def test_workers_end_when_the_router_is_killed(tmp_path: Path, two_replicas: dict[str, Any]) -> None:
    with running(tmp_path, two_replicas) as server:
        workers = server.workers()
        server.process.kill()
        assert eventually(lambda: all(has_ended(worker) for worker in workers))


def test_fractions_of_a_core_are_held_by_groups_that_do_not_stay_behind(tmp_path: Path) -> None:
    try:
        parent, version = quota_parent()
    except UnavailableError as reason:
        pytest.skip(str(reason))
    own_share = 25.0 / len(own_cores())
    with running(tmp_path, map_of({"m": "null:4"}, [replica("m", sm_share_pct=own_share)])) as server:
        (group,) = parent.glob(f"gpuprof-serve-{server.process.pid}-*")
        assert str(server.workers()[0].pid) in (group / "cgroup.procs").read_text().split()
        limit = (group / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")).read_text().split()[0]
        assert int(limit) > 0
        server.workers()[0].kill()
        server.stop()
    assert not group.exists()


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
