"""Gathers the requests of a batch into the model's inputs, and scatters its outputs to the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuprof.serving.transport.arena import ALIGNMENT
from gpuprof.serving.transport.datatypes import ITEM_BYTES, NUMPY_NAMES, ModelSpec, join_strings, split_strings
from gpuprof.serving.transport.wire import Buffer

if TYPE_CHECKING:
    from gpuprof.serving.transport.datatypes import Array

#: Outputs of a request up to this size travel in the message; larger ones through the arena.
INLINE_BYTES = 1 << 15
INLINE = -1


@dataclass(slots=True)  # made for every request: frozen it would take three times as long
class Part:
    """A request of a batch, as described by the router."""

    rows: int
    #: [shape, offset, bytes]: offset in the arena, `INLINE` where the bytes follow in the message, in order.
    inputs: list[tuple[list[int], int, int]]
    slot: tuple[int, int] | None  #: Memory for large outputs.
    wanted: list[int] | None  #: Positions of the requested outputs; None: all.

    def rows_of_output(self, position: int) -> int:
        """Return the request's rows in an output; a request for some members has rows only in its requested outputs."""
        if self.wanted is None or position in self.wanted or all(shape[:1] != [0] for shape, _, _ in self.inputs):
            return self.rows
        return 0


class BatchInputs:
    """Reads the tensors of a batch out of the arena and the message."""

    def __init__(self, spec: ModelSpec, arena: memoryview) -> None:
        self._spec = spec
        self._arena = arena

    def gather(self, parts: Sequence[Part], payload: memoryview) -> list[Array]:
        """Return the model's inputs; inputs of a single request are views, several requests are copied together."""
        requests: list[list[Array]] = []
        position = 0
        for part in parts:
            arrays = []
            for tensor, (shape, offset, size) in zip(self._spec.inputs, part.inputs, strict=True):
                if offset == INLINE:
                    data = payload[position : position + size]
                    position += size
                else:
                    data = self._arena[offset : offset + size]
                arrays.append(_array(data, tensor.datatype, shape))
            requests.append(arrays)
        if len(requests) == 1:
            return requests[0]
        return [np.concatenate(column) for column in zip(*requests, strict=True)]


@cache
def _numpy_type(datatype: str) -> Any:
    """Return the numpy type as an object, because a lookup by name takes longer than creating the array."""
    return np.dtype(NUMPY_NAMES[datatype])


def _array(data: memoryview, datatype: str, shape: list[int]) -> Array:
    if datatype == "BYTES":
        texts = [text.decode() for text in split_strings(data, prod(shape))]
        return np.array(texts, dtype=object).reshape(shape)
    array: Array = np.frombuffer(data, _numpy_type(datatype)).reshape(shape)
    return array if array.flags.aligned else array.copy()


class BatchOutputs:
    """Writes the outputs of a batch, request by request, into the arena or the message."""

    def __init__(self, spec: ModelSpec, arena: memoryview) -> None:
        self._spec = spec
        self._arena = arena

    def select_outputs(self, parts: Sequence[Part]) -> list[int]:
        """Return the positions of the outputs requested anywhere in the batch, in order."""
        positions = range(len(self._spec.outputs))
        if None in [part.wanted for part in parts]:
            return list(positions)
        requested = {position for part in parts for position in part.wanted or ()}
        return [position for position in positions if position in requested]

    def scatter(
        self, parts: Sequence[Part], positions: Sequence[int], outputs: Sequence[Array]
    ) -> tuple[list[Any], list[Buffer]]:
        """Return, for each request, a list of [position, shape, offset, bytes], and the inline bytes."""
        descriptions: list[Any] = []
        payload: list[Buffer] = []
        offsets = [0] * len(positions)
        for part in parts:
            pieces = []
            for number, (position, output) in enumerate(zip(positions, outputs, strict=True)):
                row = offsets[number]
                offsets[number] += part.rows_of_output(position)
                if part.wanted is None or position in part.wanted:
                    piece = output if len(parts) == 1 else output[row : row + part.rows]
                    pieces.append((position, list(piece.shape), self._bytes(piece, position)))
            descriptions.append(self._write(pieces, part.slot, payload))
        return descriptions, payload

    def _bytes(self, piece: Array, position: int) -> Buffer:
        if self._spec.outputs[position].datatype == "BYTES":
            return join_strings([str(text).encode(errors="surrogateescape") for text in piece.ravel()])
        if piece.nbytes <= INLINE_BYTES:  # a copy is cheaper than views
            return piece.tobytes()
        return np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data

    def _write(
        self, pieces: list[tuple[int, list[int], Buffer]], slot: tuple[int, int] | None, payload: list[Buffer]
    ) -> list[tuple[int, list[int], int, int]]:
        if slot is None or sum([_align_size(len(data)) for _, _, data in pieces]) > slot[1]:
            payload += [data for _, _, data in pieces]
            return [(position, shape, INLINE, len(data)) for position, shape, data in pieces]
        descriptions = []
        offset = slot[0]
        for position, shape, data in pieces:
            self._arena[offset : offset + len(data)] = data
            descriptions.append((position, shape, offset, len(data)))
            offset += _align_size(len(data))
        return descriptions


def count_output_bytes(spec: ModelSpec, rows: int) -> int | None:
    """Return the bytes in the arena for the outputs of a request of ``rows``, None where shapes leave the size open."""
    total = 0
    for tensor in spec.outputs:
        if tensor.datatype == "BYTES" or -1 in tensor.shape[1:]:
            return None
        shape = (rows, *tensor.shape[1:]) if spec.max_batch else tensor.shape
        if -1 in shape:
            return None
        total += _align_size(prod(shape) * ITEM_BYTES[tensor.datatype])
    return total


def _align_size(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
