"""Names of ONNX's element types for `gpuprof.domain.model.Tensor`."""

from __future__ import annotations

from onnx import TensorProto

from gpuprof.errors import InputError

_RENAMED = {"FLOAT": "float32", "DOUBLE": "float64"}
_ELEMENT_TYPES: dict[int, str] = {
    int(number): _RENAMED.get(name, name.lower()) for name, number in TensorProto.DataType.items() if number
}


def dtype_name(elem_type: int) -> str:
    """Return the `Tensor` dtype of an ONNX element type: ``1`` is ``"float32"``.

    Raises `InputError` for an unknown element type.
    """
    name = _ELEMENT_TYPES.get(elem_type)
    if name is None:
        raise InputError(f"ONNX has no element type {elem_type}", "the model is damaged: export it again")
    return name


def elem_type(dtype: str) -> int:
    """Return the ONNX element type of a `Tensor`'s dtype, the inverse of `dtype_name`."""
    return next(number for number, name in _ELEMENT_TYPES.items() if name == dtype)
