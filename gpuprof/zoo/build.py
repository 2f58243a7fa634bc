"""Builds an architecture of the zoo into a file, whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import onnx
from onnx import ModelProto

from gpuprof.errors import InputError
from gpuprof.onnx_file import LARGEST_FILE_BYTES
from gpuprof.zoo.architecture import Architecture
from gpuprof.zoo.light import build_light


def build(architecture: Architecture, output: Path, batch: int | None = None, seed: int = 0) -> Path:
    """Write a network with random weights to ``output`` and return that path; the same seed gives the same bytes.

    A network beyond two gibibytes keeps its weights in ``<output>.data`` beside it.

    Parameters
    ----------
    architecture : Architecture
    output : Path
        Replaced if it exists.
    batch : int, optional
        The batch to fix; free by default.
    seed : int

    Raises
    ------
    InputError
        If the directory cannot be written, or the batch or the seed is no such number.
    UnavailableError
        If what building needs is not installed.
    """
    if batch is not None and batch < 1:
        raise InputError(f"the batch must be at least 1 but is {batch}")
    if seed < 0:
        raise InputError(f"the seed must be at least 0 but is {seed}")
    if not output.parent.is_dir():
        raise InputError(f"cannot write {output}: {output.parent} is not a directory", "create it first")
    model = build_light(architecture.stem, seed)
    if batch is not None:
        fix_batch(model, batch)
    save_model(model, output)
    return output


def fix_batch(model: ModelProto, batch: int) -> None:
    """Set the dimensions called ``batch`` of the inputs and outputs."""
    for info in (*model.graph.input, *model.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param == "batch":
                dim.dim_value = batch
    del model.graph.value_info[:]


def save_model(model: ModelProto, output: Path) -> None:
    """Write ``model`` beside its place first and rename it when it is whole.

    Raises
    ------
    InputError
        If the directory cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".gpuprof-", dir=output.parent) as directory:
            whole = Path(directory) / output.name
            data = f"{output.name}.data"
            external = model.ByteSize() >= LARGEST_FILE_BYTES - 2**20
            onnx.save(model, whole, save_as_external_data=external, location=data if external else None)
            if external:
                shutil.move(whole.parent / data, output.parent / data)
            whole.replace(output)
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror or error}", "choose another place with -o") from error
