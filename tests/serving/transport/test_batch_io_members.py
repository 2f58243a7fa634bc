"""Batches of a merged model: each of its members has its own rows in them, or none."""

from __future__ import annotations

import numpy as np

from gpuprof.serving.transport.batch_io import INLINE, BatchInputs, BatchOutputs, Part
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec

NO_ARENA = memoryview(b"")
SPEC = ModelSpec(
    "ab",
    "1",
    "test",
    (TensorSpec("a/x", "FP32", (-1, 2)), TensorSpec("b/x", "FP32", (-1, 1))),
    (TensorSpec("a/y", "FP32", (-1, 2)), TensorSpec("b/y", "FP32", (-1, 1))),
    8,
)


def _part(model: int, rows: int) -> Part:
    shapes = [[rows if m == model else 0, width] for m, width in enumerate((2, 1))]
    inputs = [(shape, INLINE, 4 * shape[0] * shape[1]) for shape in shapes]
    return Part(rows, inputs, None, [model])


def test_each_member_gets_the_rows_of_its_own_requests_in_their_order() -> None:
    payload = memoryview(np.array([1, 2, 30, 40, 5, 6], np.float32).tobytes())
    arrays = BatchInputs(SPEC, NO_ARENA).gather([_part(0, 1), _part(1, 2), _part(0, 1)], payload)
    assert arrays[0].tolist() == [[1, 2], [5, 6]]
    assert arrays[1].tolist() == [[30], [40]]


def test_outputs_go_back_to_the_requests_that_they_are_of() -> None:
    parts = [_part(0, 1), _part(1, 2), _part(0, 1), _part(1, 1)]
    outputs = [np.arange(4, dtype=np.float32).reshape(2, 2), np.arange(30, 33, dtype=np.float32).reshape(3, 1)]
    described, payload = BatchOutputs(SPEC, NO_ARENA).scatter(parts, [0, 1], outputs)
    assert [[(position, shape) for position, shape, *_ in members] for members in described] == [
        [(0, [1, 2])],
        [(1, [2, 1])],
        [(0, [1, 2])],
        [(1, [1, 1])],
    ]
    assert [np.frombuffer(data, np.float32).tolist() for data in payload] == [[0, 1], [30, 31], [2, 3], [32]]
