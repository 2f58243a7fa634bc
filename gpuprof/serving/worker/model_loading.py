"""Loads the model that a worker is told to run, in the runtime that fits it."""

from __future__ import annotations

from pathlib import Path

from gpuprof.runtime.providers import ORT_CUDA
from gpuprof.serving.worker.bound_runtime import BoundRuntime
from gpuprof.serving.worker.runtime import NULL_PREFIX, NullRuntime, OnnxRuntime, Runtime, null_bytes


def open_runtime(name: str, version: str, path: str, *, batch: int, threads: int, provider: str) -> Runtime:
    """Load what stands at ``path``: an ONNX file, or ``null:SIZE``.

    Raises
    ------
    InputError
        When it cannot be loaded, or cannot take batches of ``batch``.
    """
    if path.startswith(NULL_PREFIX):
        return NullRuntime(name, version, null_bytes(path), batch)
    if provider == ORT_CUDA:
        return BoundRuntime(name, version, Path(path), batch, threads, provider)
    return OnnxRuntime(name, version, Path(path), batch, threads, provider)
