"""The bodies of inference requests and answers: JSON, or JSON followed by binary tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import orjson

from gpuprof.serving.transport.arena import Slot
from gpuprof.serving.transport.datatypes import (
    ITEM_BYTES,
    ModelSpec,
    TensorSpec,
    check_strings,
    join_strings,
    parse_whole,
    to_bytes,
    to_json,
)
from gpuprof.serving.transport.inference import InputTensor, OutputTensor, bad_request
from gpuprof.serving.transport.wire import Buffer

#: Maximum number of strings in a tensor: a worker takes about a second to decode them, and another to encode them.
MAX_STRINGS = 1 << 20
#: Maximum number of strings checked on the event loop; more would stall it, and workers check them anyway.
_MAX_CHECKED_STRINGS = 1 << 16
_UNSUPPORTED = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "classification")


@dataclass(slots=True)  # made for every request: frozen it would take three times as long
class RequestBody:
    """The bytes of a request."""

    data: Buffer
    json_bytes: int = 0  #: Length of the JSON at its start; all of it unless binary tensors follow.
    offset: int | None = None  #: Position of ``data`` in the arena; None: outside.
    slot: Slot | None = None  #: Its memory in the arena.
    arrived: float = 0.0  #: Arrival of the request, monotonic seconds.


class Urgency(NamedTuple):
    """The fields of a request that admission control needs."""

    timeout_ms: float | None = None  #: Timeout of the request; None: the model's SLO.
    priority: int = 0  #: 0 is served first.


ANY_TIME = Urgency()


@dataclass(slots=True)  # made for many requests: frozen it would take three times as long
class InferRequest:
    """An inference request, parsed and checked: everything but the bytes of its tensors."""

    id: str | None
    rows: int
    #: Tensors in the order of the model's inputs: their bytes, or the position and size of binary data in the body.
    inputs: list[InputTensor]
    outputs: list[int] | None = None  #: Requested positions, in the order of the request; None: all.
    binary: frozenset[int] | None = None  #: Positions of outputs with binary data; None: all.
    urgency: Urgency = ANY_TIME
    batch_key: object = None  #: Requests with equal keys can share a batch: their shapes without the batch dimension.

    def find_tensors(self, body: RequestBody) -> list[InputTensor]:
        """Return the inputs with the binary tensors of this body."""
        data, offset = memoryview(body.data), body.offset
        inputs = []
        for tensor in self.inputs:
            if isinstance(tensor.data, tuple):
                start, size = tensor.data
                place = data[start : start + size] if offset is None else (offset + start, size)
                tensor = InputTensor(tensor.shape, place)
            inputs.append(tensor)
        return inputs


def read_request(spec: ModelSpec, body: RequestBody) -> InferRequest:
    """Read and check a request. Raises `RefusedError`: 400, with the reason."""
    if not body.json_bytes and len(body.data):
        return _read_raw_request(spec, body)
    head = _parse_json(memoryview(body.data)[: body.json_bytes])
    parameters = _read_object(head, "parameters")
    inputs = collect_inputs(spec, _BodyReader(body).list_tensors(head.get("inputs")))
    outputs, binary = _read_outputs(spec, head.get("outputs"), parameters)
    request_id = head.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise bad_request('"id" must be a string')
    return InferRequest(
        id=request_id or None,
        rows=check_rows(spec, inputs),
        inputs=inputs,
        outputs=outputs,
        binary=binary,
        urgency=read_urgency(parameters),
        batch_key=find_batch_key(spec, inputs),
    )


def find_batch_key(spec: ModelSpec, inputs: list[InputTensor]) -> object:
    """Return the key that requests must have in common to share a batch."""
    return None if spec.max_batch <= 1 else tuple([tuple(tensor.shape[1:]) for tensor in inputs])


def _read_raw_request(spec: ModelSpec, body: RequestBody) -> InferRequest:
    """Read a request whose body is only the tensor of the model's single input; its outputs are also binary.

    Source: Triton's binary tensor data extension, "Raw Binary Request".
    """
    if len(spec.inputs) != 1:
        raise bad_request(f"model {spec.name!r} has {len(spec.inputs)} inputs: only one can be sent without JSON")
    tensor = spec.inputs[0]
    shape = [1, *tensor.shape[1:]] if spec.max_batch else list(tensor.shape)
    data: Buffer = memoryview(body.data)
    place: Buffer | tuple[int, int] = (0, len(data))
    if tensor.datatype == "BYTES":  # a single string, without its length
        if prod(shape) not in (1, -1):
            raise bad_request(f"input {tensor.name!r} has shape {list(tensor.shape)}: one string does not fill it")
        shape = [1] * len(shape)
        place = data = join_strings([bytes(data)])
    elif -1 in shape:
        if shape.count(-1) > 1:
            raise bad_request(f"the shape {list(tensor.shape)} of input {tensor.name!r} does not follow from its size")
        row_bytes = prod(size for size in shape if size != -1) * ITEM_BYTES[tensor.datatype]
        shape[shape.index(-1)] = len(data) // row_bytes if row_bytes else 0
    check_size(tensor, shape, data)
    inputs = [InputTensor(shape, place)]
    return InferRequest(None, 1, inputs, batch_key=find_batch_key(spec, inputs))


def read_urgency(parameters: Mapping[str, Any]) -> Urgency:
    """Return the urgency of a request with these parameters. Raises `RefusedError`: 400, for malformed ones."""
    if not parameters:
        return ANY_TIME
    timeout_us = _read_count(parameters, "timeout")
    return Urgency(timeout_us / 1000.0 if timeout_us else None, _read_count(parameters, "priority"))


def read_json_urgency(text: Buffer) -> Urgency:
    """Return the urgency of a request from its JSON. Raises `RefusedError`: 400, for malformed JSON."""
    return read_urgency(_read_object(_parse_json(text), "parameters") if len(text) else {})


class SentTensor(NamedTuple):
    """A tensor as a client sends it."""

    name: object
    datatype: object
    shape: object
    parameters: Mapping[str, Any]
    #: Returns the bytes of an input of this shape, or their position in the body and size.
    read: Callable[[TensorSpec, list[int]], Buffer | tuple[int, int]]


def check_rows(spec: ModelSpec, inputs: list[InputTensor]) -> int:
    """Return the number of rows, which must be the same in all inputs.

    Raises `RefusedError`: 400, when inputs differ, or the number is 0 or exceeds the largest batch.
    """
    if not spec.max_batch:
        return 1
    rows = {tensor.shape[0] for tensor in inputs}
    if len(rows) != 1:
        raise bad_request(f"all inputs must have the same batch but got {sorted(rows)}")
    (count,) = rows
    if not 1 <= count <= spec.max_batch:
        raise bad_request(f"model {spec.name!r} takes batches of 1 to {spec.max_batch} but got {count}")
    return count


def check_tensor(tensor: TensorSpec, datatype: object, shape: object) -> list[int]:
    """Return ``shape`` after checking it, and ``datatype``, against the specification ``tensor``.

    Raises `RefusedError`: 400, when they do not match.
    """
    if datatype != tensor.datatype:
        raise bad_request(f"input {tensor.name!r} has type {tensor.datatype} but got {_shorten(datatype)}")
    if isinstance(shape, list) and len(shape) != len(tensor.shape):
        raise bad_request(f"input {tensor.name!r} has shape {list(tensor.shape)} but got {len(shape)} sizes")
    sizes = list(map(parse_whole, shape)) if isinstance(shape, list) else [None]
    dims = [size for size in sizes if size is not None and 0 <= size < sys.maxsize]
    if len(dims) != len(sizes):
        raise bad_request(
            f"the shape of input {tensor.name!r} must be a list of whole numbers from 0 to {sys.maxsize - 1}"
        )
    if tensor.mismatch(dims):
        raise bad_request(f"input {tensor.name!r} has shape {list(tensor.shape)} but got {dims}")
    if tensor.datatype == "BYTES" and prod(dims) > MAX_STRINGS:
        raise bad_request(f"input {tensor.name!r} may have {MAX_STRINGS} strings but got {prod(dims)}")
    return dims


def collect_inputs(spec: ModelSpec, tensors: Iterable[SentTensor]) -> list[InputTensor]:
    """Return the checked tensors of a request in the order of the model's inputs. Raises `RefusedError`: 400."""
    by_position: dict[int, InputTensor] = {}
    for sent in tensors:
        position = spec.input_index.get(sent.name) if isinstance(sent.name, str) else None
        if position is None:
            names = ", ".join(spec.input_index)
            raise bad_request(f"model {spec.name!r} has no input {_shorten(sent.name)} (it has {names})")
        if position in by_position:
            raise bad_request(f"input {sent.name!r} is given twice")
        refuse_unsupported(sent.parameters)
        tensor = spec.inputs[position]
        shape = check_tensor(tensor, sent.datatype, sent.shape)
        by_position[position] = InputTensor(shape, sent.read(tensor, shape))
    missing = [repr(tensor.name) for position, tensor in enumerate(spec.inputs) if position not in by_position]
    if missing:
        raise bad_request(f"model {spec.name!r} needs input {', '.join(missing)}")
    return [by_position[position] for position in range(len(spec.inputs))]


def collect_outputs(spec: ModelSpec, outputs: Iterable[tuple[object, Mapping[str, Any]]]) -> list[int]:
    """Return the positions of requested outputs, given by name and parameters. Raises `RefusedError`: 400."""
    positions: list[int] = []
    for name, parameters in outputs:
        position = spec.output_index.get(name) if isinstance(name, str) else None
        if position is None or position in positions:
            names = ", ".join(spec.output_index)
            problem = "no" if position is None else "only one"
            raise bad_request(f"model {spec.name!r} has {problem} output {_shorten(name)} (it has {names})")
        refuse_unsupported(parameters)
        positions.append(position)
    return positions


class _BodyReader:
    """Reads the tensors of a body; binary ones follow the JSON in the order of the inputs."""

    def __init__(self, body: RequestBody) -> None:
        self._data = memoryview(body.data)
        self._position = body.json_bytes

    def list_tensors(self, entries: object) -> Iterator[SentTensor]:
        """Yield the inputs listed in the request."""
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise bad_request('the request must have a list of "inputs"')
        for entry in entries:
            parameters = _read_object(entry, "parameters")
            read = partial(self._read, entry, parameters.get("binary_data_size"))
            yield SentTensor(entry.get("name"), entry.get("datatype"), entry.get("shape"), parameters, read)
        if self._position != len(self._data):
            raise bad_request(f"{len(self._data) - self._position} bytes follow the last binary tensor")

    def _read(
        self, entry: dict[str, Any], size: object, tensor: TensorSpec, shape: list[int]
    ) -> Buffer | tuple[int, int]:
        if size is None:
            return self._read_json_values(tensor, shape, entry)
        if "data" in entry:
            raise bad_request(f"input {tensor.name!r} has both data and binary data")
        start = self._position
        if type(size) is not int or size < 0 or start + size > len(self._data):
            raise bad_request(
                f"input {tensor.name!r} has binary data of {_shorten(size)} bytes, which the request does not hold"
            )
        self._position += size
        check_size(tensor, shape, self._data[start : start + size])
        return start, size

    def _read_json_values(self, tensor: TensorSpec, shape: list[int], entry: dict[str, Any]) -> bytes:
        values = entry.get("data")
        if not isinstance(values, list):
            raise bad_request(f"input {tensor.name!r} has neither data nor binary data")
        items = _flatten_values(values, tensor.name)
        if len(items) != prod(shape):
            raise bad_request(f"input {tensor.name!r} of shape {shape} needs {prod(shape)} values but got {len(items)}")
        return to_tensor_bytes(tensor, items)


def to_tensor_bytes(tensor: TensorSpec, values: list[Any]) -> bytes:
    """Return JSON values as the tensor's bytes. Raises `RefusedError`: 400, for a value of another type."""
    try:
        return to_bytes(values, tensor.datatype)
    except ValueError as error:
        raise bad_request(f"input {tensor.name!r} {error}") from None


def check_size(tensor: TensorSpec, shape: list[int], data: Buffer) -> None:
    """Check that ``data`` is a tensor of this shape. Raises `RefusedError`: 400, otherwise."""
    if tensor.datatype == "BYTES":
        count = prod(shape)
        if count > _MAX_CHECKED_STRINGS:
            return
        try:
            check_strings(data, count)
        except ValueError as error:
            raise bad_request(f"the binary data of input {tensor.name!r} {error}") from None
        return
    expected = prod(shape) * ITEM_BYTES[tensor.datatype]
    if len(data) != expected:
        raise bad_request(f"input {tensor.name!r} of shape {shape} has {expected} bytes but got {len(data)}")


def _read_outputs(
    spec: ModelSpec, entries: object, parameters: dict[str, Any]
) -> tuple[list[int] | None, frozenset[int] | None]:
    is_binary = parameters.get("binary_data_output", False) is True
    if entries is None or entries == []:
        return None, None if is_binary else frozenset()
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise bad_request('"outputs" must be a list of objects')
    wanted = [(entry.get("name"), _read_object(entry, "parameters")) for entry in entries]
    positions = collect_outputs(spec, wanted)
    binary = [parameters.get("binary_data", is_binary) is True for _, parameters in wanted]
    return positions, frozenset(position for position, flag in zip(positions, binary, strict=True) if flag)


def _parse_json(text: Buffer) -> dict[str, Any]:
    try:
        head = orjson.loads(text)
    except ValueError as error:
        raise bad_request(f"the request is not JSON: {error}") from None
    if not isinstance(head, dict):
        raise bad_request("the request must be a JSON object")
    return head


def refuse_unsupported(parameters: Mapping[str, Any]) -> None:
    """Refuse unsupported parameters that would change the answer. Raises `RefusedError`: 400."""
    for name in _UNSUPPORTED:
        if parameters.get(name):
            raise bad_request(f"the parameter {name!r} is not supported")


def _read_object(head: dict[str, Any], key: str) -> dict[str, Any]:
    value = head.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_request(f'"{key}" must be an object')
    return value


def _read_count(parameters: Mapping[str, Any], key: str) -> int:
    value = parse_whole(parameters.get(key, 0))
    if value is None or not 0 <= value <= sys.maxsize:
        raise bad_request(f"the parameter {key!r} must be a whole number from 0 to {sys.maxsize}")
    return value


def _flatten_values(values: list[Any], name: str) -> list[Any]:
    """Flatten nested lists, which must all have the same depth."""
    while values and isinstance(values[0], list):
        if not all(isinstance(value, list) for value in values):
            raise bad_request(f"the data of input {name!r} is nested unevenly")
        values = list(chain.from_iterable(values))
    return values


def _shorten(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 80 else text[:79] + "…"


def write_response(spec: ModelSpec, request: InferRequest, outputs: list[OutputTensor]) -> tuple[bytes, list[Buffer]]:
    """Return the JSON of the answer and the binary tensors that follow it.

    Raises `RefusedError`: 400, when the request wants JSON for an output that JSON cannot carry.
    """
    if request.outputs is not None:
        by_position = {output.position: output for output in outputs}
        outputs = [by_position[position] for position in request.outputs]
    entries = []
    binary: list[Buffer] = []
    for output in outputs:
        tensor = spec.outputs[output.position]
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": output.shape}
        if request.binary is None or output.position in request.binary:
            entry["parameters"] = {"binary_data_size": len(output.data)}
            binary.append(output.data)
        else:
            try:
                entry["data"] = to_json(output.data, tensor.datatype, prod(output.shape))
            except ValueError as error:
                raise bad_request(f"output {tensor.name!r} {error}") from None
        entries.append(entry)
    head: dict[str, Any] = {"model_name": spec.name, "model_version": spec.version}
    if request.id is not None:
        head["id"] = request.id
    head["outputs"] = entries
    return orjson.dumps(head), binary
