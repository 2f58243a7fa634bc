"""Messages of gRPC: requests and refusals, fields cut on the wire, and the compiled descriptor."""

import asyncio
import gzip
import json
import struct
import zlib
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from random import Random
from typing import Any, cast

import orjson
import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

import gpuprof.serving.protocol as package
from gpuprof.domain.deployment import PublicName
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
from gpuprof.serving.protocol.http_api import HttpApi, HttpConnection
from gpuprof.serving.protocol.inference_service import MAX_TEXT_BYTES, MOST_CACHED, refuse_long_text
from gpuprof.serving.router.infer_request import InferRequest, RequestBody, Urgency, read_request, read_urgency
from gpuprof.serving.router.router import Router
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.server_settings import ServerSettings
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.batch_io import INLINE_BYTES
from gpuprof.serving.transport.datatypes import ModelSpec, TensorSpec
from gpuprof.serving.transport.inference import Inference, OutputTensor, RefusedError, StageTimes
from tests.serving.protocol.test_http_api import HeldTransport, send_bytes

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


NUMBERS = (TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "UINT8", (-1, 1)))
TEXTS = (TensorSpec("s", "BYTES", (-1, 1)),)
SIZES = {"a": 8, "b": 1, "s": 5}
BODIES = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.permutations(["a", "b"]),
        st.sampled_from([None, 64, 4096]),
        st.sampled_from([{}, {"timeout": 500}, {"priority": 1}]),
        st.integers(0, 2),
        st.binary(min_size=54, max_size=54),
    ),
    max_size=12,
)


def serve(inputs: tuple[TensorSpec, ...]) -> tuple[HttpApi, ServedModel]:
    async def main() -> tuple[HttpApi, ServedModel]:
        router = Router(Arena(1 << 16))
        model = ServedModel("m", 100.0, router.arena)
        model.spec = ModelSpec("m", "1", "test", inputs, (TensorSpec("y", "FP32", (-1, 2)),), 4)
        api = HttpApi(router, ServerSettings())
        router.publish([model])
        return api, model

    return asyncio.run(main())


def http_body(rows: int, names: list[str], data: bytes, missing: int = 0, **fields: Any) -> RequestBody:
    by_name = {tensor.name: tensor for tensor in (*NUMBERS, *TEXTS)}
    entries = [
        {
            "name": name,
            "datatype": by_name[name].datatype,
            "shape": [rows, *by_name[name].shape[1:]],
            "parameters": {"binary_data_size": rows * SIZES[name]},
        }
        for name in names
    ]
    text = orjson.dumps({"inputs": entries, **fields})
    size = rows * sum(SIZES[name] for name in names) - missing
    return RequestBody(text + data[: max(0, size)], len(text))


def grpc_body(rows: int, names: list[str], data: bytes, missing: int, parameters: dict[str, int]) -> RequestBody:
    message = message_class("ModelInferRequest")(model_name="m")
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    begin = 0
    for tensor in (tensor for name in names for tensor in NUMBERS if tensor.name == name):
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=[rows, *tensor.shape[1:]])
        end = begin + rows * SIZES[tensor.name]
        message.raw_input_contents.append(data[begin:end])
        begin = end
    if missing and message.raw_input_contents[-1]:
        message.raw_input_contents[-1] = message.raw_input_contents[-1][:-missing]
    return RequestBody(message.SerializeToString())


def plain(request: InferRequest, body: RequestBody) -> tuple[object, ...]:
    inputs = [(t.shape, t.data if isinstance(t.data, tuple) else bytes(t.data)) for t in request.find_tensors(body)]
    return inputs, request.id, request.rows, request.outputs, request.binary, request.urgency


def read_call(spec: ModelSpec, body: RequestBody) -> InferRequest:
    return read_infer(spec, decode_infer(body.data), body.data)


def read_cached_call(api: HttpApi, body: RequestBody) -> InferRequest:
    return api.grpc.read(body.data)[1]


@given(BODIES)
def test_each_request_is_read_as_by_itself(drawn: list[tuple[int, list[str], int | None, Any, int, bytes]]) -> None:
    api, model = serve(NUMBERS)
    for rows, names, offset, parameters, missing, data in drawn * 2:
        http = http_body(rows, names, data, missing, parameters=parameters)
        grpc = grpc_body(rows, names, data, missing, parameters)
        http.offset = grpc.offset = offset
        readers = (
            (http, partial(read_request, model.spec), partial(api._read, model)),
            (grpc, partial(read_call, model.spec), partial(read_cached_call, api)),
        )
        for body, read, read_cached in readers:
            try:
                expected = plain(read(body), body)
            except RefusedError as refusal:
                with pytest.raises(RefusedError) as refused:
                    read_cached(body)
                assert refused.value.message == refusal.message
            else:
                assert plain(read_cached(body), body) == expected


def test_what_is_known_is_not_read_again_and_only_so_much_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    api, model = serve(NUMBERS)
    first = http_body(1, ["a", "b"], bytes(9), id="1")
    request = api._read(model, first)
    assert api._read(model, http_body(1, ["a", "b"], struct.pack("<ffx", 1.0, 2.0), id="1")) is request
    for number in range(2 * MOST_CACHED):
        api._read(model, http_body(1, ["a", "b"], bytes(9), id=str(number)))
    assert len(api.service.cached) <= MOST_CACHED
    api.router.publish([model])
    assert not api.service.cached  # another model may have this name now


def test_strings_are_looked_into_each_time() -> None:
    api, model = serve(TEXTS)
    assert api._read(model, http_body(1, ["s"], b"\1\0\0\0a")).rows == 1
    with pytest.raises(RefusedError):
        api._read(model, http_body(1, ["s"], b"\7\0\0\0a"))


Compress = Callable[[bytes], bytes]
COMPRESS: list[tuple[str, Compress]] = [("gzip", gzip.compress), ("X-GZIP", gzip.compress), ("deflate", zlib.compress)]
WIDTH = 50_000
MAX_BODY_BYTES = 1 << 20


class EchoModel:
    """Gives back its input, a large tensor in the arena, where nothing else lies, and counts its requests."""

    def __init__(self, arena: Arena) -> None:
        self.public, self.name = PublicName("m", "1"), "m/1"
        inputs, outputs = ((TensorSpec(letter, "FP32", (-1, WIDTH)),) for letter in "xy")
        self.spec = ModelSpec("m", "1", "test", inputs, outputs, 4)
        self.tracer: object = None
        self.waiting: list[Inference] = []
        self.requests = 0
        self._arena = arena

    def limit_deadline_ms(self, timeout_ms: float | None) -> float:
        return timeout_ms or 500.0

    def refuse_early(self, *_: object) -> None:
        raise AssertionError("what a compressed body asks is not known before it has been inflated")

    def submit(self, inference: Inference) -> None:
        self.waiting.append(inference)
        self.requests += 1

    def answer(self) -> None:
        while self.waiting:
            inference = self.waiting.pop()
            (tensor,) = inference.inputs
            assert isinstance(tensor.data, tuple)
            assert inference.slot is not None and self._arena.used == inference.slot.size
            value = bytes(self._arena.view(*tensor.data))
            inference.release(self._arena)
            inference.times = StageTimes()
            inference.on_done(inference, [OutputTensor(0, tensor.shape, value)], None)


class Site:
    """A server of one model, and one connection to it."""

    def __init__(self, buffer_bytes: int = 1 << 23) -> None:
        self.arena = Arena(buffer_bytes, poison=True)
        router = Router(self.arena)
        self.api = HttpApi(router, ServerSettings(max_body_bytes=MAX_BODY_BYTES))
        self.model = EchoModel(self.arena)
        router.publish(cast(Any, [self.model]))
        self.connection, self.transport = HttpConnection(self.api), HeldTransport()
        self.connection.connection_made(self.transport)

    async def ask(self, body: bytes, *lines: str, is_chunked: bool = False) -> bytes:
        """Return the answer to a request, sent in pieces."""
        began = len(self.transport.written)
        framing = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}"
        head = "\r\n".join(["POST /v2/models/m/infer HTTP/1.1", "Host: x", *lines, framing, "", ""]).encode()
        send_bytes(self.connection, head)
        send_bytes(self.connection, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body)
        while len(self.transport.written) == began:
            await asyncio.sleep(0.001)
            self.model.answer()
        self.transport.send(self.connection)
        return self.transport.written[began:]


#: Values that hardly shrink, so that the body is received in the arena, and some that shrink to little.
RANDOM, VALUES = Random(0).randbytes(4 * WIDTH), bytes(range(250)) * (4 * WIDTH // 250)
ENTRY = {"name": "x", "datatype": "FP32", "shape": [1, WIDTH], "parameters": {"binary_data_size": len(VALUES)}}
TEXT = json.dumps({"inputs": [ENTRY], "parameters": {"binary_data_output": True}}).encode()
HEADER = f"Inference-Header-Content-Length: {len(TEXT)}"


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("coding", "compress"), COMPRESS)
def test_a_compressed_body_is_read_as_it_was_before(coding: str, compress: Compress, is_chunked: bool) -> None:
    async def scene() -> None:
        site = Site()
        for times in range(1, 4):
            values = (VALUES, RANDOM)[times % 2]
            body = compress(TEXT + values)
            answer = await site.ask(body, f"Content-Encoding: {coding}", HEADER, is_chunked=is_chunked)
            assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(values)
            assert site.model.requests == times and site.arena.used == 0
            if is_chunked:  # which ends the connection
                return

    asyncio.run(scene())


BOMB = bytes(MAX_BODY_BYTES + 1)


@pytest.mark.parametrize(
    ("coding", "body", "status", "text"),
    [
        ("gzip", gzip.compress(BOMB), 413, b"larger than"),
        ("gzip", gzip.compress(bytes(100)) * 2, 400, b"not compressed as one piece"),
        ("gzip", gzip.compress(VALUES)[:-9], 400, b"not compressed as one piece"),
        ("deflate", zlib.compress(VALUES)[:2] + bytes(9), 400, b"cannot be inflated"),
        ("gzip", TEXT + VALUES, 400, b"not compressed as its headers say"),
        ("gzip", gzip.compress(TEXT[:-5]), 400, b"at most Content-Length"),
        ("br", gzip.compress(TEXT + VALUES), 415, b"by gzip or deflate"),
        ("gzip, gzip", gzip.compress(gzip.compress(TEXT + VALUES)), 415, b"by gzip or deflate"),
    ],
    # What is compressed holds the time at which it was.
    ids=["bomb", "two pieces", "cut off", "no deflate", "no gzip", "too short", "br", "twice"],
)
def test_bodies_that_cannot_be_inflated_leave_nothing(coding: str, body: bytes, status: int, text: bytes) -> None:
    async def scene() -> None:
        site = Site()
        answer = await site.ask(body, f"Content-Encoding: {coding}", HEADER)
        assert answer.startswith(b"HTTP/1.1 %d" % status) and text in answer
        assert site.arena.used == 0 and not site.model.requests

    asyncio.run(scene())


def test_a_text_that_is_too_long_is_not_read() -> None:
    refuse_long_text(MAX_TEXT_BYTES)
    with pytest.raises(RefusedError, match="send tensors as binary data"):
        refuse_long_text(MAX_TEXT_BYTES + 1)
