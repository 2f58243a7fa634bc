"""Conversion between messages of the gRPC service and the router's types.

Raw tensors are extracted and inserted in the wire format. Protobuf would copy each tensor when it parses a message,
once more when the tensor is accessed, and twice when it serialises a message; at half a megabyte a request, copies are
most of the cost of serving. Source of the format: Protocol Buffers' documentation, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cache, lru_cache, partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from gpuprof.serving.protocol.inference_service import refuse_long_text
from gpuprof.serving.router.infer_request import (
    InferRequest,
    SentTensor,
    check_rows,
    check_size,
    collect_inputs,
    collect_outputs,
    find_batch_key,
    read_urgency,
    to_tensor_bytes,
)
from gpuprof.serving.transport.datatypes import ModelSpec, TensorSpec, join_strings
from gpuprof.serving.transport.inference import OutputTensor, RefusedError, bad_request
from gpuprof.serving.transport.wire import Buffer

_MAX_VARINT_BYTES = 10


class _WireType(IntEnum):
    """Wire types of fields; no message of the protocol has groups."""

    VARINT = 0
    FIXED64 = 1
    LENGTH = 2  #: Bytes, preceded by their number.
    FIXED32 = 5


#: Field of InferTensorContents by data type; half floats travel only raw.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


SERVICE = "inference.GRPCInferenceService"


@cache
def protocol_pool() -> descriptor_pool.DescriptorPool:
    """Return the descriptors of the protocol, compiled by protoc from ``open_inference.proto``:

    python -m grpc_tools.protoc -I. --descriptor_set_out=open_inference.binpb open_inference.proto

    The descriptor is loaded into a separate pool: generated code would be registered in the global pool, where other
    packages may have registered the same protocol. A test compiles the source again and compares.
    """
    data = files("gpuprof.serving.protocol").joinpath("open_inference.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.Add(file)
    return pool


@cache
def message_class(name: str) -> Any:
    """Return the class of a message, ``"ModelInferRequest"``."""
    return message_factory.GetMessageClass(protocol_pool().FindMessageTypeByName(f"inference.{name}"))


@cache
def field_number(message: str, field: str) -> int:
    """Return the number of a field of a message."""
    number: int = message_class(message).DESCRIPTOR.fields_by_name[field].number
    return number


def service_methods() -> list[Any]:
    """Return the descriptors of the calls."""
    return list(protocol_pool().FindServiceByName(SERVICE).methods)


class InferMessage(NamedTuple):
    """A ModelInferRequest without its raw contents, and where these lie in its bytes."""

    request: Any
    spans: list[slice]
    text_bytes: int  #: Bytes without the raw contents.


def decode_infer(data: Buffer) -> InferMessage:
    """Return the message in ``data``, without copying its raw contents. Raises `RefusedError`."""
    try:
        text, spans = split_off_field(data, field_number("ModelInferRequest", "raw_input_contents"))
        refuse_long_text(len(text))
        return InferMessage(message_class("ModelInferRequest").FromString(text), spans, len(text))
    except (DecodeError, ValueError) as error:
        reason = f"the message is no ModelInferRequest: {error}"
        raise RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, reason) from None


def read_infer(spec: ModelSpec, message: InferMessage, data: Buffer) -> InferRequest:
    """Read and check the request in ``data``.

    Raises `RefusedError`: 400, with the reason.
    """
    request = message.request
    inputs = collect_inputs(spec, _list_tensors(message, memoryview(data)))
    outputs = collect_outputs(spec, [(entry.name, _read_parameters(entry)) for entry in request.outputs])
    return InferRequest(
        id=request.id or None,
        rows=check_rows(spec, inputs),
        inputs=inputs,
        outputs=outputs or None,
        urgency=read_urgency(_read_parameters(request)),
        batch_key=find_batch_key(spec, inputs),
    )


def write_infer(spec: ModelSpec, request: InferRequest, outputs: list[OutputTensor]) -> list[Buffer]:
    """Return the parts of a ModelInferResponse with raw contents, as they are sent."""
    if request.outputs is not None:
        by_position = {output.position: output for output in outputs}
        outputs = [by_position[position] for position in request.outputs]
    tensors = spec.outputs
    tensor_heads = tuple(
        [(tensors[output.position].name, tensors[output.position].datatype, tuple(output.shape)) for output in outputs]
    )
    write = _write_known_outputs if request.id is None else _write_outputs
    head = write(spec.name, spec.version, request.id or "", tensor_heads)
    return append_field(
        head, field_number("ModelInferResponse", "raw_output_contents"), [output.data for output in outputs]
    )


def _write_outputs(
    name: str, version: str, request_id: str, tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
) -> bytes:
    """Return a ModelInferResponse without its raw contents; ``tensors`` are names, data types and shapes."""
    response = message_class("ModelInferResponse")(model_name=name, model_version=version, id=request_id)
    for tensor, datatype, shape in tensors:
        response.outputs.add(name=tensor, datatype=datatype, shape=shape)
    data: bytes = response.SerializeToString()
    return data


#: Cached, since most answers are equal before their tensors.
_write_known_outputs = lru_cache(_write_outputs)


def write_streamed(response: Sequence[Buffer]) -> list[Buffer]:
    """Return the parts of a ModelStreamInferResponse around the parts of a ModelInferResponse."""
    return wrap_message(response, field_number("ModelStreamInferResponse", "infer_response"))


def write_stream_error(message: str, request_id: str) -> bytes:
    """Return a ModelStreamInferResponse with the reason for a missing answer."""
    failed = message_class("ModelStreamInferResponse")(error_message=message)
    failed.infer_response.id = request_id
    data: bytes = failed.SerializeToString()
    return data


def _list_tensors(message: InferMessage, data: memoryview) -> Iterator[SentTensor]:
    entries, spans = message.request.inputs, message.spans
    if spans and len(spans) != len(entries):
        raise bad_request(f"{len(entries)} inputs need as many raw contents but got {len(spans)}")
    for number, entry in enumerate(entries):
        if spans and entry.HasField("contents") and entry.contents.ListFields():
            raise bad_request(f"input {entry.name!r} has both typed and raw contents")
        read = partial(_read_raw, data, spans[number]) if spans else partial(_read_contents, entry.contents)
        yield SentTensor(entry.name, entry.datatype, list(entry.shape), _read_parameters(entry), read)


def _read_raw(data: memoryview, span: slice, tensor: TensorSpec, shape: list[int]) -> tuple[int, int]:
    check_size(tensor, shape, data[span])
    return span.start, span.stop - span.start


def _read_contents(contents: Any, tensor: TensorSpec, shape: list[int]) -> bytes:
    if tensor.datatype not in _CONTENTS:
        raise bad_request(f"input {tensor.name!r} of type {tensor.datatype} must be sent as raw contents")
    values = list(getattr(contents, _CONTENTS[tensor.datatype]))
    data = join_strings(values) if tensor.datatype == "BYTES" else to_tensor_bytes(tensor, values)
    check_size(tensor, shape, data)
    return data


def _read_parameters(entry: Any) -> dict[str, Any]:
    if not entry.parameters:
        return {}
    choices = {name: (value, value.WhichOneof("parameter_choice")) for name, value in entry.parameters.items()}
    return {name: getattr(value, choice) for name, (value, choice) in choices.items() if choice is not None}


def split_off_field(data: Buffer, field: int) -> tuple[bytes, list[slice]]:
    """Return a message without its values of the bytes field ``field``, and the positions of these values in it.

    Raises `ValueError` when ``data`` is no message.
    """
    view = memoryview(data)
    parts: list[Buffer] = []
    values = []
    position = start = 0
    field_key = field << 3 | _WireType.LENGTH
    while position < len(data):
        begin = position
        key, position = _varint(data, position)
        position, end = _span(data, key & 7, position)
        if key == field_key:
            parts.append(view[start:begin])
            values.append(slice(position, end))
            start = end
        position = end
    return b"".join([*parts, view[start:]]), values


def append_field(data: bytes, field: int, values: Sequence[Buffer]) -> list[Buffer]:
    """Return the parts of a message with these values of the bytes field ``field`` appended, without copies."""
    key = _encode_key(field)
    parts: list[Buffer] = [data]
    for value in values:
        parts += (key + _to_varint(len(value)), value)
    return parts


def wrap_message(parts: Sequence[Buffer], field: int) -> list[Buffer]:
    """Return the parts of a message whose only field ``field`` is the message in ``parts``."""
    return [_encode_key(field) + _to_varint(sum(map(len, parts))), *parts]


def _span(data: Buffer, kind: int, position: int) -> tuple[int, int]:
    """Return the beginning and end of the value of a field of this kind."""
    if kind == _WireType.LENGTH:
        size, position = _varint(data, position)
        end = position + size
    elif kind == _WireType.VARINT:
        _, end = _varint(data, position)
    elif kind in (_WireType.FIXED64, _WireType.FIXED32):
        end = position + (8 if kind == _WireType.FIXED64 else 4)
    else:
        raise ValueError(f"a field of the unknown kind {kind}")
    if end > len(data):
        raise ValueError("a field is longer than the message")
    return position, end


def _varint(data: Buffer, position: int) -> tuple[int, int]:
    """Return the number at ``position`` and its end."""
    value = 0
    for count, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return value, position + count + 1
    raise ValueError("a number does not end")


def _to_varint(value: int) -> bytes:
    text = bytearray()
    while value > 0x7F:
        text.append(value & 0x7F | 0x80)
        value >>= 7
    text.append(value)
    return bytes(text)


@cache
def _encode_key(field: int) -> bytes:
    return _to_varint(field << 3 | _WireType.LENGTH)
