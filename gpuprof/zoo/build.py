"""Builds an architecture of the zoo into a file, atomically."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx

from gpuprof.domain.file_access import refuse_to_replace
from gpuprof.errors import InputError, refuse_unwritable
from gpuprof.zoo.architecture import ONNX, OURS, ZooArchitecture


def build(architecture: ZooArchitecture, output: Path, batch: int | None = None, seed: int = 0) -> Path:
    """Write a network with random weights to ``output`` and return the path; the same seed gives the same bytes.

    Networks beyond two gibibytes keep their weights in ``<output>.data`` in the same directory. Raises `InputError` if
    the directory cannot be written, the batch is below 1 or the seed below 0; `UnavailableError` if packages needed for
    building are not installed. ``output``: replaced if it exists; ``batch``: the batch to fix; free by default.
    """
    if batch is not None and batch < 1:
        raise InputError(f"the batch must be at least 1 but is {batch}")
    if seed < 0:
        raise InputError(f"the seed must be at least 0 but is {seed}")
    if not output.parent.is_dir():
        raise InputError(f"cannot write {output}: {output.parent} is not a directory", "create it first")
    with (
        refuse_unwritable(refuse_to_replace(output), "choose another place with -o"),
        tempfile.TemporaryDirectory(prefix=".gpuprof-", dir=output.parent) as directory,
    ):
        path = Path(directory) / output.name
        _write(architecture, path, seed)
        if batch is not None:
            _fix_batch(path, batch)
        # Weights are moved before the model, so that a visible model can be opened.
        data = path.with_name(f"{path.name}.data")
        if data.exists():
            data.replace(output.with_name(data.name))
        path.replace(output)
    return output


def _write(architecture: ZooArchitecture, output: Path, seed: int) -> None:
    if architecture.origin == ONNX:
        from gpuprof.zoo.light import build_light

        onnx.save(build_light(architecture.stem, seed), output)
    elif architecture.origin == OURS:
        from gpuprof.zoo.small_networks import build_small_network

        onnx.save(build_small_network(architecture.stem, seed), output)
    else:
        from gpuprof.zoo.exports import export

        export(architecture, output, seed)


def _fix_batch(path: Path, batch: int) -> None:
    """Set the dimensions called ``batch`` of the inputs and outputs."""
    model = onnx.load(path, load_external_data=False)
    for info in (*model.graph.input, *model.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param == "batch":
                dim.dim_value = batch
    # Shapes of intermediate values contain the free batch.
    del model.graph.value_info[:]
    onnx.save(model, path)
