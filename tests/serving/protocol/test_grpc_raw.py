"""Messages that are cut on the wire, against protobuf."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from gpuprof.serving.protocol.grpc_messages import _read_parameters, decode_infer
from gpuprof.serving.protocol.grpc_raw import append_field, split_off_field, wrap_message
from gpuprof.serving.router.infer_request import Urgency, read_urgency
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.inference import RefusedError

CONTENTS = st.lists(st.binary(max_size=300), max_size=4)


def request(raw: list[bytes], name: str = "m", timeout: int = 3) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name=name, id="7", raw_input_contents=raw)
    message.parameters["timeout"].int64_param = timeout
    message.inputs.add(name="x", datatype="FP32", shape=[1, 2**40]).contents.fp64_contents.extend([1.5, -2.0])
    return message


@given(CONTENTS, st.text(max_size=20), st.integers(-(2**63), 2**63 - 1))
def test_what_is_taken_out_is_what_protobuf_reads_and_the_rest_stays(raw: list[bytes], name: str, timeout: int) -> None:
    data = request(raw, name, timeout).SerializeToString()
    rest, places = split_off_field(data, 7)
    assert [data[place] for place in places] == raw
    assert service_pb2.ModelInferRequest.FromString(rest) == request([], name, timeout)


@given(CONTENTS)
def test_what_is_put_in_is_read_by_protobuf(raw: list[bytes]) -> None:
    head = service_pb2.ModelInferResponse(model_name="m", id="7").SerializeToString()
    parts = append_field(head, 6, [memoryview(value) for value in raw])
    whole = service_pb2.ModelInferResponse(model_name="m", id="7", raw_output_contents=raw)
    assert service_pb2.ModelInferResponse.FromString(b"".join(parts)) == whole
    streamed = service_pb2.ModelStreamInferResponse.FromString(b"".join(wrap_message(parts, 2)))
    assert streamed == service_pb2.ModelStreamInferResponse(infer_response=whole)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_raise_value_error_or_are_kept_whole(data: bytes) -> None:
    try:
        rest, places = split_off_field(data, 7)
    except ValueError:
        return
    assert len(rest) + sum(place.stop - place.start for place in places) <= len(data)


@pytest.mark.parametrize("size", [4, INLINE_BYTES + 1])
def test_a_call_has_its_raw_contents_however_large_it_is(size: int) -> None:
    data = request([b"x" * size, b"y"]).SerializeToString()
    message = decode_infer(data)
    assert [data[span] for span in message.spans] == [b"x" * size, b"y"]
    assert message.request.inputs[0].name == "x"


def test_a_large_call_that_is_cut_off_is_refused() -> None:
    data = request([b"x" * (2 * INLINE_BYTES)]).SerializeToString()
    with pytest.raises(RefusedError, match="no ModelInferRequest"):
        decode_infer(data[:-1])


@given(st.integers(0, 2**62), st.integers(0, 5))
def test_how_urgent_a_call_is_stands_in_its_parameters(timeout_us: int, priority: int) -> None:
    message = request([], timeout=timeout_us)
    message.parameters["priority"].uint64_param = priority
    assert read_urgency(_read_parameters(message)) == Urgency(timeout_us / 1000.0 if timeout_us else None, priority)
