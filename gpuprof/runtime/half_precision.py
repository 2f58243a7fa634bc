"""Converts a model to float16 by ONNX Runtime's converter."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx

from gpuprof.errors import InputError, UnavailableError, refuse_unwritable, runtime_errors
from gpuprof.graph.file import read_onnx


def convert_to_float16(path: Path, directory: Path) -> Path:
    """Return a copy of a model with weights and arithmetic in float16; inputs and outputs keep their types.

    ``directory``: parent of the copies, each in a directory named by the model's hash; existing copies are reused.
    Raises `InputError` if the model cannot be converted; `UnavailableError` without ONNX Runtime.
    """
    try:
        from onnxruntime.transformers.float16 import convert_float_to_float16
    except ImportError:
        raise UnavailableError("ONNX Runtime's converter to float16 is not installed", "install onnxruntime") from None
    file = read_onnx(path)
    output = directory / file.sha256[:16] / f"{path.stem}-float16.onnx"
    if output.is_file():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        refuse_unwritable(output, "choose another database with --db"),
        tempfile.TemporaryDirectory(prefix=".gpuprof-", dir=output.parent) as name,
    ):
        converted = Path(name, output.name)
        try:
            model = convert_float_to_float16(onnx.load(path), keep_io_types=True)
            # In a file of their own, weights may have more than 2 GiB.
            onnx.save(model, converted, save_as_external_data=bool(file.external), location=f"{output.name}.weights")
        except _errors() as error:
            raise InputError(f"{path} cannot be converted to float16: {' '.join(str(error).split())[:200]}") from error
        for written in sorted(Path(name).iterdir(), key=lambda entry: entry.suffix == ".onnx"):
            written.replace(output.parent / written.name)  # the model last: a visible model can be opened
    return output


def _errors() -> tuple[type[Exception], ...]:
    return (*runtime_errors(), onnx.checker.ValidationError)
