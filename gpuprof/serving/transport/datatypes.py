"""Data types of the Open Inference Protocol, their names in other systems, and a model's inputs and outputs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuprof.graph.served_interface import PROTOCOL_TYPES, uncarried_error

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

#: The protocol's name: bytes of an element, its code in `struct`, and the names in NumPy and in ONNX Runtime. BYTES
#: elements carry their own length; NumPy has no bfloat16, whose bits travel as unsigned 16-bit integers.
_TYPES = {
    "BOOL": (1, "?", "bool", "bool"),
    "UINT8": (1, "B", "uint8", "uint8"),
    "UINT16": (2, "H", "uint16", "uint16"),
    "UINT32": (4, "I", "uint32", "uint32"),
    "UINT64": (8, "Q", "uint64", "uint64"),
    "INT8": (1, "b", "int8", "int8"),
    "INT16": (2, "h", "int16", "int16"),
    "INT32": (4, "i", "int32", "int32"),
    "INT64": (8, "q", "int64", "int64"),
    "FP16": (2, "e", "float16", "float16"),
    "FP32": (4, "f", "float32", "float"),
    "FP64": (8, "d", "float64", "double"),
    "BF16": (2, "", "uint16", "bfloat16"),
    "BYTES": (0, "", "object", "string"),
}
ITEM_BYTES = {name: size for name, (size, *_) in _TYPES.items()}
_STRUCT_CODES = {name: code for name, (_, code, *_) in _TYPES.items()}
NUMPY_NAMES = {name: numpy for name, (_, _, numpy, _) in _TYPES.items()}
ONNX_NAMES = {name: onnx for onnx, name in PROTOCOL_TYPES.items()}
FROM_ONNX = {f"tensor({onnx})": name for name, (*_, onnx) in _TYPES.items()}
_LENGTH = struct.Struct("<I")


def datatype_of(onnx_type: str, tensor: str) -> str:
    """Return the protocol's name for an ONNX Runtime type such as ``"tensor(float)"``.

    Raises `InputError` for types missing from the protocol: sequences, maps, 8-bit floats, ….
    """
    if onnx_type not in FROM_ONNX:
        raise uncarried_error(tensor, onnx_type)
    return FROM_ONNX[onnx_type]


def split_strings(data: bytes | bytearray | memoryview, count: int) -> list[bytes]:
    """Return the ``count`` strings of a BYTES tensor: each is preceded by its length, 4 bytes, little endian.

    Raises `ValueError` when the lengths do not add up.
    """
    return [bytes(data[begin:end]) for begin, end in _find_strings(data, count)]


def check_strings(data: bytes | bytearray | memoryview, count: int) -> None:
    """Check that a BYTES tensor has ``count`` UTF-8 strings; models take no others.

    Raises `ValueError` when a string is not UTF-8, or the lengths do not add up.
    """
    for number, (begin, end) in enumerate(_find_strings(data, count)):
        try:
            str(data[begin:end], "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"has a string that is not UTF-8 (number {number})") from None


def _find_strings(data: bytes | bytearray | memoryview, count: int) -> list[tuple[int, int]]:
    """Return where the strings begin and end."""
    position, end, unpack = 0, len(data), _LENGTH.unpack_from
    spans = []
    for _ in range(count):
        if position + 4 > end:
            raise ValueError("ends within a string" if position > end else "ends before its last string")
        begin = position + 4
        position = begin + unpack(data, position)[0]
        spans.append((begin, position))
    if position != end:
        left = end - position
        raise ValueError(f"goes on for {left} bytes after its last string" if left > 0 else "ends within a string")
    return spans


def join_strings(strings: Sequence[bytes]) -> bytes:
    """Return the bytes of a BYTES tensor."""
    return b"".join(_LENGTH.pack(len(text)) + text for text in strings)


def to_bytes(values: list[Any], datatype: str) -> bytes:
    """Return JSON values, flat, as the bytes of a tensor.

    Raises `ValueError` when a value is not of the type or out of its range.
    """
    if datatype == "BYTES":
        if not all(isinstance(value, str) for value in values):
            raise ValueError("must hold strings")
        return join_strings([value.encode() for value in values])
    if datatype == "BF16":
        raise ValueError("has type BF16, which JSON cannot carry: send it as binary data")
    values = _of_kind(values, datatype)
    try:
        return struct.pack(f"<{len(values)}{_STRUCT_CODES[datatype]}", *values)
    except (OverflowError, struct.error):
        raise ValueError(f"has a value that is out of the range of {datatype}") from None


def to_json(data: bytes | bytearray | memoryview, datatype: str, count: int) -> list[Any]:
    """Return the elements of a tensor as flat JSON values; NaN and infinities become null, bad UTF-8 is replaced.

    Raises `ValueError` for BF16.
    """
    if datatype == "BYTES":
        return [text.decode(errors="replace") for text in split_strings(data, count)]
    if datatype == "BF16":
        raise ValueError("has type BF16, which JSON cannot carry: ask for binary data")
    return list(struct.unpack(f"<{count}{_STRUCT_CODES[datatype]}", data))


def parse_whole(value: object) -> int | None:
    """Return a JSON value as a whole number, else None; to JSON, 2 and 2.0 are the same."""
    if type(value) is int:
        return value
    return int(value) if type(value) is float and value.is_integer() else None


def _of_kind(values: list[Any], datatype: str) -> list[Any]:
    """Return the values in a Python type that `struct` packs as this data type."""
    kinds = set(map(type, values))
    if datatype == "BOOL":
        bool_types: set[type] = {bool, int}
        if not kinds <= bool_types or any(value not in (0, 1) for value in values):
            raise ValueError("must hold true and false")
    elif datatype.startswith(("INT", "UINT")):
        if kinds <= {int}:
            return values
        values = list(map(parse_whole, values))
        if None in values:
            raise ValueError("must hold whole numbers")
    elif not kinds <= {int, float}:
        raise ValueError("must hold numbers")
    return values


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or an output of a model."""

    name: str
    datatype: str  #: Name in the Open Inference Protocol, ``"FP32"``.
    shape: tuple[int, ...]  #: -1 where any size will do.

    def mismatch(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of ``shape`` does not fit."""
        if len(shape) != len(self.shape):
            return True
        return any(expected not in (-1, size) for expected, size in zip(self.shape, shape, strict=True))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as described by its workers."""

    name: str
    version: str
    platform: str  #: Runtime of the model, ``"onnxruntime_onnx"``.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int  #: Largest number of rows in a request; 0 when the first dimension is not a batch.
    #: ``input_index``, ``output_index``: Position by name.
    input_index: dict[str, int] = field(init=False)
    output_index: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_index", {spec.name: i for i, spec in enumerate(self.inputs)})
        object.__setattr__(self, "output_index", {spec.name: i for i, spec in enumerate(self.outputs)})

    def to_message(self) -> list[Any]:
        """Return the spec as JSON for the wire."""
        tensors = [[[t.name, t.datatype, t.shape] for t in specs] for specs in (self.inputs, self.outputs)]
        return [self.name, self.version, self.platform, *tensors, self.max_batch]

    @classmethod
    def from_message(cls, message: list[Any]) -> ModelSpec:
        """Return the specification written by `to_message`."""
        name, version, platform, *tensors, max_batch = message
        inputs, outputs = (tuple(TensorSpec(n, kind, tuple(shape)) for n, kind, shape in part) for part in tensors)
        return cls(name, version, platform, inputs, outputs, max_batch)


def is_batched(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Return whether the first dimension of every input and output is a common batch dimension of any size."""
    return bool(inputs) and all(spec.shape[:1] == (-1,) for spec in (*inputs, *outputs))
