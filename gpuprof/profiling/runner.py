"""Opens a model in the runtime that a device has, as a function that runs one batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpuprof.errors import InputError
from gpuprof.runtimes import ORT_CUDA
from gpuprof.session import gpu_provider, open_session, runtime_errors, translated

#: Runs one batch and returns the outputs by name, on the host.
Run = Callable[[], Mapping[str, Any]]


def open_run(path: Path, feeds: Mapping[str, Any], provider: str, threads: int, ranges: Any = None) -> Run:
    """Return a function that runs ``path`` once with ``feeds`` and returns when the outputs are on the host.

    ``ranges`` opens a profiler's range around each operator, where the runtime does not mark its own.

    Raises
    ------
    InputError
        When the runtime refuses the model.
    UnavailableError
        When the runtime or the provider is not installed.
    """
    session = open_session(path, threads=threads, provider=provider, ranges=ranges)
    wanted = {node.name: feeds[node.name] for node in session.get_inputs() if node.name in feeds}
    names = [node.name for node in session.get_outputs()]
    errors = runtime_errors()

    def run() -> Mapping[str, Any]:
        try:
            return dict(zip(names, session.run(names, wanted), strict=True))
        except errors as error:
            raise translated(error, path) from error

    return run


def gpu_provider_missing() -> str | None:
    """Return None when ONNX Runtime or PyTorch can use a GPU here, else why not, in one line."""
    if gpu_provider() is not None:
        return None
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed, nor a PyTorch that sees the GPU: pip install 'gpuprof[gpu]'"
    return f"this onnxruntime has no {ORT_CUDA}: pip install onnxruntime-gpu in place of onnxruntime"


def outputs_differ(alone: Mapping[str, Any], shared: Mapping[str, Any], tolerance: float = 1e-2) -> str | None:
    """Return how outputs under a share differ from those without beyond ``tolerance``, in one line; None: they agree.

    The tolerance is relative to the largest value of an output: with other SMs a library picks other kernels, which
    add in another order, in TF32 to about three digits.
    """
    import numpy as np

    if alone.keys() != shared.keys():
        raise InputError("the outputs of both runs have different names", "were they of one model?")
    for name, value in alone.items():
        expected, found = np.asarray(value), np.asarray(shared[name])
        if expected.shape != found.shape:
            return f"output {name} has shape {found.shape} under the share and {expected.shape} without"
        if expected.dtype.kind != "f":
            if not np.array_equal(expected, found):
                return f"output {name} is another under the share than without"
            continue
        if not np.array_equal(np.isfinite(expected), np.isfinite(found)):
            return f"output {name} is not finite where it is without the share, or the other way round"
        scale = float(np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected)))
        gap = float(np.max(np.abs(expected - found), initial=0.0, where=np.isfinite(expected)))
        if gap > tolerance * scale:
            return f"output {name} differs under the share by {gap:.3g} at values up to {scale:.3g}"
    return None
