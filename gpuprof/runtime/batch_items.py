"""Tests whether the items of a batch are computed independently, as batching of several requests requires.

Shapes do not show this: a softmax over the wrong axis or a normalisation over the batch gives outputs of the right
shape, in which each request depends on all others. So a batch of two different items is run, and each item alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from onnx import TypeProto

from gpuprof.errors import GpuprofError
from gpuprof.graph.batch_axes import batch_axes
from gpuprof.runtime.providers import ORT_CPU
from gpuprof.runtime.sequence_outputs import to_numbers

Array = npt.NDArray[np.generic]
Arrays = Mapping[str, Array]

#: Tolerance relative to an output's largest value: for another batch size a runtime uses other kernels, with another
#: order of additions; on GPUs TF32 keeps three digits. Mixing changes outputs by about as much as their values.
TOLERANCE = {"float16": 5e-2, "bfloat16": 2e-1}
_TOLERANCE = 1e-2
#: Rounding of a model that quantises by a batch's largest value depends slightly on the batch's other items.
_QUANTISED_TOLERANCE = 1e-1
_QUANTISING = "DynamicQuantize"
#: Batch size of the test.
ITEMS = 2
#: Seeds of the inputs; mixing must show for all seeds. An index, for example, may differ by chance between nearly equal
#: values.
_SEEDS = (0, 1)


def find_mixed_output(path: Path) -> str | None:
    """Return the reason why requests must not share a batch; None: they may share it, or unknown.

    The reason is the name of an output that mixes items, or ``"input NAME"`` or ``"output NAME"`` of a tensor whose
    first dimension is not the batch, so that it cannot be split by request. Raises `UnavailableError` when ONNX Runtime
    is not installed.
    """
    from gpuprof.graph.dims import declared_dims
    from gpuprof.graph.file import read_onnx

    file = read_onnx(path)
    inputs = {info.name: declared_dims(info) or () for info in file.model.graph.input if info.name not in file.weights}
    axes = batch_axes(inputs)
    if not axes:
        return None
    outputs = {info.name: declared_dims(info) for info in file.model.graph.output}
    fixed = (name for name, dims in outputs.items() if dims is not None and (not dims or isinstance(dims[0], int)))
    whole = next((info.name for info in file.model.graph.output if not _has_item_each(info.type)), None)
    if whole is not None:
        return f"output {whole}"
    elsewhere = next((f"input {name}" for name in inputs if axes.get(name) != 0), None)
    return (
        elsewhere
        or mixed_output(path)
        or next((f"output {name}" for name in fixed), None)
        or find_constant_output(path)
    )


def find_constant_output(path: Path) -> str | None:
    """Return ``"output NAME"`` of an output with equally many rows for one and two items, such as a detector's anchors.

    None without such an output, or when the file lacks the shapes.
    """
    from gpuprof.graph.load import load_graph

    try:
        alone, whole = (load_graph(path, batch).outputs for batch in (1, ITEMS))
    except GpuprofError:
        return None
    pairs = zip(alone, whole, strict=True)
    return next((f"output {two.name}" for one_item, two in pairs if two.shape[:1] == one_item.shape[:1]), None)


def _has_item_each(kind: TypeProto) -> bool:
    """Return whether an output has a part for each item of a batch: a tensor, or a map per item, as ZipMap gives."""
    held = kind.WhichOneof("value")
    return held in (None, "tensor_type") or (
        held == "sequence_type" and kind.sequence_type.elem_type.WhichOneof("value") == "map_type"
    )


def mixed_output(path: Path) -> str | None:
    """Return the name of an output that mixes the items of a batch; None: no such output, or unknown.

    Unless its ops already prove independence, the model runs on this machine's CPU at batches of one and two. An output
    equal for all inputs mixes nothing; a random model, or a model that refuses the test inputs, remains unknown. Raises
    `UnavailableError` when ONNX Runtime is not installed.
    """
    from gpuprof.errors import runtime_errors
    from gpuprof.graph.dims import declared_dims
    from gpuprof.graph.file import read_onnx
    from gpuprof.graph.inputs import random_inputs
    from gpuprof.graph.load import load_runnable
    from gpuprof.runtime.session import open_session

    file = read_onnx(path)
    declared = {
        info.name: declared_dims(info) or () for info in file.model.graph.input if info.name not in file.weights
    }
    axes = batch_axes(declared)
    if not axes:
        return None
    if _shows_items_apart(path, axes):
        return None  # running the model takes seconds
    session = open_session(path, threads=len(os.sched_getaffinity(0)), provider=ORT_CPU)
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Arrays) -> Arrays:
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))

    refusals: tuple[type[Exception], ...] = (GpuprofError, *runtime_errors())
    try:
        graph = load_runnable(path, ITEMS)
        quantised = any(op.op_type.startswith(_QUANTISING) for op in graph.ops)
        return first_mixed(run, lambda seed: random_inputs(graph, seed), axes, quantised=quantised)
    except refusals:
        return None


def _shows_items_apart(path: Path, axes: Mapping[str, int]) -> bool:
    from gpuprof.graph.item_independence import BoundGraph, computes_items_apart
    from gpuprof.graph.load import load_graph, load_nodes

    try:
        alone, whole = (BoundGraph(load_graph(path, batch), load_nodes(path, batch)[1]) for batch in (1, ITEMS))
    except GpuprofError:
        return False
    return computes_items_apart(whole, alone, (name for name, axis in axes.items() if axis == 0))


def first_mixed(
    run: Callable[[Arrays], Arrays],
    inputs: Callable[[int], Arrays],
    axes: Mapping[str, int],
    *,
    quantised: bool = False,
) -> str | None:
    """Return the first output of ``run`` that mixes the two items of a batch, None without such an output.

    ``run``: inputs by name → outputs by name; ``inputs``: seed → inputs of a batch of two; ``axes``: batch dimension of
    each input with a batch; ``quantised``: the model quantises dynamically, by its inputs' values.
    """

    def run_plain(values: Arrays) -> Arrays:
        return {name: to_numbers(value) for name, value in run(values).items()}

    output = None
    for seed in _SEEDS:
        whole = inputs(seed)
        together = run_plain(whole)
        alone = [run_plain(_item(whole, axes, number)) for number in range(ITEMS)]
        # The same item twice: outputs that differ between both are random, and cannot show mixing.
        again = run_plain(_item(whole, axes, 0))
        names = [name for name in together if _is_close(alone[0][name], again[name], quantised)]  # others are random
        output = next(
            (name for name in names if _is_mixed(together[name], [one[name] for one in alone], quantised)), None
        )
        if output is None:
            return None
    return output


def _item(whole: Arrays, axes: Mapping[str, int], number: int) -> dict[str, Array]:
    return {name: np.take(value, [number], axis=axes[name]) if name in axes else value for name, value in whole.items()}


def _is_mixed(together: Array, alone: list[Array], quantised: bool) -> bool:
    first, second = (np.asarray(value) for value in alone)
    together = np.asarray(together)
    if together.shape == first.shape == second.shape:  # without a batch: a constant, or something of all items
        return not all(_is_close(one, together, quantised) for one in (first, second))
    axis = _axis(together.shape, first.shape)
    if axis is None or first.shape != second.shape:
        return True
    size = first.shape[axis]
    return not all(
        _is_close(one, np.take(together, range(number * size, (number + 1) * size), axis=axis), quantised)
        for number, one in enumerate((first, second))
    )


def _axis(together: tuple[int, ...], alone: tuple[int, ...]) -> int | None:
    """Return the single dimension twice as long for two items; None without such a dimension."""
    if len(together) != len(alone):
        return None
    longer = [axis for axis, (two, one) in enumerate(zip(together, alone, strict=True)) if two != one]
    return longer[0] if len(longer) == 1 and together[longer[0]] == ITEMS * alone[longer[0]] else None


def _is_close(want: Array, got: Array, quantised: bool) -> bool:
    want, got = np.asarray(want), np.asarray(got)
    if want.shape != got.shape:
        return False
    kind = str(want.dtype)
    if want.dtype.kind != "f" and kind != "bfloat16":
        return bool(np.array_equal(want, got))
    tolerance = max(TOLERANCE.get(kind, _TOLERANCE), _QUANTISED_TOLERANCE if quantised else 0.0)
    a, b = want.astype(np.float64), got.astype(np.float64)
    # Largest finite value: attention masks give infinities, and relative errors near zero mean nothing.
    scale = float(np.abs(a[np.isfinite(a)]).max(initial=1e-6))
    return bool(np.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True))
