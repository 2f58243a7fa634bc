"""Messages of gRPC: requests and refusals, fields cut on the wire, and the compiled descriptor."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

import gpuprof.serving.protocol as package
from gpuprof.serving.protocol.grpc_calls import find_code, read_timeout_ms, status_headers
from gpuprof.serving.protocol.grpc_messages import (
    _read_parameters,
    append_field,
    decode_infer,
    message_class,
    protocol_pool,
    read_infer,
    split_off_field,
    wrap_message,
)
from gpuprof.serving.router.infer_request import InferRequest, RequestBody, Urgency, read_urgency
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.datatypes import ModelSpec, TensorSpec
from gpuprof.serving.transport.inference import RefusedError

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


def test_a_large_call_that_is_cut_off_is_refused() -> None:
    data = request([b"x" * (2 * INLINE_BYTES)]).SerializeToString()
    with pytest.raises(RefusedError, match="no ModelInferRequest"):
        decode_infer(data[:-1])


@given(st.integers(0, 2**62), st.integers(0, 5))
def test_how_urgent_a_call_is_stands_in_its_parameters(timeout_us: int, priority: int) -> None:
    message = request([], timeout=timeout_us)
    message.parameters["priority"].uint64_param = priority
    assert read_urgency(_read_parameters(message)) == Urgency(timeout_us / 1000.0 if timeout_us else None, priority)


FOLDER = Path(package.__file__).parent


def test_the_descriptor_is_what_the_source_compiles_to(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    compiled = tmp_path / "compiled.binpb"
    assert protoc.main(["", f"-I{FOLDER}", f"--descriptor_set_out={compiled}", "open_inference.proto"]) == 0
    (ours,) = descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "open_inference.binpb").read_bytes()).file
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file
    assert ours == fresh


def test_what_is_not_left_out_of_the_protocol_is_numbered_as_in_tritons_own_messages() -> None:
    from tritonclient.grpc import model_config_pb2, service_pb2

    file = descriptor_pb2.FileDescriptorProto()
    protocol_pool().FindFileByName("open_inference.proto").CopyToProto(file)
    for message in file.message_type:
        theirs = getattr(service_pb2, message.name, None) or getattr(model_config_pb2, message.name)
        message_type = message_class(message.name).DESCRIPTOR
        for field in message_type.fields:
            assert field.number == theirs.DESCRIPTOR.fields_by_name[field.name].number
            assert field.type == theirs.DESCRIPTOR.fields_by_name[field.name].type
