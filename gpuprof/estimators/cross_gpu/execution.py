"""Precision and runtime of an unmeasured model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from gpuprof.domain.device import Device
from gpuprof.domain.model import ModelGraph
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.kernels import LaunchMode
from gpuprof.estimators.cross_gpu.rates import resolve_precision

#: A precision in user options → the catalogue's name of the rate.
PRECISIONS: Mapping[str, str] = {
    "float32": "float32",
    "tf32": "tfloat32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "float8",
    "int8": "int8",
}


@dataclass(frozen=True, slots=True)
class Execution:
    """Precision and runtime of a model's execution."""

    #: A key of `PRECISIONS`; None: the precision of the model's types in ONNX Runtime's CUDA provider, TF32 included.
    precision: str | None = None
    runtime: LaunchMode = LaunchMode.ONNXRUNTIME
    host_us: float | None = None  #: Time of a launch on the host; None: the runtime's usual time.

    def rate_name(self, device: Device, own_type: str) -> str:
        """Return the name of the rate of a model's products on ``device``; ``own_type``: type of its weights."""
        if self.precision is None:
            precision = "tfloat32" if own_type == "float32" else own_type
            return resolve_precision(device, precision)
        return PRECISIONS[self.precision]

    def is_possible(self, device: Device) -> bool:
        """Return whether a GPU has the arithmetic; always true for CPUs, whose estimates ignore the precision."""
        return self.precision is None or device.kind != "gpu" or PRECISIONS[self.precision] in device.flops_per_s

    @staticmethod
    def possible_precisions(device: Device) -> list[str]:
        """Return the precisions of a GPU that users can choose."""
        return [precision for precision, name in PRECISIONS.items() if name in device.flops_per_s]


def type_of_weights(graph: ModelGraph) -> str:
    """Return the type of most of the weights' bytes; quantised models multiply in int8."""
    sizes: dict[str, int] = {}
    for tensor in (*graph.weights, *graph.inputs):
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
    for dtype in sorted(sizes, key=lambda name: -sizes[name]):
        if dtype in ("float64", "float32", "float16", "bfloat16", "int8"):
            return dtype
        if dtype.startswith("float8"):
            return "float8"
    return "float32"


def parse_execution(precision: str | None, runtime: str | None, host_us: float | None = None) -> Execution:
    """Return the execution for a precision, a runtime and the host's time of a launch.

    Raises `InputError` when the precision or runtime is unknown, or the time is not above 0.
    """
    if host_us is not None and not 0.0 < host_us < inf:
        raise InputError(f"the host's time of a launch must be above 0 but got {host_us:g} us")
    if precision is not None and precision not in PRECISIONS:
        raise InputError(f"unknown precision {precision!r}", f"choose one of {', '.join(PRECISIONS)}")
    try:
        mode = LaunchMode(runtime or LaunchMode.ONNXRUNTIME)
    except ValueError:
        raise InputError(f"unknown runtime {runtime!r}", f"choose one of {', '.join(LaunchMode)}") from None
    return Execution(precision, mode, host_us)
