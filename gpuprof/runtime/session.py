"""Opens a model in ONNX Runtime with the options common to profiling and serving.

A profile describes the served model only if both use the same session; so all sessions are opened here.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpuprof.errors import InputError, UnavailableError, install_hint, runtime_errors, shorten_message
from gpuprof.graph.element_types import FATAL_ONLY, elem_type
from gpuprof.runtime.providers import CUDA_OPTIONS, ORT_CPU, ORT_CUDA, ORT_TENSORRT, check_provider, load_cuda_libraries

if TYPE_CHECKING:
    import onnxruntime

#: Session options beyond the number of threads, as ONNX Runtime names them. Idle threads do not spin: a worker
#: that spins burns the share of its neighbours, and a quota on its own.
SESSION_CONFIG = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}


def session_settings(threads: int, provider: str = ORT_CPU) -> dict[str, object]:
    """Return all settings that determine how a session runs, for the provenance of a measurement."""
    return {
        "provider": provider,
        "intra_op_threads": threads,
        "inter_op_threads": 1,
        "execution_mode": "sequential",
        "graph_optimization_level": "all",
        "memory_arena": True,
        **SESSION_CONFIG,
        **(CUDA_OPTIONS if provider == ORT_CUDA else {}),
    }


def open_session(
    path: Path,
    *,
    threads: int,
    provider: str = ORT_CPU,
    provider_options: Mapping[str, str] = MappingProxyType({}),
    profile_prefix: str | None = None,
    optimized_path: Path | None = None,
) -> Any:
    """Open ``path`` with ``threads`` threads, including the caller's.

    Raises `InputError` for a file that is not an ONNX model, truncated or inconsistent, or has an operator unknown to
    the runtime; `UnavailableError` when the runtime or the provider is not installed, or the provider does not start.

    Parameters
    ----------
    path : Path
        An ONNX file.
    threads : int
        Threads within an operator.
    provider : str
        Execution provider; a GPU provider falls back to the CPU only for single nodes, never for the whole session.
    provider_options : mapping of str to str
        Options of the provider in addition to `CUDA_OPTIONS`.
    profile_prefix : str or None
        Path, without its ending, of ONNX Runtime's own profile of every node. None: no profile.
    optimized_path : Path or None
        Path for the optimized graph executed by the runtime.
    """
    try:
        import onnxruntime as ort
    except ImportError:
        raise UnavailableError(
            "onnxruntime is not installed", f"{install_hint('cpu')}, or for NVIDIA GPUs {install_hint('gpu')}"
        ) from None
    # Checked first: for a provider missing from its build, ONNX Runtime only warns and uses the CPU.
    if provider not in ort.get_available_providers():
        raise UnavailableError(
            f"ONNX Runtime has no {provider} here", f"it has {', '.join(ort.get_available_providers())}"
        )
    if provider != ORT_CPU:
        load_cuda_libraries()
    options = session_options(threads, optimized_path)
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile_prefix
    try:
        session = ort.InferenceSession(str(path), options, providers=_providers(provider, provider_options))
    except runtime_errors() as error:
        raise translate_error(error, path) from error
    check_provider(session, provider, path)
    return session


#: ONNX Runtime's types that NumPy lacks, and NumPy's types of the same width, for their bits.
BITS = {
    "tensor(bfloat16)": "uint16",
    **{f"tensor(float8{form})": "uint8" for form in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")},
}


def needs_bits(session: Any) -> bool:
    """Return whether a session takes or gives values of types that NumPy lacks."""
    return any(node.type in BITS for node in (*session.get_inputs(), *session.get_outputs()))


def run_by_bits(session: Any, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
    """Return the outputs of a run; values of types that NumPy lacks are taken and returned as their bits."""
    import numpy as np
    from onnxruntime import OrtValue

    def to_value(array: Any, kind: str) -> Any:
        array = np.ascontiguousarray(array)
        if kind not in BITS:
            return OrtValue.ortvalue_from_numpy(array)
        number = elem_type(kind.removeprefix("tensor(").rstrip(")"))
        return OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(BITS[kind]), number)

    def to_array(value: Any) -> Any:
        if not value.is_tensor() or value.data_type() not in BITS:
            return value.numpy()
        bits = np.dtype(BITS[value.data_type()])
        # By address, and copied, since the memory is released with the value.
        memory = (ctypes.c_char * (prod(value.shape()) * bits.itemsize)).from_address(value.data_ptr())
        return np.frombuffer(bytes(memory), bits).reshape(value.shape())

    kinds = {node.name: node.type for node in session.get_inputs()}
    values = {name: to_value(array, kinds[name]) for name, array in feeds.items()}
    return [to_array(value) for value in session.run_with_ort_values(names, values)]


def has_cuda_build() -> bool:
    """Return whether this ONNX Runtime was built for NVIDIA GPUs; it may still fail to start on them."""
    if importlib.util.find_spec("onnxruntime") is None:
        return False
    import onnxruntime as ort

    return ORT_CUDA in ort.get_available_providers()


def runtime_version() -> tuple[str, str]:
    """Return the name and version of the runtime, as reported by the module itself.

    The installed package may differ: onnxruntime and onnxruntime-gpu share the module's name.
    """
    name = "onnxruntime"
    if importlib.util.find_spec(name) is None:
        return name, "unknown"
    return name, str(importlib.import_module(name).__version__)


#: Remedy when the runtime does not support a model.
_LACKING = "export it with ops and types that the runtime has, or install a newer runtime"
#: Prefix of C++ messages: the line of a source file, and the function with the types of its parameters.
_ORIGIN = re.compile(r"/\S*onnxruntime\S*:\d+ .*?\)(?: const)? (?=[A-Z\[])")
_TOO_NEW = re.compile(r"Opset (\d+) is under development.*support for domain (\S+) is till opset (\d+)")


def translate_error(error: Exception, path: Path) -> InputError:
    """Return a runtime's error for ``path`` as a single line."""
    if isinstance(error, InputError):
        return error
    kind = type(error).__name__
    detail = " ".join(str(error).split("\n")[0].split())
    detail = detail.removeprefix("[ONNXRuntimeError] : ").split(" : ", 2)[-1]
    detail = _ORIGIN.sub("", detail)
    refusal = f"ONNX Runtime refuses {path}: {shorten_message(detail)}"
    if kind == "InvalidProtobuf":
        return InputError(f"{path} is not an ONNX model, or is cut off", "export it again, or copy it whole")
    if kind == "NoSuchFile":
        return InputError(f"cannot read {path}: no such file")
    if kind == "NotImplemented":
        return InputError(f"{path} has an operator that ONNX Runtime lacks: {shorten_message(detail)}", _LACKING)
    if detail.startswith("Unexpected input data type"):
        return InputError(refusal, "give it inputs of another type, and Cast")
    if new := _TOO_NEW.search(detail):
        return InputError(
            f"{path} has opset {new[1]} of {new[2]}; ONNX Runtime here has opsets up to {new[3]}",
            f"export it with opset {new[3]} or an older one, or install a newer runtime",
        )
    if "This is an invalid model" in detail:
        return InputError(
            f"ONNX Runtime refuses {path}: {shorten_message(detail)}", "correct the model, or export it again"
        )
    is_loading = detail.startswith(("Load model", "Exception during initialization"))  # after loading: the inputs
    return InputError(refusal, _LACKING if is_loading else "")


def session_options(threads: int, optimized_path: Path | None = None) -> onnxruntime.SessionOptions:
    """Return the options that every session has; ``optimized_path`` as for `open_session`."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Parallel execution would put nodes on threads beyond the share, and profile times of nodes would overlap.
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = FATAL_ONLY
    for key, value in SESSION_CONFIG.items():
        options.add_session_config_entry(key, value)
    if optimized_path is not None:
        options.optimized_model_filepath = str(optimized_path)
        # Weights apart: a graph with them could pass protobuf's limit of 2 GiB.
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", f"{optimized_path.name}.weights"
        )
    return options


def _providers(provider: str, options: Mapping[str, str]) -> list[Any]:
    cuda = (ORT_CUDA, {**CUDA_OPTIONS, **(options if provider == ORT_CUDA else {})})
    if provider in (ORT_CPU, ORT_CUDA):
        return [ORT_CPU] if provider == ORT_CPU else [cuda, ORT_CPU]
    # Nodes that TensorRT refuses run by CUDA.
    return [(provider, dict(options)), *([cuda] if provider == ORT_TENSORRT else []), ORT_CPU]
