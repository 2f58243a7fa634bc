"""BatchRunner in a worker: bound to a device, and copied while others are computed. The device here is the CPU."""

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gpuprof.errors import InputError
from gpuprof.serving.transport.batch_io import INLINE, BatchInputs, BatchOutputs, Part
from gpuprof.serving.transport.datatypes import ModelSpec, TensorSpec
from gpuprof.serving.transport.wire import BlockingStream, Frame, FrameKind
from gpuprof.serving.worker.runtime import BoundRuntime, ModelError, NullRuntime, OnnxRuntime, Runtime, StagedInputs
from gpuprof.serving.worker.worker import BatchRunner, serve_one_by_one, serve_overlapped
from tests.reruns import serves_in_real_time
from tests.runtime.played_gpu import PlayedMemory, play_gpu
from tests.runtime.test_gpu_session import convolution
from tests.serving.test_models import TYPES, identity, lookup
from tests.small_models import write_model

pytestmark = serves_in_real_time

CPU = "CPUExecutionProvider"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpu(monkeypatch, lambda options: None)


def bound(path: Path, batch: int = 4) -> BoundRuntime:
    return BoundRuntime("m", "1", path, batch, 1, CPU, "cpu", PlayedMemory())


def test_bound_inputs_give_what_unbound_ones_give(tmp_path: Path) -> None:
    lookup(path := tmp_path / "m.onnx")
    plain = OnnxRuntime("m", "1", path, 4, 1, CPU)
    runtime = bound(path)
    for rows in ([0], [4, 2, 1], [3, 3, 3, 3]):
        inputs = [np.array(rows, np.int64)]
        staged = runtime.stage(inputs)
        assert staged.batch is not None
        (expected,), (actual,) = plain.run(inputs, [0]), runtime.run_staged(staged, [0])
        assert actual.dtype == expected.dtype and actual.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["BYTES", "BF16"])
def test_what_cannot_be_bound_is_run_as_it_is(tmp_path: Path, kind: str) -> None:
    identity(path := tmp_path / "m.onnx", {kind: TYPES[kind]})
    runtime = bound(path)
    array: Any = np.array([["a", "é"]], object) if kind == "BYTES" else np.array([[16256, 0]], np.uint16)
    staged = runtime.stage([array])
    assert staged.batch is None
    assert runtime.run_staged(staged, [0])[0].tolist() == array.tolist()


def test_a_request_alone_in_its_batch_gets_as_many_rows_as_the_model_finds(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["where"]), helper.make_node("Transpose", ["where"], ["y"])]
    path = write_model(
        tmp_path / "m.onnx", nodes, {"x": ["batch", 4]}, {"y": ["found", 2]}, types={"y": TensorProto.INT64}
    )
    runtime = OnnxRuntime("m", "1", path, 1, 1, CPU)
    batches = BatchRunner(runtime, memoryview(bytearray(64)))
    data = np.array([[0, 1, 1, 1]], np.float32).tobytes()
    begun = batches.begin(Frame(FrameKind.RUN, [1, [[1, [[[1, 4], INLINE, len(data)]], None, None]]], memoryview(data)))
    head, _ = batches.finish(begun)
    assert head[-1][0][0][1] == [3, 2]


def test_a_batch_that_is_not_the_first_dimension_is_no_batch_of_requests(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": ["steps", "batch", 4]}, {"y": None}
    )
    assert OnnxRuntime("m", "1", path, 1, 1, CPU).spec.max_batch == 0
    with pytest.raises(InputError, match="batches of 4: the first dimension alone of its input x must be the batch"):
        OnnxRuntime("m", "1", path, 4, 1, CPU)


def test_errors_of_the_model_are_the_requests_own(tmp_path: Path) -> None:
    lookup(path := tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="out of"):
        bound(path).run([np.array([99], np.int64)], [0])


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_partial_batches_of_convolutions_are_filled_up_and_the_fill_is_dropped(tmp_path: Path, rows: int) -> None:
    runtime = bound(convolution(tmp_path / "m.onnx"))
    batch = np.random.default_rng(rows).standard_normal((rows, 2, 5, 5)).astype(np.float32)
    staged = runtime.stage([batch])
    assert staged.batch is not None and len(staged.batch.feeds["x"]) == {1: 1, 3: 4, 4: 4}[rows]
    (output,) = runtime.run_staged(staged, [0])
    (expected,) = OnnxRuntime("m", "1", tmp_path / "m.onnx", 4, 1, CPU).run([batch], [0])
    assert output.shape == (rows, 3, 1, 1)
    np.testing.assert_allclose(output, expected, rtol=1e-5)


class SlowRuntime(BoundRuntime):
    """A model that computes only after the next batch has been copied."""

    def __init__(self) -> None:
        self.spec = NullRuntime("m", "1", 4, 1).spec
        self.placeholders = {}
        self.next_is_copied = threading.Semaphore(0)
        self.copied = 0

    def stage(self, inputs: Sequence[Any]) -> StagedInputs:
        self.copied += 1
        if self.copied > 1:
            self.next_is_copied.release()
        return StagedInputs(None, inputs)

    def run_staged(self, staged: StagedInputs, wanted: Sequence[int]) -> list[Any]:
        assert self.next_is_copied.acquire(timeout=20.0), "the next batch was not copied while this one was computed"
        value = float(staged.inputs[0][0, 0])
        if value == 2.0:
            raise ModelError("two")
        return [np.array(staged.inputs[0])]


def answers(runtime: Runtime, how: Any, values: list[float]) -> list[tuple[int, Any]]:
    """Send batches of one value each, a ping after the first, and return the answers."""
    ours, theirs = socket.socketpair()
    computing = ThreadPoolExecutor(1)
    arguments: list[Any] = [BlockingStream(theirs), BatchRunner(runtime, memoryview(b""))]
    arguments += [computing] if how is serve_overlapped else []
    worker = threading.Thread(target=how, args=arguments)
    worker.start()
    router = BlockingStream(ours)
    for number, value in enumerate(values):
        data = np.float32(value).tobytes()
        router.send(FrameKind.RUN, [number, [[1, [[[1, 1], INLINE, 4]], None, None]]], [data])
        if not number:
            router.send(FrameKind.PING, None)
    answered = []
    for _ in range(len(values) + 1):
        frame = router.receive()
        assert frame is not None
        if frame.kind == FrameKind.DONE:
            answered.append((frame.kind, (frame.head[0], float(np.frombuffer(frame.payload, np.float32)[0]))))
        else:
            answered.append((frame.kind, frame.head))
    ours.close()
    worker.join(20.0)
    assert not worker.is_alive()
    computing.shutdown()
    theirs.close()
    return answered


def test_the_next_batch_is_copied_while_one_is_computed_and_answers_keep_their_order() -> None:
    runtime = SlowRuntime()
    runtime.next_is_copied.release()  # the ping comes between the first and the second
    assert answers(runtime, serve_overlapped, [1.0, 2.0, 3.0]) == [
        (FrameKind.DONE, (0, 1.0)),
        (FrameKind.PONG, None),
        (FrameKind.FAILED, [1, "two"]),
        (FrameKind.DONE, (2, 3.0)),
    ]


def test_both_ways_of_serving_answer_the_same() -> None:
    values = [float(number) for number in range(20)]
    plain, overlapped = (
        answers(NullRuntime("m", "1", 4, 1), how, values) for how in (serve_one_by_one, serve_overlapped)
    )
    assert plain == overlapped


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
