"""The protocol over gRPC, by the client of Triton."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.serving.running import RunningServer, map_of, replica, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    document = map_of({"small": "null:4", "large": "null:600k"}, [replica("small", batch=4), replica("large")])
    with running(tmp_path_factory.mktemp("grpc"), document, "--grpc-port", "0") as running_server:
        yield running_server


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    address = next(word for word in server.line.split() if word.startswith("grpc://")).removeprefix("grpc://")
    with triton.InferenceServerClient(address) as open_client:
        yield open_client


def tensor(values: np.ndarray[Any, Any]) -> triton.InferInput:
    own = triton.InferInput("INPUT0", list(values.shape), "FP32")
    own.set_data_from_numpy(values)
    return own


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


def test_statistics_count_what_was_done(client: triton.InferenceServerClient) -> None:
    before = client.get_inference_statistics("small").model_stats[0].inference_stats
    client.infer("small", [tensor(np.zeros((3, 1), np.float32))])
    after = client.get_inference_statistics("small", "1").model_stats[0].inference_stats
    assert after.success.count == before.success.count + 1
    assert after.compute_infer.ns > before.compute_infer.ns
    assert len(client.get_inference_statistics().model_stats) == 2


def test_a_stream_answers_each_request_and_errors_do_not_end_it(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for number in range(5):
        shape = (1, 2) if number == 2 else (1, 1)
        client.async_stream_infer("small", [tensor(np.full(shape, number, np.float32))], request_id=str(number))
    got = [answers.get(timeout=20) for _ in range(5)]
    client.stop_stream()
    assert sum(error is not None for _, error in got) == 1
    assert {float(result.as_numpy("OUTPUT0")[0, 0]) for result, error in got if error is None} == {0.0, 1.0, 3.0, 4.0}


def test_many_at_once_each_get_their_own_answer(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    for number in range(200):
        client.async_infer(
            "small",
            [tensor(np.full((1, 1), number, np.float32))],
            callback=lambda result, error: answers.put((result, error)),
            request_id=str(number),
        )
    for _ in range(200):
        result, error = answers.get(timeout=20)
        assert error is None
        assert float(result.as_numpy("OUTPUT0")[0, 0]) == float(result.get_response().id)
