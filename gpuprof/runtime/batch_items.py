"""Tests whether the items of a batch are computed independently, as batching of several requests requires.

Shapes do not show this: a softmax over the wrong axis or a normalisation over the batch gives outputs of the right
shape, in which each request depends on all others. So a batch of two different items is run, and each item alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from onnx import TypeProto

from gpuprof.domain.file_access import write_atomically
from gpuprof.errors import GpuprofError
from gpuprof.graph.dims import batch_axes
from gpuprof.graph.item_independence import are_items_apart
from gpuprof.graph.served_interface import find_unbatched
from gpuprof.runtime.child_process import CrashError, call_apart
from gpuprof.runtime.module_command import ANSWER_S
from gpuprof.runtime.outputs import DEFAULT_TOLERANCE, QUANTISED_TOLERANCE, is_close, is_collection, to_numbers
from gpuprof.runtime.providers import ORT_CPU

Array = npt.NDArray[np.generic]
Arrays = Mapping[str, Array]

#: Tolerance relative to an output's largest value: for another batch size a runtime uses other kernels, with another
#: order of additions; on GPUs TF32 keeps three digits. Mixing changes outputs by about as much as their values.
TOLERANCE = {"float16": 5e-2, "bfloat16": 2e-1}
#: Batch size of the test.
ITEMS = 2
#: Seeds of the inputs; mixing must show for all seeds. An index, for example, may differ by chance between nearly equal
#: values.
_SEEDS = (0, 1)
#: Size of other free dimensions, such as a text's length, where the model takes it: mixing does not depend on it.
_SHORT = 16


def find_mixed_output(path: Path, *, in_child: bool = False) -> str | None:
    """Return the reason why requests must not share a batch; None if they may, or if this is unknown.

    The reason is the name of an output that mixes items, or ``"input NAME"`` or ``"output NAME"`` of a tensor whose
    first dimension is not the batch, so that it cannot be split by request. The model is run unless its ops prove that
    they keep items apart; with ``in_child`` in a process of its own. Raises `UnavailableError` when ONNX Runtime is not
    installed; `CrashError` if the model ends that process.
    """
    from gpuprof.graph.dims import declared_dims
    from gpuprof.graph.file import read_onnx

    file = read_onnx(path)
    inputs = {info.name: declared_dims(info) or () for info in file.inputs}
    if not batch_axes(inputs):
        return None
    outputs = {info.name: declared_dims(info) for info in file.model.graph.output}
    unsplit = next((info.name for info in file.model.graph.output if not _has_item_each(info.type)), None)
    if unsplit is not None:
        return f"output {unsplit}"
    run = partial(call_apart, mixed_output, within_s=ANSWER_S) if in_child else mixed_output
    # Of outputs without a declared shape, a server knows what the runtime tells.
    is_proven = None not in outputs.values() and are_items_apart(path)
    return (
        find_unbatched(inputs, {})
        or (None if is_proven else run(path))  # before the outputs' dimensions: it names the cause
        or find_unbatched(inputs, outputs)
        or find_constant_output(path)
    )


def find_constant_output(path: Path) -> str | None:
    """Return ``"output NAME"`` of an output with equally many rows for one and two items, such as a detector's anchors.

    None without such an output, or when the file lacks the shapes.
    """
    from gpuprof.graph.load import load_graph

    try:
        single, batched = (load_graph(path, batch).outputs for batch in (1, ITEMS))
    except GpuprofError:
        return None
    pairs = zip(single, batched, strict=True)
    return next((f"output {output.name}" for one_item, output in pairs if output.shape[:1] == one_item.shape[:1]), None)


def _has_item_each(kind: TypeProto) -> bool:
    """Return whether an output has an entry for each item of a batch: a tensor, or a map per item, as from ZipMap."""
    value_kind = kind.WhichOneof("value")
    return value_kind in (None, "tensor_type") or (
        value_kind == "sequence_type" and kind.sequence_type.elem_type.WhichOneof("value") == "map_type"
    )


def mixed_output(path: Path) -> str | None:
    """Return the name of an output that mixes the items of a batch; None: no such output, or unknown.

    An output of which the runtime knows no batch is ``"output NAME"``. The model runs on this machine's CPU at
    batches of one and two. An output equal for all inputs mixes nothing; a random model, or a model that refuses the
    test inputs, remains unknown. Raises `UnavailableError` when ONNX Runtime is not installed.
    """
    from gpuprof.errors import runtime_errors
    from gpuprof.graph.dims import declared_dims
    from gpuprof.graph.file import read_onnx
    from gpuprof.graph.inputs import random_inputs
    from gpuprof.graph.load import load_runnable
    from gpuprof.runtime.session import open_session

    file = read_onnx(path)
    dims = {info.name: declared_dims(info) or () for info in file.inputs}
    axes = batch_axes(dims)
    if not axes:
        return None
    session = open_session(path, threads=len(os.sched_getaffinity(0)), provider=ORT_CPU)
    names = [output.name for output in session.get_outputs()]
    # Of outputs without a declared shape, or with a wrong one, a server knows what the runtime tells.
    declared = {info.name for info in file.model.graph.output if declared_dims(info) is not None}
    tensors = [output for output in session.get_outputs() if not is_collection(output.type)]
    shapes = {output.name: tuple(output.shape) for output in tensors if not output.shape or output.name not in declared}
    unbatched = find_unbatched(dims, shapes) if shapes else None

    def run(inputs: Arrays) -> Arrays:
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))

    with suppress(GpuprofError):
        graph = load_runnable(path, ITEMS)
        quantised = any(op.op_type.startswith("DynamicQuantize") for op in graph.ops)
        for most in _SHORT, None:
            with suppress(GpuprofError, *runtime_errors()):
                sizes = {name: size if most is None else min(size, most) for name, size in graph.sizes}
                sized = load_runnable(path, ITEMS, dims=sizes)
                return first_mixed(run, partial(random_inputs, sized), axes, quantised=quantised) or unbatched
    return unbatched


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
        batch = inputs(seed)
        outputs = run_plain(batch)
        items = [run_plain(_item(batch, axes, number)) for number in range(ITEMS)]
        mixed = [name for name in outputs if _is_mixed(outputs[name], [item[name] for item in items], quantised)]
        if not mixed:
            return None
        # The same item twice: outputs that differ between both are random, and cannot show mixing.
        rerun = run_plain(_item(batch, axes, 0))
        output = next((name for name in mixed if _is_close(items[0][name], rerun[name], quantised)), None)
        if output is None:
            return None
    return output


def _item(batch: Arrays, axes: Mapping[str, int], number: int) -> dict[str, Array]:
    return {name: np.take(value, [number], axis=axes[name]) if name in axes else value for name, value in batch.items()}


def _is_mixed(batched: Array, items: list[Array], quantised: bool) -> bool:
    first, second = (np.asarray(value) for value in items)
    batched = np.asarray(batched)
    if batched.shape == first.shape == second.shape:  # without a batch: a constant, or something of all items
        return not all(_is_close(item, batched, quantised) for item in (first, second))
    axis = _axis(batched.shape, first.shape)
    if axis is None or first.shape != second.shape:
        return True
    size = first.shape[axis]
    return not all(
        _is_close(item, np.take(batched, range(number * size, (number + 1) * size), axis=axis), quantised)
        for number, item in enumerate((first, second))
    )


def _axis(batched: tuple[int, ...], single: tuple[int, ...]) -> int | None:
    """Return the only dimension that is twice as long for two items; None if there is no such dimension."""
    if len(batched) != len(single):
        return None
    longer = [axis for axis, (a, b) in enumerate(zip(batched, single, strict=True)) if a != b]
    return longer[0] if len(longer) == 1 and batched[longer[0]] == ITEMS * single[longer[0]] else None


def _is_close(expected: Array, actual: Array, quantised: bool) -> bool:
    expected, actual = np.asarray(expected), np.asarray(actual)
    kind = str(expected.dtype)
    if expected.dtype.kind != "f" and kind != "bfloat16":
        return is_close(expected, actual, None)
    floor = QUANTISED_TOLERANCE if quantised else 0.0
    return is_close(expected, actual, max(TOLERANCE.get(kind, DEFAULT_TOLERANCE), floor))


#: Below the database: a file for each model's content.
DIRECTORY = ".batched"


class BatchVerdicts:
    """Cached results of the test whether a model may batch several requests, by the hash of the model's content.

    ``database``: the kernel database; None: results are kept in memory only.
    """

    def __init__(self, database: Path | None) -> None:
        self._directory = None if database is None else database / DIRECTORY
        self._known: dict[str, str | None] = {}
        self._unsaved: set[str] = set()

    def mixed_output(self, sha256: str | None) -> str | None:
        """Return the stored result of `gpuprof.runtime.batch_items.find_mixed_output`; also None if unknown."""
        return self._known[sha256] if sha256 and self._is_known(sha256) else None

    def judge(self, path: Path, sha256: str) -> str | None:
        """Return the same, running the model if necessary; also None if the model cannot be run here.

        Raises `CrashError` if the model ends the process that runs it.
        """
        if not self._is_known(sha256):
            try:
                mixed_output = find_mixed_output(path, in_child=True)
            except CrashError:
                raise
            except GpuprofError:
                return None
            self.keep(sha256, mixed_output)
        return self._known[sha256]

    def keep(self, sha256: str, mixed: str | None) -> None:
        """Record the result for a file's content."""
        self._known[sha256] = mixed
        self._unsaved.add(sha256)
        self.save()

    def save(self) -> None:
        """Write new results if the database exists by now; unwritable results stay in memory."""
        if self._directory is None or not self._directory.parent.is_dir():
            return
        with suppress(OSError):
            self._directory.mkdir(exist_ok=True)
            while self._unsaved:
                sha256 = self._unsaved.pop()
                verdict = json.dumps({"mixed": self._known[sha256]})
                write_atomically(self._directory / f"{sha256}.json", verdict.encode())

    def _is_known(self, sha256: str) -> bool:
        if sha256 not in self._known and self._directory is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                verdict = json.loads((self._directory / f"{sha256}.json").read_text(encoding="utf-8"))["mixed"]
                self._known[sha256] = None if verdict is None else str(verdict)
        return sha256 in self._known


def describe_mixing(model: str, output: str) -> str:
    """Return the reason, found by `find_mixed_output`, why requests for a model cannot share a batch."""
    if output.startswith(("input ", "output ")):
        return (
            f"{model} cannot have several requests in one batch: the first dimension alone of its {output} must be "
            "the batch"
        )
    return f"{model} mixes the items of a batch: its output {output} for one depends on the others"
