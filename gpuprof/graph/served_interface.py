"""Inputs and outputs as the Open Inference Protocol needs them: types that it carries, a batch that it can split."""

from __future__ import annotations

from collections.abc import Mapping

from gpuprof.errors import InputError
from gpuprof.graph.dims import Dim, batch_axes
from gpuprof.graph.element_types import dtype_name
from gpuprof.graph.file import OnnxFile

#: Element types by their names in `gpuprof.domain.model.Tensor`, with the protocol's names.
PROTOCOL_TYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
    "string": "BYTES",
}


def find_uncarried(file: OnnxFile) -> InputError | None:
    """Return why the protocol cannot carry a model's inputs or outputs; None if it can.

    Outputs that are sequences or maps are served as texts.
    """
    outputs = {info.name for info in file.model.graph.output}
    carried = set()
    for info in (*file.model.graph.input, *file.model.graph.output):
        kind, number = info.type.WhichOneof("value"), info.type.tensor_type.elem_type
        if info.name in file.weights or kind is None or (kind == "tensor_type" and not number):
            continue  # not sent, or of a type that the runtime infers
        name = dtype_name(number) if kind == "tensor_type" else kind.removesuffix("_type")
        is_text = name in ("sequence", "map") and info.name in outputs
        if not is_text and name not in PROTOCOL_TYPES:
            return uncarried_error(info.name, name)
        carried.add("BYTES" if is_text else PROTOCOL_TYPES[name])
    return mixed_types_error(file.path.name) if {"BF16", "BYTES"} <= carried else None


def uncarried_error(tensor: str, kind: str) -> InputError:
    """Return the error of a tensor whose type the protocol lacks."""
    return InputError(
        f"tensor {tensor!r} has type {kind}, which the Open Inference Protocol cannot carry",
        "convert it within the model: Cast, or tensors in place of sequences",
    )


def mixed_types_error(model: str) -> InputError:
    """Return the error of a model with strings and bfloat16."""
    return InputError(
        f"{model} takes or gives strings and bfloat16, which ONNX Runtime serves from Python only apart",
        "convert one of them within the model: Cast",
    )


def find_unbatched(inputs: Mapping[str, tuple[Dim, ...]], outputs: Mapping[str, tuple[Dim, ...] | None]) -> str | None:
    """Return ``"input NAME"`` or ``"output NAME"`` of a tensor whose batch is not its first dimension alone.

    None: no such tensor, as far as the dimensions tell; outputs of None have unknown dimensions.
    """
    axes = batch_axes(inputs)
    batches = {dims[0] for dims in inputs.values() if dims and isinstance(dims[0], str)}
    for name, dims in inputs.items():
        if axes.get(name) != 0 or batches.intersection(dims[1:]):
            return f"input {name}"
    for name, output in outputs.items():
        if output is not None and (not output or isinstance(output[0], int) or batches.intersection(output[1:])):
            return f"output {name}"
    return None
