"""Raw tensors of gRPC messages, extracted and inserted in the wire format.

Protobuf would copy each tensor when it parses a message, once more when the tensor is accessed, and twice when it
serialises a message; at half a megabyte a request, copies are most of the cost of serving. Protobuf handles the rest
of a message. Source of the format: Protocol Buffers' documentation, "Encoding".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from gpuprof.serving.transport.wire import Buffer

_MAX_VARINT_BYTES = 10


#: Wire types of fields: numbers, 8 bytes, bytes with their length, 4 bytes; no message of the protocol has groups.
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def split_off_field(data: Buffer, field: int) -> tuple[bytes, list[slice]]:
    """Return a message without its values of the bytes field ``field``, and the positions of these values in it.

    Raises
    ------
    ValueError
        When ``data`` is no message.
    """
    view = memoryview(data)
    parts: list[Buffer] = []
    values = []
    position = start = 0
    field_key = field << 3 | _LENGTH
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
    if kind == _LENGTH:
        size, position = _varint(data, position)
        end = position + size
    elif kind == _VARINT:
        _, end = _varint(data, position)
    elif kind in (_FIXED64, _FIXED32):
        end = position + (8 if kind == _FIXED64 else 4)
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
    return _to_varint(field << 3 | _LENGTH)
