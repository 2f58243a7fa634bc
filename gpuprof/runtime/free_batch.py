"""Frees the fixed batch of a model, and verifies by running both that the results are the same."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

from gpuprof.domain.file_access import refuse_to_replace
from gpuprof.errors import InputError, refuse_unwritable, runtime_errors
from gpuprof.graph.batch_axes import batch_axes
from gpuprof.graph.batch_plan import BatchAxis, BatchRewrite, apply_rewrite, plan_rewrite
from gpuprof.graph.dims import declared_dims
from gpuprof.graph.file import OnnxFile, read_onnx
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.runtime.session import open_session, translate_error

Array = npt.NDArray[np.generic]
#: Largest difference allowed, relative to an output's largest value: a runtime adds in another order at another batch.
TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
#: Another order of operations can move an eight-bit rounding by a step, and later layers propagate the difference.
_QUANTISED_TOLERANCE = 1e-1
_QUANTISING = "Quantize"
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
            _copy_data(file.path.parent / data, Path(name) / data)
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


def _copy_data(source: Path, target: Path) -> None:
    # A copy, not a link: ONNX rejects a data file with several names as a possible attack.
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


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
    model, old = file.path.name, rewrite.batch
    floor = _QUANTISED_TOLERANCE if _is_rounding_model(file) else 0.0
    try:
        results = original.run(names, inputs)
        for name, expected, actual in zip(names, results, rewritten.run(names, inputs), strict=True):
            _compare(model, name, expected, actual, f"batch {old}", floor)
        _compare_blocks(model, names, results, lambda x: rewritten.run(names, x), (inputs, rewrite, old), floor)
        batch = rewritten.run(names, batched)
        _compare_blocks(model, names, batch, lambda x: original.run(names, x), (batched, rewrite, _PROOF_BATCH), floor)
    except runtime_errors() as error:
        raise translate_error(error, file.path) from error


def _compare_blocks(
    model: str,
    names: list[str],
    expected_outputs: list[Array],
    run: Callable[[dict[str, Array]], list[Array]],
    cut: tuple[dict[str, Array], BatchRewrite, int],
    floor: float,
) -> None:
    """Compare the outputs of a batch with the outputs of ``run`` for each of its equal blocks alone."""
    inputs, rewrite, blocks = cut

    def block(name: str, value: Array, i: int) -> Array:
        place = rewrite.places.get(name)
        return value if place is None else _block(value, place, i, blocks)

    for i in range(blocks if blocks > 1 else 0):
        block_outputs = run({name: block(name, value, i) for name, value in inputs.items()})
        for name, actual, expected in zip(names, block_outputs, expected_outputs, strict=True):
            _compare(model, name, block(name, expected, i), actual, f"part {i + 1} of {blocks} of a batch", floor)


def _block(value: Array, place: BatchAxis, i: int, blocks: int) -> Array:
    """Return the i-th of ``blocks`` equal parts of the batch, shaped as in a run of this part alone."""
    before, size, after = value.shape[: place.axis], value.shape[place.axis], value.shape[place.axis + 1 :]
    split = value.reshape(*before, place.outer, blocks, size // place.outer // blocks, *after)
    part: Array = np.take(split, i, axis=place.axis + 1)
    return part.reshape(*before, size // blocks, *after)


def _is_rounding_model(file: OnnxFile) -> bool:
    """Return whether a model rounds values to eight bits."""
    return any(_QUANTISING in node.op_type or "QLinear" in node.op_type for node in file.model.graph.node)


def _compare(model: str, name: str, expected: Array, actual: Array, location: str, floor: float) -> None:
    tolerance = TOLERANCE.get(str(expected.dtype))
    if expected.shape != actual.shape:
        is_same = False
    elif tolerance is None:
        is_same = bool(np.array_equal(expected, actual))
    else:
        a, b = expected.astype(np.float64), actual.astype(np.float64)
        scale = float(np.abs(a[np.isfinite(a)]).max(initial=1e-6))
        is_same = bool(np.allclose(a, b, rtol=0, atol=max(tolerance, floor) * scale, equal_nan=True))
    if not is_same:
        raise InputError(
            f"{model}: with its batch freed, output {name} differs from the original's at {location}",
            "the model mixes samples or is random; export it with a dynamic batch",
        )
