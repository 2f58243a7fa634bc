from __future__ import annotations

import numpy as np
import pytest

from gpuprof.graph.merged_model import MergedMember, MergedModel, MergedValue
from gpuprof.serving.transport.batch_io import INLINE, Part
from gpuprof.serving.transport.metadata import ModelSpec, TensorSpec
from gpuprof.serving.worker.merged_io import MergedInputs, MergedOutputs

NO_ARENA = memoryview(b"")


def _member(name: str, width: int, absent_rows: int = 0) -> MergedMember:
    value = MergedValue("x", f"{name}/x", "float32", (None, width))
    return MergedMember(
        name, "", "", (value,), (MergedValue("y", f"{name}/y", "float32", (None, width)),), None, absent_rows
    )


MERGED = MergedModel((_member("a", 2), _member("b", 1, absent_rows=1)))
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


def _payload(*values: float) -> memoryview:
    return memoryview(np.array(values, np.float32).tobytes())


def test_each_model_gets_the_rows_of_its_own_requests_in_their_order() -> None:
    parts = [_part(0, 1), _part(1, 2), _part(0, 1)]
    arrays = MergedInputs(SPEC, NO_ARENA, MERGED).gather(parts, _payload(1, 2, 30, 40, 5, 6))
    assert arrays[0].tolist() == [[1, 2], [5, 6]]
    assert arrays[1].tolist() == [[30], [40]]


@pytest.mark.parametrize(("present", "rows"), [(0, 1), (1, 0)])
def test_a_model_without_requests_gets_what_stands_for_nothing(present: int, rows: int) -> None:
    arrays = MergedInputs(SPEC, NO_ARENA, MERGED).gather([_part(present, 1)], _payload(*[1.0] * (2 - present)))
    assert len(arrays[1 - present]) == rows
    assert not arrays[1 - present].any()


def test_outputs_go_back_to_the_requests_that_they_are_of() -> None:
    outputs = MergedOutputs(SPEC, NO_ARENA, MERGED)
    parts = [_part(0, 1), _part(1, 2), _part(0, 1), _part(1, 1)]
    assert outputs.find_row_offsets(parts) == [0, 0, 1, 2]
    assert [outputs.rows(parts, position) for position in (0, 1)] == [2, 3]
    values = [np.array([[1, 2], [3, 4]], np.float32), np.array([[10], [20], [30]], np.float32)]
    described, payload = outputs.scatter(parts, [0, 1], values)
    assert [[(position, shape) for position, shape, *_ in own] for own in described] == [
        [(0, [1, 2])],
        [(1, [2, 1])],
        [(0, [1, 2])],
        [(1, [1, 1])],
    ]
    assert [np.frombuffer(data, np.float32).tolist() for data in payload] == [[1, 2], [10, 20], [3, 4], [30]]
