"""Runs an open session as a function of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpuprof.errors import runtime_errors
from gpuprof.graph.element_types import elem_type
from gpuprof.runtime.session import translate_error

#: Function that runs a batch and returns the outputs by name, on the host.
Run = Callable[[], Mapping[str, Any]]

#: ONNX Runtime types missing from NumPy: a NumPy type of the same width.
_BITS = {
    "tensor(bfloat16)": "uint16",
    **{f"tensor(float8{form})": "uint8" for form in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")},
}


def session_run(session: Any, feeds: Mapping[str, Any], path: Path) -> Run:
    """Return a function that runs an open session once with the matching ``feeds``.

    Inputs of types missing from NumPy (bfloat16 and the eight-bit floats) are passed as their bits, and such outputs
    are returned as float32. The function raises `InputError` when the runtime refuses the inputs.
    """
    inputs, outputs = session.get_inputs(), session.get_outputs()
    inputs_by_name = {node.name: feeds[node.name] for node in inputs if node.name in feeds}
    names = [node.name for node in outputs]
    errors = runtime_errors()
    types = {node.name: node.type for node in inputs}
    by_bits = hasattr(session, "run_with_ort_values") and any(node.type in _BITS for node in (*inputs, *outputs))

    def run() -> Mapping[str, Any]:
        try:
            if by_bits:
                values = {name: _ort_value(array, types[name]) for name, array in inputs_by_name.items()}
                results = [_on_host(value) for value in session.run_with_ort_values(names, values)]
            else:
                results = session.run(names, inputs_by_name)
            return dict(zip(names, results, strict=True))
        except errors as error:
            raise translate_error(error, path) from error

    return run


def _ort_value(array: Any, kind: str) -> Any:
    """Return an array as an ONNX Runtime value; for types missing from NumPy, with an explicit type."""
    import numpy as np
    from onnxruntime import OrtValue

    if kind not in _BITS:
        return OrtValue.ortvalue_from_numpy(array)
    bits = np.ascontiguousarray(array).view(_BITS[kind])
    return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, elem_type(kind.removeprefix("tensor(").rstrip(")")))


def _on_host(value: Any) -> Any:
    """Return an ONNX Runtime value as an array; types missing from NumPy become float32."""
    if not value.is_tensor() or value.data_type() not in _BITS:
        return value.numpy()
    import ctypes
    from math import prod

    import numpy as np
    from onnx.helper import tensor_dtype_to_np_dtype

    kind = value.data_type()
    shape = value.shape()
    # ``numpy()`` does not support the type, so the memory is read directly.
    buffer = (ctypes.c_char * (prod(shape) * np.dtype(_BITS[kind]).itemsize)).from_address(value.data_ptr())
    plain = np.frombuffer(bytes(buffer), tensor_dtype_to_np_dtype(elem_type(kind.removeprefix("tensor(").rstrip(")"))))
    return plain.astype(np.float32).reshape(shape)
