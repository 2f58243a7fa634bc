"""A worker: a process that holds a copy of a model under its share and runs batches.

python -m gpuprof.serving.worker.worker NUMBER [ARENA_FD ARENA_BYTES] < KEY

The machine process starts it. The worker connects to the router's rendezvous
with its number, receives the order of its model, then batches; it ends when the router closes the connection. Without
an arena, which is shared only within a machine, tensors travel with the messages.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from gpuprof.errors import GpuprofError
from gpuprof.machine.cpu_share import confine_to_share
from gpuprof.rules.cpu_slices import CpuSlice
from gpuprof.runtime.providers import ORT_CUDA
from gpuprof.serving.transport.arena import map_arena
from gpuprof.serving.transport.rendezvous import RendezvousKey, join_rendezvous
from gpuprof.serving.transport.wire import BlockingStream, FrameKind
from gpuprof.serving.watch.living_process import start_time
from gpuprof.serving.worker.batches import BatchRunner, serve_one_by_one, serve_overlapped
from gpuprof.serving.worker.bound_runtime import BoundRuntime
from gpuprof.serving.worker.model_file import check_model_file
from gpuprof.serving.worker.runtime import (
    NULL_PREFIX,
    ModelError,
    NullRuntime,
    OnnxRuntime,
    Runtime,
    example_inputs,
    null_bytes,
)
from gpuprof.serving.worker.turn import open_turns


def main(arguments: list[str]) -> int:
    """Serve until the router has gone."""
    key = RendezvousKey(**json.loads(sys.stdin.read()))
    arena = map_arena(int(arguments[1]), int(arguments[2])) if arguments[1:] else None
    return run_worker(arguments[0], key, arena)


def run_worker(number: str, key: RendezvousKey, arena: memoryview | None) -> int:
    """Serve until the router has gone; return the exit code of the process.

    Parameters
    ----------
    number : str
        The worker's number in the router.
    arena : memoryview or None
        Shared with the router; None: tensors travel with the messages.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the router drains first, and then closes the connection
        signal.signal(ignored, signal.SIG_IGN)
    identity = {"process": [os.getpid(), start_time(os.getpid())], "shares_memory": arena is not None}
    try:
        stream = join_rendezvous(key, number, identity)
    except OSError:  # the router has gone meanwhile, or no longer wants this worker
        return 0
    try:
        order = stream.receive()
        return 0 if order is None else _serve_batches(stream, order.head, arena)
    except ConnectionError:  # the router has gone, perhaps while the model was loaded
        return 0


def _serve_batches(stream: BlockingStream, order: dict[str, Any], arena: memoryview | None) -> int:
    """Load the model, report it, and run batches; return the exit code of the process."""
    with ExitStack() as stack:
        # ONNX Runtime keeps CUDA graphs for each thread: the same one loads the model, warms it up and runs batches.
        computing = stack.enter_context(ThreadPoolExecutor(1))
        is_on_gpu = order["provider"] == ORT_CUDA
        try:
            runtime = computing.submit(_start, order, stack).result() if is_on_gpu else _start(order, stack)
            turn = stack.enter_context(open_turns(order["turns"])) if order["turns"] else None
        except GpuprofError as error:
            stream.send(FrameKind.REFUSED, [type(error).__name__, error.message, error.fix])
            return error.exit_code
        gc.collect()
        gc.freeze()  # existing objects stay; later collections skip them
        stream.send(FrameKind.READY, runtime.spec.to_message())
        batches = BatchRunner(runtime, memoryview(b"") if arena is None else arena, turn)
        if is_on_gpu:
            serve_overlapped(stream, batches, computing)
        else:
            serve_one_by_one(stream, batches)
    return 0


def _start(order: dict[str, Any], stack: ExitStack) -> Runtime:
    """Limit the process to its share, load the model and run it once at each batch size of `warm_sizes`."""
    if order["cores"]:
        stack.enter_context(confine_to_share(CpuSlice(tuple(order["cores"]), order["quota_cores"]), order["group"]))
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
    with suppress(ModelError):  # not every model works on zeros
        for rows in _list_warm_sizes(runtime, order["batch"]):
            runtime.run(example_inputs(runtime.spec, rows), range(len(runtime.spec.outputs)))
    return runtime


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
