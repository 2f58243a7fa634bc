"""A worker: one process that holds one copy of a model under its share and runs the batches it is sent.

    python -m gpuprof.serving.worker NUMBER [ARENA_FD ARENA_BYTES] < KEY

The machine process starts it. It goes to the router's door by itself, where it is known by its number, is told what it
is to serve, then sent batches; it ends when the router closes the connection. Without an arena, which is shared only
within one machine, tensors travel with the messages.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any

from gpuprof.cpu_share import CpuSlice, confine
from gpuprof.errors import GpuprofError
from gpuprof.scheduling import compute_steadily
from gpuprof.serving.arena import map_arena
from gpuprof.serving.batch_io import BatchInputs, BatchOutputs, Part
from gpuprof.serving.door import DoorKey, knock
from gpuprof.serving.living_process import start_time
from gpuprof.serving.merged_io import MergedInputs, MergedOutputs
from gpuprof.serving.runtime import ModelError, Runtime, example_inputs, open_runtime
from gpuprof.serving.wire import BlockingStream, Frame, Kind


def main(arguments: list[str]) -> int:
    """Serve until the router has gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the router drains first, and closes when it has
        signal.signal(ignored, signal.SIG_IGN)
    key = DoorKey(**json.loads(sys.stdin.read()))
    arena = map_arena(int(arguments[1]), int(arguments[2])) if arguments[1:] else memoryview(b"")
    said = {"process": [os.getpid(), start_time(os.getpid())], "shares_memory": bool(arguments[1:])}
    try:
        stream = knock(key, arguments[0], said)
    except OSError:  # the router has gone meanwhile, or no longer wants this worker
        return 0
    order = stream.receive()
    if order is None:
        return 0
    with ExitStack() as held:
        try:
            runtime = _start(order.head, held)
        except GpuprofError as error:
            stream.send(Kind.REFUSED, [type(error).__name__, error.message, error.fix])
            return error.exit_code
        gc.collect()
        gc.freeze()  # what exists now stays; later collections need not look at it
        stream.send(Kind.READY, runtime.spec.to_message())
        _serve(stream, Batches(runtime, arena))
    return 0


class Batches:
    """Runs one batch after another."""

    def __init__(self, runtime: Runtime, arena: memoryview) -> None:
        self._runtime = runtime
        merged = runtime.merged
        self._inputs = MergedInputs(runtime.spec, arena, merged) if merged else BatchInputs(runtime.spec, arena)
        self._outputs = MergedOutputs(runtime.spec, arena, merged) if merged else BatchOutputs(runtime.spec, arena)

    def run(self, frame: Frame) -> tuple[Any, list[Any]]:
        """Return the head and the payload of the answer to a batch.

        The head is [batch, nanoseconds of gathering, of the model, of scattering, outputs of each request].

        Raises
        ------
        ModelError
            When the model cannot work on the inputs.
        """
        batch, requests = frame.head
        parts = [Part(*request) for request in requests]
        started = time.perf_counter_ns()
        try:
            inputs = self._inputs.gather(parts, frame.payload)
        except ValueError as error:
            raise ModelError(str(error)) from error
        wanted = self._outputs.wanted(parts)
        gathered = time.perf_counter_ns()
        outputs = self._runtime.run(inputs, wanted)
        ran = time.perf_counter_ns()
        self._check_rows(parts, wanted, outputs)
        described, payload = self._outputs.scatter(parts, wanted, outputs)
        scattered = time.perf_counter_ns()
        return [batch, gathered - started, ran - gathered, scattered - ran, described], payload

    def _check_rows(self, parts: list[Part], wanted: list[int], outputs: list[Any]) -> None:
        for position, output in zip(wanted, outputs, strict=True):
            rows = self._outputs.rows(parts, position)
            if self._runtime.spec.max_batch and output.shape[:1] != (rows,):
                raise ModelError(f"the model does not give a row of output for each of {rows} rows of input")


def _start(order: dict[str, Any], held: ExitStack) -> Runtime:
    """Take the share, load the model and run it once at each batch size that will be common."""
    if order["cores"]:
        compute_steadily()
        held.enter_context(confine(CpuSlice(tuple(order["cores"]), order["quota_cores"]), order["group"]))
    runtime = open_runtime(
        order["model"],
        order["version"],
        order["path"],
        batch=order["batch"],
        threads=order["threads"],
        provider=order["provider"],
    )
    sizes = {2**power for power in range(order["batch"].bit_length())} | {order["batch"]}
    with suppress(ModelError):  # not every model works on zeros
        for rows in sorted(sizes if runtime.spec.max_batch else {1}):
            runtime.run(example_inputs(runtime.spec, rows), range(len(runtime.spec.outputs)))
    return runtime


def _serve(stream: BlockingStream, batches: Batches) -> None:
    while (frame := stream.receive()) is not None:
        if frame.kind == Kind.PING:
            stream.send(Kind.PONG, None)
            continue
        try:
            head, payload = batches.run(frame)
        except ModelError as error:
            stream.send(Kind.FAILED, [frame.head[0], str(error)])
            continue
        try:
            stream.send(Kind.DONE, head, payload)
        except ConnectionError:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
