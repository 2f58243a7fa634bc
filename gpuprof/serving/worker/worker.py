"""A worker: a process that holds a model, or several, under its share and runs batches.

python -m gpuprof.serving.worker.worker ARENA_FD ARENA_BYTES NUMBER... < KEY

The machine process starts it. For each of its numbers the worker connects to the router's rendezvous and receives the
order of a model, then batches; the model ends when the router closes the connection, and the worker with its last
model. Models run one batch at a time, in the order of their batches' arrival. Without an arena (descriptor -1), which
is shared only within a machine, tensors travel with the messages.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from gpuprof.domain.file_access import refuse_pipe
from gpuprof.errors import GpuprofError, InputError
from gpuprof.machine.cgroup import confine_to_share
from gpuprof.rules.cpu_slices import CpuSlice
from gpuprof.runtime.providers import ORT_CUDA
from gpuprof.serving.transport.arena import map_arena
from gpuprof.serving.transport.batch_io import BatchInputs, BatchOutputs, Part
from gpuprof.serving.transport.rendezvous import RendezvousKey, join_rendezvous
from gpuprof.serving.transport.wire import BlockingStream, Frame, FrameKind
from gpuprof.serving.watch.supervised_process import FIRST_DELAY_S, MAX_DELAY_S, start_time
from gpuprof.serving.worker.runtime import (
    NULL_PREFIX,
    BoundRuntime,
    ModelError,
    NullRuntime,
    OnnxRuntime,
    Runtime,
    StagedInputs,
    null_bytes,
    varied_inputs,
)

if TYPE_CHECKING:
    from gpuprof.serving.transport.datatypes import Array


def main(arguments: list[str]) -> int:
    """Serve until the router has gone."""
    key = RendezvousKey(**json.loads(sys.stdin.read()))
    descriptor, size, *numbers = arguments
    return run_worker(numbers, key, None if int(descriptor) < 0 else map_arena(int(descriptor), int(size)))


def run_worker(numbers: Sequence[str], key: RendezvousKey, arena: memoryview | None) -> int:
    """Serve until the router has gone; return the exit code of the process.

    ``numbers``: the models' numbers in the router; ``arena``: shared with the router; None: tensors travel with the
    messages.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the router drains first, and then closes the connection
        signal.signal(ignored, signal.SIG_IGN)
    identity = {"process": [os.getpid(), start_time(os.getpid())], "shares_memory": arena is not None}
    try:
        streams = [join_rendezvous(key, number, identity) for number in numbers]
        # The router may have gone meanwhile, or no longer want a model.
        sessions = [(stream, frame.head) for stream in streams if (frame := stream.receive()) is not None]
        return _serve_models(sessions, arena) if sessions else 0
    except OSError:  # the router has gone, perhaps while the model was loaded
        return 0


def _serve_models(sessions: Sequence[tuple[BlockingStream, dict[str, Any]]], arena: memoryview | None) -> int:
    """Confine the process to its share and serve its models; return the exit code of the process."""
    with ExitStack() as stack:
        stream, order = sessions[0]
        try:
            if order["cores"]:
                part = CpuSlice(tuple(order["cores"]), order["quota_cores"])
                stack.enter_context(confine_to_share(part, order["group"]))
        except GpuprofError as error:
            for stream, _ in sessions:
                _refuse(stream, error)
            return error.exit_code
        memory = memoryview(b"") if arena is None else arena
        # ONNX Runtime keeps CUDA graphs for each thread: the same thread loads all models, warms them up and runs their
        # batches, in the order of their arrival.
        computing = stack.enter_context(ThreadPoolExecutor(1))
        if len(sessions) == 1:
            return _serve_batches(stream, order, memory, computing, is_alone=True)
        codes: SimpleQueue[int] = SimpleQueue()

        def serve(stream: BlockingStream, order: dict[str, Any]) -> None:
            code = 1  # of an unexpected exception, which ends the worker
            try:
                code = _serve_batches(stream, order, memory, computing, is_alone=False)
            except OSError:
                code = 0
            finally:
                codes.put(code)

        for session in sessions:
            threading.Thread(target=serve, args=session, daemon=True).start()
        return next((code for _ in sessions if (code := codes.get())), 0)


def _serve_batches(
    stream: BlockingStream, order: dict[str, Any], arena: memoryview, computing: Executor, *, is_alone: bool
) -> int:
    """Load a model, report it, and run batches until the router has gone; return the exit code for the process.

    ``is_alone``: the worker has no other models; else a model that cannot be loaded is tried again, since they go on.
    """
    delay_s = FIRST_DELAY_S
    while True:
        try:
            runtime = computing.submit(_load, order).result()
            break
        except GpuprofError as error:
            _refuse(stream, error)
            if is_alone:
                return error.exit_code
            if stream.ends_within(delay_s):
                return 0
            delay_s = min(2.0 * delay_s, MAX_DELAY_S)
    gc.collect()
    gc.freeze()  # existing objects stay; later collections skip them
    stream.send(FrameKind.READY, runtime.spec.to_message())
    if order["provider"] == ORT_CUDA:
        serve_overlapped(stream, BatchRunner(runtime, arena), computing)
    else:
        serve_one_by_one(stream, BatchRunner(runtime, arena, None if is_alone else computing))
    return 0


def _refuse(stream: BlockingStream, error: GpuprofError) -> None:
    stream.send(FrameKind.REFUSED, [type(error).__name__, error.message, error.fix])


def _load(order: dict[str, Any]) -> Runtime:
    """Load the model and run it once at each batch size of `warm_sizes`."""
    if not order["path"].startswith(NULL_PREFIX):
        check_model_file(Path(order["path"]), order["sha256"])
    runtime = open_runtime(
        order["model"],
        order["version"],
        order["path"],
        batch=order["batch"],
        threads=order["threads"],
        provider=order["provider"],
    )
    spec = runtime.spec
    with suppress(ModelError):  # not every model works on random inputs
        for rows in _list_warm_sizes(runtime, order["batch"]):
            inputs = varied_inputs(spec.inputs, rows if spec.max_batch else None, seed=0)
            runtime.run(inputs, range(len(spec.outputs)))
    return runtime


def check_model_file(path: Path, planned_sha256: str) -> None:
    """Check that a file, with its external data, is the file that was profiled and placed.

    ``planned_sha256``: from the map; empty: unknown. Raises `InputError` for another file: the predicted times and
    memory do not hold for it.
    """
    if not planned_sha256:
        return
    try:
        with refuse_pipe(path).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    if sha256 != planned_sha256 and _sha256_with_data(path) != planned_sha256:
        raise InputError(
            f"{path} is not the file that the map was planned with: its sha256 is {sha256[:12]}… but the map has "
            f"{planned_sha256[:12]}…",
            "profile and place it anew; or serve it as it is with --allow-changed",
        )


def _sha256_with_data(path: Path) -> str:
    """Return the hash of a file with its external data, which needs the package onnx."""
    from gpuprof.graph.file import read_onnx

    try:
        return read_onnx(path).sha256
    except InputError:  # a damaged file differs in any case
        return ""


def _list_warm_sizes(runtime: Runtime, batch: int) -> tuple[int, ...]:
    """Return the batch sizes at which a model runs before it is served, ascending.

    On a CPU these are the powers of two, which are common. On a GPU they are all sizes that are run: the first run of
    each size chooses algorithms, plans, allocates and captures a graph, which takes many times the batch time and would
    delay requests.
    """
    if not runtime.spec.max_batch:
        return (1,)
    if isinstance(runtime, BoundRuntime):
        return runtime.list_sizes(batch)
    return tuple(sorted({2**power for power in range(batch.bit_length())} | {batch}))


def open_runtime(name: str, version: str, path: str, *, batch: int, threads: int, provider: str) -> Runtime:
    """Load the model at ``path``: an ONNX file, or ``null:SIZE``.

    Raises `InputError` when the model cannot be loaded, or cannot take batches of ``batch``.
    """
    if path.startswith(NULL_PREFIX):
        return NullRuntime(name, version, null_bytes(path), batch)
    if provider == ORT_CUDA:
        return BoundRuntime(name, version, Path(path), batch, threads, provider)
    return OnnxRuntime(name, version, Path(path), batch, threads, provider)


#: Looking up a member of an enumeration takes 0.3 µs in Python 3.11, and each batch needs both.
_PING, _DONE = FrameKind.PING, FrameKind.DONE


@dataclass(slots=True)  # made for every request: frozen it would take three times as long
class GatheredBatch:
    """A batch whose inputs have been gathered."""

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
        if frame.kind == _PING:
            stream.send(FrameKind.PONG, None)
            continue
        try:
            head, payload = batches.finish(batches.begin(frame))
        except ModelError as error:
            stream.send(FrameKind.FAILED, [frame.head[0], str(error)])
            continue
        try:
            stream.send(_DONE, head, payload)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
