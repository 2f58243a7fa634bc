"""Copies of models: with a free batch, verified by running both, and in float16 by ONNX Runtime's converter."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from gpuprof.domain.file_access import refuse_to_replace, write_beside
from gpuprof.errors import InputError, UnavailableError, refuse_unwritable, runtime_errors, shorten_message
from gpuprof.graph.batch_plan import BatchAxis, BatchRewrite, apply_rewrite, plan_rewrite
from gpuprof.graph.dims import batch_axes, declared_dims
from gpuprof.graph.file import OnnxFile, read_onnx
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.runtime.outputs import QUANTISED_TOLERANCE, is_close
from gpuprof.runtime.session import open_session, translate_error

Array = npt.NDArray[np.generic]
#: Largest difference allowed, relative to an output's largest value: a runtime adds in another order at another batch.
TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
_PROOF_BATCH = 3


def is_dynamic(path: Path) -> bool:
    """Return whether a model already takes any batch: free in its inputs, and followed by its shapes.

    Raises `InputError` if the file is not a valid ONNX model.
    """
    graph = read_onnx(path).model.graph
    weights = read_onnx(path).weights
    dims = {info.name: declared_dims(info) or () for info in graph.input if info.name not in weights}
    if not batch_axes(dims):
        return False
    load_graph(path, 1)
    try:
        load_graph(path, _PROOF_BATCH)
    except InputError:
        return False
    return True


def ensure_dynamic_batch(path: Path, directory: Path) -> Path:
    """Return ``path`` if its batch is already free, else the path of a rewritten and verified copy.

    ``directory``: parent of the copies, each in a directory named by the model's hash; created if missing, existing
    copies are reused.
    Raises `InputError` if the batch cannot be freed; the message names the node.
    """
    if is_dynamic(path):
        return path
    output = _copy_of(path, directory)
    if not output.is_file():
        output.parent.mkdir(parents=True, exist_ok=True)
        rebatch(path, output)
    return output


def copy_with_free_batch(path: Path, directory: Path) -> Path | None:
    """Return the copy of ``path`` made in ``directory`` by `ensure_dynamic_batch`; None without a copy.

    Raises `InputError` if the file is not ONNX or damaged.
    """
    output = _copy_of(path, directory)
    return output if output.is_file() else None


def _copy_of(path: Path, directory: Path) -> Path:
    return directory / read_onnx(path).sha256[:16] / path.name


def rebatch(path: Path, output: Path, batch: int | None = None) -> BatchRewrite:
    """Write the model in ``path`` with a free batch, or with ``batch``, to ``output``; return the changes made.

    The rewritten model must give the original's outputs, and for a batch of three samples the outputs of three runs of
    the original, within `TOLERANCE`; otherwise nothing is written. External data is copied. Raises `InputError` if the
    batch cannot be changed, naming the node; if the outputs differ; if ``output`` cannot be written; `UnavailableError`
    if ONNX Runtime is not installed.
    """
    file = read_onnx(path)
    rewrite = plan_rewrite(file)
    with (
        refuse_unwritable(refuse_to_replace(output), "choose another place with -o"),
        tempfile.TemporaryDirectory(prefix=".gpuprof-", dir=output.parent) as name,
    ):
        free = Path(name) / "free.onnx"
        for data in file.external:
            # A copy, not a link: ONNX rejects a data file with several names as a possible attack.
            (Path(name) / data).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.path.parent / data, Path(name) / data)
        model = onnx.load(file.path, load_external_data=False)
        apply_rewrite(model, rewrite)
        onnx.save(model, free)
        if rewrite.nodes or not is_dynamic(path):
            _verify_equivalence(file, free, rewrite)
        if batch is not None:
            apply_rewrite(model, BatchRewrite(1, {}, (), rewrite.places), batch)
            onnx.save(model, free)
        for data in file.external:
            # The data before the model: a model that is visible can be opened.
            _place_data(Path(name) / data, file.path.parent / data, output.parent / data)
        free.replace(output)
    return rewrite


def _place_data(copy: Path, source: Path, target: Path) -> None:
    if target.exists():
        if target.samefile(source):
            return
        raise InputError(f"{target} exists and is not this model's data", "write to another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    copy.replace(target)


def _verify_equivalence(file: OnnxFile, free: Path, rewrite: BatchRewrite) -> None:
    """Run the original and the rewritten model on the same samples and compare."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    original = open_session(file.path, threads=cores)
    rewritten = open_session(free, threads=cores)
    names = [output.name for output in original.get_outputs()]
    batched = random_inputs(load_graph(free, _PROOF_BATCH * rewrite.batch))
    inputs = random_inputs(load_graph(file.path, rewrite.batch))
    is_rounding = any("Quantize" in node.op_type or "QLinear" in node.op_type for node in file.model.graph.node)
    floor = QUANTISED_TOLERANCE if is_rounding else 0.0

    def compare(session: Any, samples: dict[str, Array], outputs: list[Array], blocks: int, location: str) -> None:
        """Compare the outputs of a batch with those of a session that runs each of its equal blocks separately."""
        for i in range(blocks):
            part = {name: _take_block(value, rewrite.places.get(name), i, blocks) for name, value in samples.items()}
            for name, actual, output in zip(names, session.run(names, part), outputs, strict=True):
                expected = _take_block(output, rewrite.places.get(name), i, blocks)
                tolerance = TOLERANCE.get(str(expected.dtype))
                if not is_close(expected, actual, None if tolerance is None else max(tolerance, floor)):
                    raise InputError(
                        f"{file.path.name}: with its batch freed, output {name} differs from the original's at "
                        f"{location.format(i + 1)}",
                        "the model mixes samples or is random; export it with a dynamic batch",
                    )

    try:
        results = original.run(names, inputs)
        compare(rewritten, inputs, results, 1, f"batch {rewrite.batch}")
        compare(rewritten, inputs, results, rewrite.batch, f"part {{}} of {rewrite.batch} of a batch")
        outputs = rewritten.run(names, batched)
        compare(original, batched, outputs, _PROOF_BATCH, f"part {{}} of {_PROOF_BATCH} of a batch")
    except runtime_errors() as error:
        raise translate_error(error, file.path) from error


def _take_block(value: Array, place: BatchAxis | None, i: int, blocks: int) -> Array:
    """Return the i-th of ``blocks`` equal parts of the batch, shaped as if only this part had been run."""
    if place is None:
        return value
    before, size, after = value.shape[: place.axis], value.shape[place.axis], value.shape[place.axis + 1 :]
    split = value.reshape(*before, place.outer, blocks, size // place.outer // blocks, *after)
    part: Array = np.take(split, i, axis=place.axis + 1)
    return part.reshape(*before, size // blocks, *after)


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
    refusals: tuple[type[Exception], ...] = (*runtime_errors(), onnx.checker.ValidationError)
    with write_beside(output, "choose another database with --db") as converted:
        try:
            model = convert_float_to_float16(onnx.load(path), keep_io_types=True)
            # In a file of their own, weights may have more than 2 GiB.
            onnx.save(model, converted, save_as_external_data=bool(file.external), location=f"{output.name}.weights")
        except refusals as error:
            raise InputError(f"{path} cannot be converted to float16: {shorten_message(error)}") from error
    return output
