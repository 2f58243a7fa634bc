"""Requests and refusals of gRPC, as messages."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import pytest

from gpuprof.serving.protocol.grpc_calls import find_code, read_timeout_ms, status_headers
from gpuprof.serving.protocol.grpc_messages import decode_infer, read_infer
from gpuprof.serving.protocol.open_inference import message_class
from gpuprof.serving.router.infer_request import InferRequest, RequestBody
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec

SPEC = ModelSpec("m", "1", "t", (TensorSpec("a", "UINT8", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),), 4)


def request_of(**fields: Any) -> Any:
    request = message_class("ModelInferRequest")(model_name="m", **fields)
    request.inputs.add(name="a", datatype="UINT8", shape=[1, 2])
    request.outputs.add(name="y")
    return request


def read(request: Any, spec: ModelSpec = SPEC) -> InferRequest:
    data = request.SerializeToString()
    return read_infer(spec, decode_infer(data), data)


@pytest.mark.parametrize("place", ["inputs", "outputs"])
@pytest.mark.parametrize("name", ["classification", "shared_memory_region"])
def test_parameters_that_would_change_the_answer_are_refused(place: str, name: str) -> None:
    request = request_of(raw_input_contents=[b"ab"])
    assert read(request).outputs == [0]
    getattr(request, place)[0].parameters[name].int64_param = 3
    with pytest.raises(RefusedError, match=f"the parameter '{name}' is not supported"):
        read(request)


def test_typed_and_raw_contents_for_one_tensor_are_refused() -> None:
    request = request_of(raw_input_contents=[b"ab"])
    request.inputs[0].contents.uint_contents.extend([1, 2])
    with pytest.raises(RefusedError, match="input 'a' has both typed and raw contents") as refused:
        read(request)
    assert refused.value.status == 400


def test_raw_tensors_of_a_large_message_stay_where_they_are_in_the_arena() -> None:
    spec = ModelSpec("m", "1", "t", (TensorSpec("a", "UINT8", (-1, 50_000)),), (TensorSpec("y", "FP32", (-1, 2)),), 4)
    request = message_class("ModelInferRequest")(model_name="m", raw_input_contents=[bytes(50_000)])
    request.inputs.add(name="a", datatype="UINT8", shape=[1, 50_000])
    data = request.SerializeToString()
    (tensor,) = read(request, spec).find_tensors(RequestBody(data, offset=4096))
    assert tensor.data == (4096 + len(data) - 50_000, 50_000)


@pytest.mark.parametrize(
    ("text", "ms"), [(b"1S", 1000.0), (b"250m", 250.0), (b"5u", 0.005), (b"99999999H", 99999999 * 3.6e6), (b"", None),
                     (b"1", None), (b"-1S", None), (b"123456789S", None)],
)  # fmt: skip
def test_a_deadline_is_read_as_grpc_writes_it(text: bytes, ms: float | None) -> None:
    assert read_timeout_ms(text) == (None if ms is None else pytest.approx(ms))


def test_a_refusal_has_the_status_that_grpc_has_for_it() -> None:
    assert find_code(RefusedError(HTTPStatus.NOT_FOUND, "")) == 5
    assert find_code(RefusedError(HTTPStatus.UNAUTHORIZED, "")) == 16
    assert find_code(RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "")) == 14
    assert find_code(RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "", overloaded=True)) == 8
    lines = status_headers(RefusedError(HTTPStatus.BAD_REQUEST, "50 % of\r\nü", 0.5))
    assert lines == b"x-grpc-status: 3\r\nx-grpc-message: 50 %25 of%0D%0A%C3%BC\r\nx-grpc-pushback-ms: 501\r\n"
