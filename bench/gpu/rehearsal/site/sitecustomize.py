"""Makes every Python below ``bench/gpu/run.sh`` take the CPU for a GPU: loaded by Python itself, from PYTHONPATH.

ONNX Runtime lists the provider for GPUs, which starts, and runs models on the CPU; a trace of PyTorch's profiler gets
kernels for each run. What is measured so is of a device called ``rehearsal-gpu``, which no catalogue has. A client of MPS is told its part of the SMs; ``REHEARSAL_MPS=refuse`` refuses clients, and their daemon's log
says so. ``REHEARSAL_WITHOUT`` names packages that are to be missing, as they are where the run is meant to go.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

_HIDDEN = frozenset(filter(None, os.environ.get("REHEARSAL_WITHOUT", "").split(",")))
_find = PathFinder.find_spec


def _find_but_hidden(_: type[PathFinder], name: str, path: Any = None, target: Any = None) -> Any:
    return None if name.partition(".")[0] in _HIDDEN else _find(name, path, target)


PathFinder.find_spec = classmethod(_find_but_hidden)  # type: ignore[assignment, method-assign]


def _torch(module: ModuleType) -> None:
    refused = os.environ.get("REHEARSAL_MPS") == "refuse" and "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in os.environ
    module.cuda.is_available = lambda: not refused
    module.cuda.empty_cache = lambda: None
    module.cuda.synchronize = lambda device=None: None


def _onnxruntime(module: Any) -> None:
    listed = module.get_available_providers()
    module.get_available_providers = lambda: ["CUDAExecutionProvider", *listed]
    make, allocate = module.OrtValue.ortvalue_from_numpy, module.OrtValue.ortvalue_from_shape_and_type
    module.OrtValue.ortvalue_from_numpy = lambda array, *device: make(array)
    module.OrtValue.ortvalue_from_shape_and_type = lambda shape, kind, *device: allocate(shape, kind)
    for name in ("bind_input", "bind_output"):
        bind = getattr(module.IOBinding, name)
        setattr(module.IOBinding, name, lambda self, tensor, device="cpu", *more, bind=bind: bind(self, tensor, "cpu", *more))


def _visible_sms(module: Any) -> None:
    module.visible_sms = lambda: round(132 * float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")) / 100)


def _cuda_provider(module: Any) -> None:
    module.load_cuda_libraries = lambda: ()
    module.check_provider = lambda session, provider, path: None


def _gpu_probe(module: Any) -> None:
    refused = os.environ.get("REHEARSAL_MPS") == "refuse" and "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in os.environ
    if refused:
        module.probe_gpu = lambda: module.GpuProbe("rehearsed: refused")


class _PlayedMemory:
    """Pinned memory and copies of the CUDA runtime, on the host."""

    def allocate(self, size: int) -> Any:
        import numpy as np

        return np.zeros(size, np.uint8)

    def copy(self, target: int, source: int, size: int, kind: int) -> None:
        ctypes.memmove(target, source, size)


def _gpu_session(module: Any) -> None:
    module.PinnedMemory = _PlayedMemory


def _profiler(module: ModuleType) -> None:
    from bench.gpu.rehearsal import kernels

    write = module.profile.export_chrome_trace

    def export(self: Any, path: str) -> None:
        write(self, path)
        kernels.add_kernels(path)

    begin = module.profile.__init__

    def without_cuda(self: Any, *, activities: Any = None, **more: Any) -> None:
        begin(self, activities=[activity for activity in activities or () if "CUDA" not in str(activity)] or None, **more)

    module.profile.__init__ = without_cuda
    module.profile.export_chrome_trace = export


def _recording(module: Any) -> None:
    from bench.gpu.rehearsal import kernels

    if count_last_run := os.environ.get(kernels.COUNTED):
        opened = module.Resident.run_of
        module.Resident.run_of = lambda *given, **more: kernels.count_last_run(opened(*given, **more), count_last_run)


_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "onnxruntime": _onnxruntime,
    "gpuprof.machine.gpu": _visible_sms,
    "torch": _torch,
    "gpuprof.runtime.providers": _cuda_provider,
    "gpuprof.runtime.gpu_probe": _gpu_probe,
    "gpuprof.runtime.gpu_session": _gpu_session,
    "torch.profiler.profiler": _profiler,
    "gpuprof.profiling.gpu.recording": _recording,
}


class _Patched:
    """Finds what is to be changed once it has been loaded, by asking everybody else."""

    def __init__(self) -> None:
        self._asking: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _AFTER or name in self._asking:
            return None
        change = _AFTER[name]
        self._asking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.discard(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Patched())
