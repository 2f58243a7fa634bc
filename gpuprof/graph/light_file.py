"""Reads an ONNX file without the data of its large weights, which is nearly the whole file.

A Protocol Buffers message is a sequence of fields, each with its number, wire type and, for variable sizes, length. So
the data of weights can be skipped, and the remaining fields still form a valid message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

#: Field numbers in onnx.proto: of ModelProto, GraphProto and TensorProto.
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
#: Most bytes of an encoded 64-bit number.
_MOST_DIGITS = 10


@dataclass(slots=True)
class LightContent:
    """Bytes of a model without the data of large weights."""

    content: bytes = b""  #: The model, with no ``raw_data`` in large weights.
    #: Position of a weight in the main graph → bytes of omitted data.
    passed_over: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Field:
    number: int
    start: int
    body: int
    end: int


def read_light(path: Path, keep_bytes: int) -> LightContent:
    """Return a model's content without the data of main-graph weights larger than ``keep_bytes``.

    Raises `OSError` when the file cannot be read, and `ValueError` when the file is not a Protocol Buffers message;
    parsing the whole file gives the precise error.
    """
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        light = LightContent()
        parts: list[bytes] = []
        seen = 0
        for one in _fields(stream, 0, size):
            if one.number == _GRAPH:
                graph, seen = _read_graph(stream, one, keep_bytes, light, seen)
                parts.append(_write_field(_GRAPH, graph))
            else:
                parts.append(_read_range(stream, one.start, one.end))
        light.content = b"".join(parts)
    return light


def _read_graph(stream: BinaryIO, graph: _Field, keep_bytes: int, light: LightContent, seen: int) -> tuple[bytes, int]:
    """Return the bytes of a graph, and the number of weights so far; record omitted data in ``light``."""
    parts: list[bytes] = []
    copied = graph.body
    for one in _fields(stream, graph.body, graph.end):
        if one.number != _INITIALIZER:
            continue
        if one.end - one.body > keep_bytes:
            kept, raw_bytes = _read_tensor(stream, one, keep_bytes)
            if raw_bytes is not None:
                parts += [_read_range(stream, copied, one.start), _write_field(_INITIALIZER, kept)]
                copied, light.passed_over[seen] = one.end, raw_bytes
        seen += 1
    parts.append(_read_range(stream, copied, graph.end))
    return b"".join(parts), seen


def _read_tensor(stream: BinaryIO, tensor: _Field, keep_bytes: int) -> tuple[bytes, int | None]:
    """Return a weight's bytes without raw data, and the length of the data; None where the data is short or absent."""
    raw = [one for one in _fields(stream, tensor.body, tensor.end) if one.number == _RAW_DATA]
    if not raw or raw[-1].end - raw[-1].body <= keep_bytes:
        return b"", None
    edges = [tensor.body, *(edge for one in raw for edge in (one.start, one.end)), tensor.end]
    kept = b"".join(_read_range(stream, *edges[i : i + 2]) for i in range(0, len(edges), 2))
    return kept, raw[-1].end - raw[-1].body  # the last of repeated fields is valid


def _fields(stream: BinaryIO, start: int, end: int) -> Iterator[_Field]:
    """Yield the fields of a message between two positions of a file."""
    while start < end:
        stream.seek(start)
        tag, at = _read_number(stream, start)
        kind = tag & 7
        if kind == _VARINT:
            _, stop = _read_number(stream, at)
        elif kind == _BYTES:
            length, at = _read_number(stream, at)
            stop = at + length
        elif kind in _FIXED_BYTES:
            stop = at + _FIXED_BYTES[kind]
        else:
            raise ValueError(f"coding {kind} at byte {start}")
        if stop > end:
            raise ValueError(f"the field at byte {start} ends beyond its message")
        yield _Field(tag >> 3, start, at, stop)
        start = stop


def _read_number(stream: BinaryIO, at: int) -> tuple[int, int]:
    """Return the varint (seven bits per byte) at the stream's position, and the position after it."""
    number = 0
    for digit in range(_MOST_DIGITS):
        byte = stream.read(1)
        if not byte:
            raise ValueError(f"the file ends within the number at byte {at}")
        number |= (byte[0] & 0x7F) << 7 * digit
        if byte[0] < 0x80:
            return number, at + digit + 1
    raise ValueError(f"the number at byte {at} is too long")


def _read_range(stream: BinaryIO, start: int, end: int) -> bytes:
    stream.seek(start)
    content = stream.read(end - start)
    if len(content) != end - start:
        raise ValueError(f"the file ends before byte {end}")
    return content


def _write_field(number: int, body: bytes) -> bytes:
    length, digits = len(body), bytearray()
    while length >= 0x80:
        digits.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([number << 3 | _BYTES, *digits, length]) + body
