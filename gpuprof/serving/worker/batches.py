"""Runs batches in a worker: in sequence, or with the inputs of the next batch copied during the current batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuprof.serving.transport.batch_io import BatchInputs, BatchOutputs, Part
from gpuprof.serving.transport.wire import BlockingStream, Frame, FrameKind
from gpuprof.serving.worker.runtime import BoundRuntime, ModelError, Runtime, StagedInputs

if TYPE_CHECKING:
    from gpuprof.serving.transport.datatypes import Array


@dataclass(slots=True)  # made for every request: frozen it would take three times as long
class GatheredBatch:
    """A batch with gathered inputs."""

    number: int
    parts: list[Part]
    inputs: Sequence[Array] | StagedInputs
    wanted: list[int]
    gather_ns: int  #: Time of gathering, with the copy to the device.


class BatchRunner:
    """Runs batches.

    ``arena``: shared with the router; ``computing``: runs the batches of all models of the worker one at a time; None:
    the calling thread runs them.
    """

    def __init__(self, runtime: Runtime, arena: memoryview, computing: Executor | None = None) -> None:
        self._runtime = runtime
        self._computing = computing
        self._inputs = BatchInputs(runtime.spec, arena)
        self._outputs = BatchOutputs(runtime.spec, arena)

    def begin(self, frame: Frame) -> GatheredBatch:
        """Gather the inputs of a batch, and copy them to the device if there is one.

        Raises `ModelError` when the inputs cannot be gathered or copied.
        """
        number, requests = frame.head
        parts = [Part(*request) for request in requests]
        started = time.perf_counter_ns()
        try:
            inputs = self._inputs.gather(parts, frame.payload)
        except ValueError as error:
            raise ModelError(str(error)) from error
        if self._runtime.placeholders:
            inputs = [
                array if len(array) else self._runtime.placeholders.get(position, array)
                for position, array in enumerate(inputs)
            ]
        staged = self._runtime.stage(inputs) if isinstance(self._runtime, BoundRuntime) else inputs
        positions = self._outputs.select_outputs(parts)
        return GatheredBatch(number, parts, staged, positions, time.perf_counter_ns() - started)

    def finish(self, batch: GatheredBatch) -> tuple[Any, list[Any]]:
        """Run the model and return the head and the payload of the answer.

        The head is [batch, nanoseconds of gathering, of the model, of scattering, outputs of each request]. Raises
        `ModelError` when the model cannot work on the inputs.
        """
        outputs, run_ns = self._computing.submit(self._run, batch).result() if self._computing else self._run(batch)
        run_end = time.perf_counter_ns()
        self._check_rows(batch, outputs)
        descriptions, payload = self._outputs.scatter(batch.parts, batch.wanted, outputs)
        return [batch.number, batch.gather_ns, run_ns, time.perf_counter_ns() - run_end, descriptions], payload

    def _run(self, batch: GatheredBatch) -> tuple[list[Array], int]:
        """Return the outputs of the model, and the nanoseconds that it took."""
        begin = time.perf_counter_ns()
        if isinstance(batch.inputs, StagedInputs):
            assert isinstance(self._runtime, BoundRuntime)
            outputs = self._runtime.run_staged(batch.inputs, batch.wanted)
        else:
            outputs = self._runtime.run(batch.inputs, batch.wanted)
        return outputs, time.perf_counter_ns() - begin

    def _check_rows(self, batch: GatheredBatch, outputs: list[Any]) -> None:
        # A request that shares no batch gets all rows of the model's outputs, such as a variable number of boxes.
        if self._runtime.spec.max_batch <= 1:
            return
        for position, output in zip(batch.wanted, outputs, strict=True):
            rows = sum([part.rows_of_output(position) for part in batch.parts])
            if output.shape[:1] != (rows,):
                raise ModelError(f"the model does not give a row of output for each of {rows} rows of input")


def serve_one_by_one(stream: BlockingStream, batches: BatchRunner) -> None:
    """Answer batches in sequence until the router has gone."""
    while (frame := stream.receive()) is not None:
        if frame.kind == FrameKind.PING:
            stream.send(FrameKind.PONG, None)
            continue
        try:
            head, payload = batches.finish(batches.begin(frame))
        except ModelError as error:
            stream.send(FrameKind.FAILED, [frame.head[0], str(error)])
            continue
        try:
            stream.send(FrameKind.DONE, head, payload)
        except ConnectionError:
            return


def serve_overlapped(stream: BlockingStream, batches: BatchRunner, computing: Executor) -> None:
    """Answer batches in order until the router has gone; inputs of the next are copied during the current batch.

    This thread receives and copies; ``computing``, of a single thread, computes and answers. The router sends a batch
    in advance, so that there is a next batch under sufficient load.
    """
    last: Future[None] | None = None
    while (frame := stream.receive()) is not None:
        batch: GatheredBatch | ModelError | None
        try:
            batch = None if frame.kind == FrameKind.PING else batches.begin(frame)
        except ModelError as error:
            batch = error
        if last is not None:
            last.result()  # at most one staged batch ahead: there are two buffers
        number = None if frame.kind == FrameKind.PING else frame.head[0]
        last = computing.submit(_answer, stream, batches, number, batch)


def _answer(
    stream: BlockingStream, batches: BatchRunner, number: int | None, batch: GatheredBatch | ModelError | None
) -> None:
    with suppress(ConnectionError):  # the receiving thread notices the loss of the router
        if batch is None:
            stream.send(FrameKind.PONG, None)
            return
        try:
            if isinstance(batch, ModelError):
                raise batch
            head, payload = batches.finish(batch)
        except ModelError as error:
            stream.send(FrameKind.FAILED, [number, str(error)])
        else:
            stream.send(FrameKind.DONE, head, payload)
