"""Messages that are cut on the wire, against protobuf."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from gpuprof.serving.protocol.grpc_messages import InferCall, before_tensors, read_urgency
from gpuprof.serving.protocol.grpc_raw import first_begins, first_stands, put_in, take_out, wrap
from gpuprof.serving.router.infer_request import Urgency
from gpuprof.serving.transport.batch_io import INLINE_BYTES

CONTENTS = st.lists(st.binary(max_size=300), max_size=4)


def request(raw: list[bytes], name: str = "m", timeout: int = 3) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name=name, id="7", raw_input_contents=raw)
    message.parameters["timeout"].int64_param = timeout
    message.inputs.add(name="x", datatype="FP32", shape=[1, 2**40]).contents.fp64_contents.extend([1.5, -2.0])
    return message


@given(CONTENTS, st.text(max_size=20), st.integers(-(2**63), 2**63 - 1))
def test_what_is_taken_out_is_what_protobuf_reads_and_the_rest_stays(raw: list[bytes], name: str, timeout: int) -> None:
    data = request(raw, name, timeout).SerializeToString()
    rest, places = take_out(data, 7)
    assert [data[place] for place in places] == raw
    assert first_begins(data, 7) == (places[0].start if raw else 0)
    assert service_pb2.ModelInferRequest.FromString(rest) == request([], name, timeout)


@given(CONTENTS)
def test_what_is_put_in_is_read_by_protobuf(raw: list[bytes]) -> None:
    head = service_pb2.ModelInferResponse(model_name="m", id="7").SerializeToString()
    parts = put_in(head, 6, [memoryview(value) for value in raw])
    whole = service_pb2.ModelInferResponse(model_name="m", id="7", raw_output_contents=raw)
    assert service_pb2.ModelInferResponse.FromString(b"".join(parts)) == whole
    streamed = service_pb2.ModelStreamInferResponse.FromString(b"".join(wrap(parts, 2)))
    assert streamed == service_pb2.ModelStreamInferResponse(infer_response=whole)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_raise_value_error_or_are_kept_whole(data: bytes) -> None:
    try:
        rest, places = take_out(data, 7)
    except ValueError:
        return
    assert len(rest) + sum(place.stop - place.start for place in places) <= len(data)


@given(CONTENTS.filter(bool), st.integers(0, 400))
def test_where_the_first_value_begins_is_known_from_a_beginning_that_has_its_length(raw: list[bytes], cut: int) -> None:
    data = request(raw).SerializeToString()
    begin = take_out(data, 7)[1][0].start
    assert first_begins(data[: begin + cut], 7) == begin
    assert first_begins(data[: begin - 3], 7) == 0


@given(CONTENTS.filter(bool), st.integers(0, 400), st.integers(0, 2**62))
def test_what_stands_before_the_tensors_is_read_as_soon_as_it_is_there(raw: list[bytes], cut: int, us: int) -> None:
    whole = request(raw, timeout=us)
    data = whole.SerializeToString()
    stands = first_stands(data, 7)
    assert stands is not None and before_tensors(data[:stands]) is None
    early = before_tensors(data[: stands + 1 + cut])
    assert early is not None and early.model_name == "m"
    assert read_urgency(early) == read_urgency(whole) == Urgency(us / 1000.0 if us else None, 0)
    assert before_tensors(request([]).SerializeToString()) is None


@given(st.binary(max_size=80))
def test_a_beginning_that_is_no_message_is_none(data: bytes) -> None:
    assert before_tensors(data) is None or first_stands(data, 7) is not None


@pytest.mark.parametrize("size", [4, INLINE_BYTES + 1])
def test_a_call_has_its_raw_contents_however_large_it_is(size: int) -> None:
    call = InferCall.decode(request([b"x" * size, b"y"]).SerializeToString())
    assert [bytes(value) for value in call.raw] == [b"x" * size, b"y"]
    assert call.message.inputs[0].name == "x"


def test_where_raw_contents_lie_is_said_of_a_message_in_the_arena() -> None:
    data = request([b"x" * (2 * INLINE_BYTES), b"yz"]).SerializeToString()
    places = InferCall.decode(data, 1000).places
    assert places is not None
    assert [data[offset - 1000 : offset - 1000 + size] for offset, size in places] == [b"x" * (2 * INLINE_BYTES), b"yz"]


def test_a_large_call_that_is_cut_off_is_protobufs_to_refuse() -> None:
    data = request([b"x" * (2 * INLINE_BYTES)]).SerializeToString()
    with pytest.raises(DecodeError):
        InferCall.decode(data[:-1])
