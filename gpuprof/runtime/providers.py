"""ONNX Runtime's execution providers; options of CUDA's, its missing libraries, and boards without machine code.

ONNX Runtime lists the providers of its build, even those that do not start. If a CUDA library or the driver is missing,
a session opens on the CPU without an error, so the provider of the open session must be checked.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import mmap
import re
import struct
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpuprof.domain.catalogue import datasets
from gpuprof.domain.device import Device
from gpuprof.errors import UnavailableError

ORT_CPU, ORT_CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
ORT_TENSORRT = "TensorrtExecutionProvider"

#: Environment variable that selects the options of sessions on a GPU: `gpuprof.runtime.gpu_session.GpuChoice`.
GPU_OPTIONS = "GPUPROF_GPU_OPTIONS"

#: Environment variable with the pipe directory of the MPS daemon, read by MPS clients.
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"


#: Options of the provider; all affect figures and are recorded in a run's settings. The arena grows by the requested
#: size: the default, the next power of two, takes up to twice the memory of the model. cuDNN's algorithms are chosen by
#: heuristics: the default tries all of them for every new batch size while serving. Products of float32 use TF32 if
#: supported by the GPU, as in ONNX Runtime's default.
CUDA_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "cudnn_conv_use_max_workspace": "1",
        "gpu_mem_limit": str(2**64 - 1),
        "use_tf32": "1",
    }
)
_CUDA_LIBRARY = "libonnxruntime_providers_cuda.so"
#: The beginning of a fat binary (magic number, version, size of the header), and the kind of an entry with PTX instead
#: of machine code: CUDA's `fatbinary`.
_FAT_BINARY, _PTX = b"\x50\xed\x55\xba\x01\x00\x10\x00", 1
LIBRARIES_FIX = "pip install 'onnxruntime-gpu[cuda,cudnn]', or put them on LD_LIBRARY_PATH"
_NOT_LOADED = re.compile(r"Failed to load (?P<library>\S+?): (?P<reason>.*)")
_OPENED_BY_LOADER = re.compile(r"^(?P<library>lib\S+): cannot open shared object file")


def has_code(compute_capability: str) -> bool:
    """Return whether ONNX Runtime has code for a GPU: for a GPU of its generation no newer than it, or PTX.

    Of a build that is not installed, the wheels are assumed.
    """
    wanted = int(compute_capability.replace(".", ""))
    library = _capi_directory() / _CUDA_LIBRARY
    code = read_code(library) if library.is_file() else _read_wheels()
    return any(version <= wanted and (kind == _PTX or version // 10 == wanted // 10) for kind, version in code)


@cache
def _read_wheels() -> frozenset[tuple[int, int]]:
    table = tomllib.loads((datasets() / "onnxruntime.toml").read_text(encoding="utf-8"))
    return frozenset((0, version) for version in table["wheel_capabilities"])


@cache
def read_code(library: Path) -> frozenset[tuple[int, int]]:
    """Return the kind (machine code or PTX) and compute capability, such as 75, of all GPU code in a library."""
    code = set()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(_FAT_BINARY)
        while start >= 0:
            entry = start + 16
            end = min(entry + struct.unpack_from("<Q", data, entry - 8)[0], len(data) - 32)
            while entry < end:
                kind, header, size = struct.unpack_from("<H2xIQ", data, entry)
                code.add((kind, *struct.unpack_from("<I", data, entry + 28)))
                entry += max(16, header + size)
            start = data.find(_FAT_BINARY, entry)
    return frozenset(code)


def _capi_directory() -> Path:
    spec = importlib.util.find_spec("onnxruntime")
    return Path(spec.origin if spec is not None and spec.origin else "").parent / "capi"


def describe_missing_code(device: Device) -> str | None:
    """Return a remark on a GPU that the installed ONNX Runtime has no machine code for; None for other devices."""
    capability = device.compute_capability
    if capability is None or has_code(capability):
        return None
    try:
        version = importlib.metadata.version("onnxruntime-gpu")
    except importlib.metadata.PackageNotFoundError:
        return None
    return (
        f"onnxruntime-gpu {version}, which is installed, has no code for {device.name} (compute capability "
        f"{capability}): serving there needs a build of its own"
    )


@cache
def load_cuda_libraries() -> tuple[str, ...]:
    """Load the CUDA and cuDNN libraries installed by pip; return the names of missing libraries.

    Called once per process, before its first session. The linker loads libraries on its own path itself.
    """
    import onnxruntime as ort

    preload = getattr(ort, "preload_dlls", None)
    if preload is None:  # before ONNX Runtime 1.21
        return ()
    complaints = io.StringIO()
    # ONNX Runtime prints the libraries that fail to load and raises nothing.
    with contextlib.redirect_stdout(complaints):
        preload()
    return tuple(dict.fromkeys(Path(match["library"]).name for match in _NOT_LOADED.finditer(complaints.getvalue())))


def check_provider(session: Any, provider: str, path: Path | str) -> None:
    """Check that an open session runs on ``provider``.

    Raises `UnavailableError`, naming the missing library, when ONNX Runtime fell back to the CPU.
    """
    # If a provider does not start, ONNX Runtime opens the session on the CPU without an error.
    if provider in session.get_providers():
        return
    missing = missing_libraries()
    reason = f"{', '.join(missing)} cannot be loaded" if missing else "the GPU or its driver does not answer"
    raise UnavailableError(
        f"ONNX Runtime opened {path} on the CPU because its {provider} does not start: {reason}",
        LIBRARIES_FIX if missing else "gpuprof doctor says what the driver says",
    )


def missing_libraries() -> tuple[str, ...]:
    """Return the names of the libraries without which the provider for NVIDIA GPUs does not start."""
    import ctypes

    missing = load_cuda_libraries()
    library = _capi_directory() / _CUDA_LIBRARY
    if missing or not library.exists():
        return missing
    try:
        ctypes.CDLL(str(library))
    except OSError as error:  # symbols of ONNX Runtime itself are also missing outside a session; this is no failure
        match = _OPENED_BY_LOADER.match(str(error))
        return (match["library"],) if match else ()
    return ()
