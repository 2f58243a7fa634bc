"""Conversion between messages of the gRPC service and the router's types."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from gpuprof.serving.protocol.grpc_raw import append_field, split_off_field, wrap_message
from gpuprof.serving.protocol.large_texts import refuse_long_text
from gpuprof.serving.protocol.open_inference import field_number, message_class
from gpuprof.serving.router.infer_request import (
    InferRequest,
    Urgency,
    check_rows,
    check_size,
    check_tensor,
    find_batch_key,
    refuse_unsupported,
    to_tensor_bytes,
)
from gpuprof.serving.transport.datatypes import join_strings
from gpuprof.serving.transport.inference import InputTensor, OutputTensor, RefusedError, bad_request
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec
from gpuprof.serving.transport.wire import Buffer

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


class InferMessage(NamedTuple):
    """A ModelInferRequest without its raw contents, and where these lie in its bytes."""

    request: Any
    spans: list[slice]
    text_bytes: int  #: Bytes without the raw contents.


def decode_infer(data: Buffer) -> InferMessage:
    """Return the message in ``data``, of which raw contents are not copied. Raises `RefusedError`."""
    try:
        text, spans = split_off_field(data, field_number("ModelInferRequest", "raw_input_contents"))
        refuse_long_text(len(text))
        return InferMessage(message_class("ModelInferRequest").FromString(text), spans, len(text))
    except (DecodeError, ValueError) as error:
        reason = f"the message is no ModelInferRequest: {error}"
        raise RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, reason) from None


def read_urgency(request: Any) -> Urgency:
    """Return the urgency of a ModelInferRequest.

    Raises
    ------
    RefusedError
        400, for malformed parameters.
    """
    if not request.parameters:
        return Urgency(None, 0)
    parameters = {name: _value(parameter) for name, parameter in request.parameters.items()}
    timeout_us, priority = (_whole(parameters, name) for name in ("timeout", "priority"))
    return Urgency(timeout_us / 1000.0 if timeout_us else None, priority)


def read_infer(spec: ModelSpec, message: InferMessage, data: Buffer) -> InferRequest:
    """Read and check the request in ``data``.

    Raises
    ------
    RefusedError
        400, with the reason.
    """
    request = message.request
    inputs = _tensors(spec, message, memoryview(data))
    urgency = read_urgency(request)
    return InferRequest(
        id=request.id or None,
        rows=check_rows(spec, inputs),
        inputs=inputs,
        outputs=_outputs(spec, request),
        timeout_ms=urgency.timeout_ms,
        priority=urgency.priority,
        batch_key=find_batch_key(spec, inputs),
    )


def read_large_call(spec: ModelSpec, data: bytes) -> InferRequest:
    """Read a request in another process. Raises `RefusedError`: 400."""
    return read_infer(spec, decode_infer(data), data)


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


def _tensors(spec: ModelSpec, message: InferMessage, data: memoryview) -> list[InputTensor]:
    """Return the inputs, in the order of the model's."""
    entries, spans = message.request.inputs, message.spans
    if spans and len(spans) != len(entries):
        raise bad_request(f"{len(entries)} inputs need as many raw contents but got {len(spans)}")
    by_position: dict[int, InputTensor] = {}
    for number, entry in enumerate(entries):
        position = spec.input_index.get(entry.name)
        if position is None or position in by_position:
            names = ", ".join(spec.input_index)
            raise bad_request(
                f"model {spec.name!r} has {'no' if position is None else 'one'} input {entry.name!r} ({names})"
            )
        _refuse_unsupported(entry)
        tensor = spec.inputs[position]
        shape = check_tensor(tensor, entry.datatype, list(entry.shape))
        if not spans:
            contents = _from_contents(tensor, entry.contents)
            check_size(tensor, shape, contents)
            by_position[position] = InputTensor(shape, contents)
            continue
        if entry.HasField("contents") and entry.contents.ListFields():
            raise bad_request(f"input {entry.name!r} has both typed and raw contents")
        span = spans[number]
        check_size(tensor, shape, data[span])
        by_position[position] = InputTensor(shape, (span.start, span.stop - span.start))
    missing = [repr(tensor.name) for position, tensor in enumerate(spec.inputs) if position not in by_position]
    if missing:
        raise bad_request(f"model {spec.name!r} needs input {', '.join(missing)}")
    return [by_position[position] for position in range(len(spec.inputs))]


def _from_contents(tensor: TensorSpec, contents: Any) -> bytes:
    if tensor.datatype not in _CONTENTS:
        raise bad_request(f"input {tensor.name!r} of type {tensor.datatype} must be sent as raw contents")
    values = list(getattr(contents, _CONTENTS[tensor.datatype]))
    return join_strings(values) if tensor.datatype == "BYTES" else to_tensor_bytes(tensor, values)


def _outputs(spec: ModelSpec, request: Any) -> list[int] | None:
    positions = []
    for entry in request.outputs:
        position = spec.output_index.get(entry.name)
        if position is None or position in positions:
            names = ", ".join(spec.output_index)
            raise bad_request(f"model {spec.name!r} has no output {entry.name!r} or it is asked for twice ({names})")
        _refuse_unsupported(entry)
        positions.append(position)
    return positions or None


def _refuse_unsupported(entry: Any) -> None:
    if entry.parameters:
        refuse_unsupported({name: _value(parameter) for name, parameter in entry.parameters.items()})


def _value(parameter: Any) -> Any:
    field = parameter.WhichOneof("parameter_choice")
    return None if field is None else getattr(parameter, field)


def _whole(parameters: dict[str, Any], name: str) -> int:
    value = parameters.get(name)
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise bad_request(f"the parameter {name!r} must be a whole number that is not negative")
    return value
