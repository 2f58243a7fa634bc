"""A request whose text is known is read as if it were not."""

from __future__ import annotations

import struct

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.serving.router import known_requests
from gpuprof.serving.router.infer_request import InferRequest, RequestBody, read_request
from gpuprof.serving.router.known_requests import RequestReader
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec

NUMBERS = (TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "UINT8", (-1, 1)))
TEXTS = (TensorSpec("s", "BYTES", (-1, 1)),)
OUTPUTS = (TensorSpec("y", "FP32", (-1, 2)),)


def model(inputs: tuple[TensorSpec, ...]) -> ModelSpec:
    return ModelSpec("m", "1", "test", inputs, OUTPUTS, 4)


def entry(tensor: TensorSpec, rows: int, size: int) -> dict[str, object]:
    shape = [rows, *tensor.shape[1:]]
    return {
        "name": tensor.name, "datatype": tensor.datatype, "shape": shape, "parameters": {"binary_data_size": size},
    }  # fmt: skip


def plain(request: InferRequest) -> tuple[object, ...]:
    """Return all of a request, tensors as bytes or as places."""
    inputs = [
        (tensor.shape, tensor.data if isinstance(tensor.data, tuple) else bytes(tensor.data))
        for tensor in request.inputs
    ]
    parameters = request.id, request.rows, request.outputs, request.binary, request.timeout_ms, request.priority
    return inputs, *parameters


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.permutations(["a", "b"]),
            st.sampled_from([None, 64, 4096]),
            st.sampled_from([{}, {"timeout": 500}, {"priority": 1}, {"binary_data_output": True}]),
            st.integers(0, 2),
            st.binary(min_size=54, max_size=54),
        ),
        max_size=12,
    )
)
def test_each_request_is_what_it_would_be_by_itself(
    drawn: list[tuple[int, list[str], int | None, dict[str, object], int, bytes]],
) -> None:
    spec = model(NUMBERS)
    reader, by_name = RequestReader(spec), {tensor.name: tensor for tensor in NUMBERS}
    sizes = {"a": 8, "b": 1}
    for rows, order, offset, parameters, missing, data in drawn * 2:
        entries = [entry(by_name[name], rows, rows * sizes[name]) for name in order]
        text = orjson.dumps({"inputs": entries, "parameters": parameters})
        body = RequestBody(text + data[: max(0, 9 * rows - missing)], len(text), offset)
        try:
            expected = plain(read_request(spec, body))
        except RefusedError as refusal:
            with pytest.raises(RefusedError) as refused:
                reader.read_request(body)
            assert refused.value.message == refusal.message
        else:
            assert plain(reader.read_request(body)) == expected


def test_what_is_known_is_not_read_again_and_only_so_much_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def count(spec: ModelSpec, body: RequestBody) -> InferRequest:
        read.append(body)
        return read_request(spec, body)

    monkeypatch.setattr(known_requests, "read_request", count)
    reader = RequestReader(model(NUMBERS))

    def ask(number: int, value: float) -> bytes:
        entries = [entry(NUMBERS[0], 1, 8), entry(NUMBERS[1], 1, 1)]
        text = orjson.dumps({"id": str(number), "inputs": entries})
        request = reader.read_request(RequestBody(text + struct.pack("<ff", value, value) + b"x", len(text)))
        assert request.id == str(number)
        return bytes(request.inputs[0].data) if not isinstance(request.inputs[0].data, tuple) else b""

    assert [ask(1, value) for value in (1.0, 2.0)] == [struct.pack("<ff", *2 * [value]) for value in (1.0, 2.0)]
    assert len(read) == 1
    for number in range(200):
        ask(number, 3.0)
    assert len(reader._known) <= 64 and len(read) == 200


def test_strings_are_looked_into_each_time() -> None:
    reader = RequestReader(model(TEXTS))
    text = orjson.dumps({"inputs": [entry(TEXTS[0], 1, 5)]})
    assert reader.read_request(RequestBody(text + b"\1\0\0\0a", len(text))).rows == 1
    with pytest.raises(RefusedError):
        reader.read_request(RequestBody(text + b"\7\0\0\0a", len(text)))
