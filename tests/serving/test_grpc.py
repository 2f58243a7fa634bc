"""The protocol over gRPC, by the client of Triton."""

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.reruns import serves_in_real_time
from tests.serving.running import RunningServer, eventually, map_of, replica, running

pytestmark = serves_in_real_time


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    document = map_of({"small": "null:4", "large": "null:600k"}, [replica("small", batch=4), replica("large")])
    with running(tmp_path_factory.mktemp("grpc"), document, "--grpc-port", "0") as running_server:
        yield running_server


def address_of(server: RunningServer) -> str:
    return next(word for word in server.line.split() if word.startswith("grpc://")).removeprefix("grpc://")


def count_buffered(server: RunningServer) -> float:
    """Return the bytes of tensors that the server holds."""
    lines = server.get("/metrics")[1].decode().splitlines()
    return float(next(line for line in lines if line.startswith("gpuprof_buffer_bytes ")).split()[1])


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    address = address_of(server)
    with triton.InferenceServerClient(address) as open_client:
        yield open_client


def tensor(values: np.ndarray[Any, Any]) -> triton.InferInput:
    inputs = triton.InferInput("INPUT0", list(values.shape), "FP32")
    inputs.set_data_from_numpy(values)
    return inputs


def test_the_client_finds_everything_it_asks_for(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("small") and not client.is_model_ready("nobody")
    assert client.get_server_metadata().name == "gpuprof"
    assert list(client.get_model_metadata("small").inputs[0].shape) == [-1, 1]
    config = client.get_model_config("small").config
    assert (config.max_batch_size, list(config.input[0].dims), config.input[0].data_type) == (4, [1], 11)
    assert {entry.name for entry in client.get_model_repository_index().models} == {"small", "large"}


@pytest.mark.parametrize(("model", "size"), [("small", 1), ("large", 150_000)])
def test_tensors_come_back_as_they_went(client: triton.InferenceServerClient, model: str, size: int) -> None:
    sent = np.random.default_rng(1).standard_normal((1, size)).astype(np.float32)
    result = client.infer(model, [tensor(sent)], request_id="a7", outputs=[triton.InferRequestedOutput("OUTPUT0")])
    assert np.array_equal(result.as_numpy("OUTPUT0"), sent)
    assert result.get_response().id == "a7"


def test_typed_contents_serve_as_well_as_raw_ones(client: triton.InferenceServerClient) -> None:
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name="small")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[2, 1]).contents.fp32_contents.extend([1.5, 2.5])
    answer = client._client_stub.ModelInfer(request)
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("model", "shape", "code"),
    [("nobody", (1, 1), "NOT_FOUND"), ("small", (1, 2), "INVALID_ARGUMENT"), ("small", (5, 1), "INVALID_ARGUMENT")],
)
def test_what_is_wrong_has_its_status(
    client: triton.InferenceServerClient, model: str, shape: tuple[int, int], code: str
) -> None:
    with pytest.raises(InferenceServerException) as raised:
        client.infer(model, [tensor(np.zeros(shape, np.float32))])
    assert raised.value.status() == f"StatusCode.{code}"


def test_a_stream_answers_each_request_and_errors_do_not_end_it(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for number in range(5):
        shape = (1, 2) if number == 2 else (1, 1)
        client.async_stream_infer("small", [tensor(np.full(shape, number, np.float32))], request_id=str(number))
    results = [answers.get(timeout=20) for _ in range(5)]
    client.stop_stream()
    assert sum(error is not None for _, error in results) == 1
    assert {float(result.as_numpy("OUTPUT0")[0, 0]) for result, error in results if error is None} == {
        0.0,
        1.0,
        3.0,
        4.0,
    }


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_a_compressed_request_is_answered(client: triton.InferenceServerClient, algorithm: str) -> None:
    sent = np.arange(150_000, dtype=np.float32).reshape(1, -1)
    result = client.infer("large", [tensor(sent)], compression_algorithm=algorithm)
    assert np.array_equal(result.as_numpy("OUTPUT0"), sent)


def test_large_tensors_leave_no_memory_behind(server: RunningServer, client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    sent = {number: np.full((1, 150_000), number, np.float32) for number in range(40)}
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for number, values in sent.items():
        if number % 2:
            client.async_stream_infer("large", [tensor(values)], request_id=str(number))
        else:
            client.async_infer(
                "large", [tensor(values)], lambda result, error: answers.put((result, error)), request_id=str(number)
            )
    for _ in sent:
        result, error = answers.get(timeout=30)
        assert error is None
        assert np.array_equal(result.as_numpy("OUTPUT0"), sent[int(result.get_response().id)])
    client.stop_stream()
    assert count_buffered(server) == 0


def test_health_is_told_in_grpcs_own_way(server: RunningServer) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    serving = health_pb2.HealthCheckResponse.ServingStatus.Value("SERVING")
    with grpc.insecure_channel(address_of(server)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "inference.GRPCInferenceService"):
            assert health.Check(health_pb2.HealthCheckRequest(service=service), timeout=30).status == serving
        watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert next(watched).status == serving
        watched.cancel()


def test_the_server_describes_its_services_to_who_asks(server: RunningServer) -> None:
    import grpc
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(address_of(server)) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= set(database.get_services())
        service = DescriptorPool(database).FindServiceByName("inference.GRPCInferenceService")
        assert "ModelInfer" in service.methods_by_name


def test_a_stream_is_answered_before_the_end_of_the_server_ends_it(tmp_path: Path) -> None:
    document = map_of({"slow": "null:4"}, [replica("slow", latency_ms=1500.0)], slo_ms=60_000.0)
    answers: queue.Queue[Any] = queue.Queue()
    with (
        running(tmp_path, document, "--simulate", "--grpc-port", "0") as server,
        triton.InferenceServerClient(address_of(server)) as client,
    ):
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for number in range(3):
            client.async_stream_infer("slow", [tensor(np.full((1, 1), number, np.float32))])
        while server.get("/v2/models/slow/stats")[1]["model_stats"][0]["inference_count"] < 1:
            time.sleep(0.02)
        assert server.stop() == (0, "drained\n")
        assert [answers.get(timeout=30)[1] for _ in range(3)] == [None] * 3
        assert "the server is stopping" in str(answers.get(timeout=30)[1])


def test_a_deadline_of_the_client_counts_and_its_end_takes_the_request_back(tmp_path: Path) -> None:
    document = map_of({"slow": "null:4"}, [replica("slow", latency_ms=1500.0)], slo_ms=60_000.0)
    with (
        running(tmp_path, document, "--simulate", "--grpc-port", "0") as server,
        triton.InferenceServerClient(address_of(server)) as client,
    ):
        answers: queue.Queue[Any] = queue.Queue()
        client.async_infer(
            "slow", [tensor(np.zeros((1, 1), np.float32))], lambda result, error: answers.put((result, error))
        )
        for _ in range(3):  # behind the first, and refused or given up at the deadline: none of them runs
            with pytest.raises(InferenceServerException) as raised:
                client.infer("slow", [tensor(np.zeros((1, 1), np.float32))], client_timeout=0.3)
            assert raised.value.status() in ("StatusCode.DEADLINE_EXCEEDED", "StatusCode.RESOURCE_EXHAUSTED")
        assert answers.get(timeout=30)[1] is None
        client.infer("slow", [tensor(np.zeros((1, 1), np.float32))])
        assert (
            client.get_inference_statistics("slow").model_stats[0].inference_count <= 3
        )  # one at hand behind the first


def test_calls_that_are_cancelled_leave_no_memory_behind(server: RunningServer) -> None:
    import grpc
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name="large", raw_input_contents=[bytes(600_000)])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 150_000])
    with grpc.insecure_channel(address_of(server)) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        begun = [call.future(request.SerializeToString(), timeout=30) for _ in range(30)]
        for number, pending in enumerate(begun):
            if number % 3:
                pending.cancel()
        assert all(len(pending.result()) > 600_000 for pending in begun[::3])
    assert eventually(lambda: count_buffered(server) == 0)
