"""A message of gRPC that is like one before is read as if it were not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprof.serving.protocol import known_calls
from gpuprof.serving.protocol.grpc_messages import InferCall, read_infer
from gpuprof.serving.protocol.known_calls import KnownCalls
from gpuprof.serving.protocol.open_inference import message_class
from gpuprof.serving.router.infer_request import InferRequest
from gpuprof.serving.transport.inference import RefusedError
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec

NUMBERS = ModelSpec("m", "1", "t", (TensorSpec("a", "UINT8", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),), 4)
OTHERS = ModelSpec("m", "1", "t", (TensorSpec("a", "UINT8", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 2)),), 4)
TEXTS = ModelSpec("m", "1", "t", (TensorSpec("a", "BYTES", (-1, 1)),), (TensorSpec("y", "FP32", (-1, 2)),), 4)


def message(raw: list[bytes], shape: list[int], datatype: str = "UINT8", id: str = "", timeout: int = 0) -> bytes:
    request = message_class("ModelInferRequest")(model_name="m", id=id, raw_input_contents=raw)
    request.inputs.add(name="a", datatype=datatype, shape=shape)
    if timeout:
        request.parameters["timeout"].int64_param = timeout
    data: bytes = request.SerializeToString()
    return data


def plain(request: InferRequest) -> tuple[Any, ...]:
    inputs = [(tensor.shape, bytes(tensor.data)) for tensor in request.inputs if not isinstance(tensor.data, tuple)]
    return inputs, request.id, request.rows, request.outputs, request.binary, request.timeout_ms, request.priority


def outcome(spec: ModelSpec, data: bytes, calls: KnownCalls | None) -> object:
    try:
        if calls is None:
            return plain(read_infer(spec, InferCall.decode(data)))
        return plain(calls.read_request(spec, calls.find(data) or InferCall.decode(data)))
    except RefusedError as refusal:
        return refusal.status, refusal.message


@given(
    st.lists(
        st.tuples(
            st.sampled_from([NUMBERS, OTHERS]),
            st.lists(st.binary(max_size=9), max_size=2),
            st.sampled_from([[1, 2], [2, 2], [1, 4], [3, 2]]),
            st.sampled_from(["", "7"]),
            st.sampled_from([0, 500]),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_each_message_is_what_it_would_be_by_itself(drawn: list[tuple[Any, ...]]) -> None:
    calls = KnownCalls()
    for spec, raw, shape, id, timeout, is_right in drawn:
        if is_right:  # drawn bytes hardly ever have the length that they should
            raw = [bytes(shape[0] * shape[1])]
        data = message(raw, shape, id=id, timeout=timeout)
        assert outcome(spec, data, calls) == outcome(spec, data, None)


def test_a_message_like_one_before_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = KnownCalls()
    assert outcome(NUMBERS, message([b"ab"], [1, 2]), calls) == outcome(NUMBERS, message([b"ab"], [1, 2]), None)
    monkeypatch.setattr(known_calls, "read_infer", lambda *_: pytest.fail("it is read again"))
    assert outcome(NUMBERS, message([b"cd"], [1, 2]), calls)[0] == [([1, 2], b"cd")]  # type: ignore[index]
    assert calls.find(message([b"cd"], [1, 2], timeout=3)) is None
    assert calls.find(message([b"cde"], [1, 2])) is None


@pytest.mark.parametrize(
    ("spec", "data"),
    [
        (NUMBERS, message([b"ab"], [1, 2], id="7")),
        (TEXTS, message([b"\1\0\0\0x"], [1, 1], "BYTES")),
        (NUMBERS, message([b"ab"], [1, 2]) + b"\x1a\0"),  # the identifier, empty, behind the tensor
        (NUMBERS, message([b"ab"], [1, 2], timeout=1) + b"\x12" + b"\xff\1" + bytes(255)),
    ],
)
def test_what_need_not_be_alike_is_not_remembered(spec: ModelSpec, data: bytes) -> None:
    calls = KnownCalls()
    outcome(spec, data, calls)
    assert calls.find(data) is None


def test_a_text_that_looks_like_the_tensor_at_the_end_is_not_taken_for_it() -> None:
    calls = KnownCalls()
    tail = b"\x3a\2ab"  # the key of raw contents, their length, and the same bytes
    data = message([b"ab"], [1, 2]) + b"\x1a\x04" + tail
    assert outcome(NUMBERS, data, calls) == outcome(NUMBERS, data, None)
    changed = data[:-2] + b"cd"
    assert outcome(NUMBERS, changed, calls) == outcome(NUMBERS, changed, None)


def test_only_so_many_are_remembered() -> None:
    calls = KnownCalls()
    for number in range(1, 400):
        outcome(NUMBERS, message([b"ab"], [1, 2], timeout=number), calls)
    kept = sum(calls.find(message([b"ab"], [1, 2], timeout=number)) is not None for number in range(1, 400))
    assert 0 < kept <= 8  # of two lengths
