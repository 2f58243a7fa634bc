"""Runtimes of a worker: ONNX Runtime, or a null model that shows the overhead of serving."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpuprof.errors import InputError, UnavailableError, runtime_errors, shorten_message
from gpuprof.graph.merged_model import read_description
from gpuprof.graph.served_interface import find_unbatched, mixed_types_error
from gpuprof.rules.batching import padded_size
from gpuprof.runtime.gpu_session import GpuSession, HostMemory, StagedBatch, is_bindable, open_on_gpu, open_plainly
from gpuprof.runtime.outputs import is_collection, is_sequence_of_maps, to_texts
from gpuprof.runtime.session import open_session, run_by_bits
from gpuprof.serving.transport.datatypes import NUMPY_NAMES, ModelSpec, TensorSpec, datatype_of, is_batched

if TYPE_CHECKING:
    from gpuprof.serving.transport.datatypes import Array


NULL_PREFIX = "null:"
_NULL_SIZE = re.compile(r"(\d+)([km]?)")


class ModelError(Exception):
    """The model raised an error on its inputs."""


class Runtime(Protocol):
    """A loaded, runnable model."""

    spec: ModelSpec
    placeholders: Mapping[int, Array]
    """By position, what a merged model takes for an input without rows where it cannot take an empty one."""

    def run(self, inputs: Sequence[Array], positions: Sequence[int]) -> list[Array]:
        """Return the outputs at ``positions``.

        Raises `ModelError` when the model cannot work on these inputs.
        """


def null_bytes(path: str) -> int:
    """Return the bytes of a row of the null model ``null:4``, ``null:600k`` or ``null:1m``.

    Raises `InputError` for any other form, and for sizes of nothing or beyond a gigabyte.
    """
    match = _NULL_SIZE.fullmatch(path.removeprefix(NULL_PREFIX).lower())
    size = int(match[1]) * {"": 1, "k": 1000, "m": 1_000_000}[match[2]] if match else 0
    if not 1 <= size <= 1_000_000_000:
        raise InputError(f"{path!r} is not a null model", "write null: and the bytes of a request, null:4 or null:600k")
    return size


class NullRuntime:
    """The identity model: FP32 where the size is a multiple of 4 bytes, UINT8 otherwise."""

    placeholders: Mapping[int, Array] = {}

    def __init__(self, name: str, version: str, row_bytes: int, batch: int) -> None:
        datatype, item = ("UINT8", 1) if row_bytes % 4 else ("FP32", 4)
        shape = (-1, row_bytes // item)
        self.spec = ModelSpec(
            name,
            version,
            "gpuprof_null",
            (TensorSpec("INPUT0", datatype, shape),),
            (TensorSpec("OUTPUT0", datatype, shape),),
            batch,
        )

    def run(self, inputs: Sequence[Array], positions: Sequence[int]) -> list[Array]:
        """Return the inputs unchanged."""
        return [inputs[position] for position in positions]


class OnnxRuntime:
    """A session of ONNX Runtime."""

    def __init__(self, name: str, version: str, path: Path, batch: int, threads: int, provider: str) -> None:
        if not path.is_file():
            raise InputError(f"cannot read {path}: no such file")
        self._session = open_session(path, threads=threads, provider=provider)
        self._errors: tuple[type[Exception], ...] = (*runtime_errors(), UnavailableError)
        merged = read_description(self._session.get_modelmeta().custom_metadata_map, str(path))
        self.is_merged = merged is not None
        feeds = self._session.get_inputs()
        # Clients tell outputs apart by name: an output that the model lists twice is served once.
        results = list({value.name: value for value in self._session.get_outputs()}.values())
        inputs, outputs = tuple(map(_spec, feeds)), tuple(map(_output_spec, results))
        mixed = None
        tensors = [value for value in results if not is_collection(value.type)]
        unbatched = find_unbatched(*({value.name: tuple(value.shape) for value in side} for side in (feeds, tensors)))
        batched = is_batched(inputs, outputs) and unbatched is None
        # Sequences have a row for each item only if they hold maps.
        batched = batched and all(value in tensors or is_sequence_of_maps(value.type) for value in results)
        batched = batched and not _gives_constant_rows(path, feeds, results)
        if batched and batch > 1 and not self.is_merged:
            mixed = self._find_mixed_output(inputs, outputs)
        if batch > 1 and (mixed or not batched):
            part = f"its {unbatched}" if unbatched else "all that it takes and gives"
            reason = f"the first dimension alone of {part} must be the batch"
            reason = f"output {mixed} relates its items to one another" if mixed else reason
            raise InputError(
                f"{path} cannot be served with batches of {batch}: {reason}",
                "place it with batches of 1" if mixed else "make its batch dynamic, or place it with batches of 1",
            )
        self.spec = ModelSpec(name, version, "onnxruntime_onnx", inputs, outputs, batch if batched else 0)
        members = () if merged is None else merged.members
        values = {name: value for member in members for name, value in member.nothing().items()}
        self.placeholders: Mapping[int, Array] = {
            self.spec.input_index[name]: value for name, value in values.items() if len(value)
        }
        self._names = [spec.name for spec in outputs]
        types = {spec.datatype for spec in (*inputs, *outputs)}
        if {"BF16", "BYTES"} <= types:
            raise mixed_types_error(str(path))
        self._bfloat16 = "BF16" in types

    def _find_mixed_output(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str | None:
        """Return an output that mixes the items of a batch, though its shape does not show it."""
        from gpuprof.runtime.batch_items import ITEMS, Arrays, first_mixed

        names, axes = [spec.name for spec in outputs], {spec.name: 0 for spec in inputs}

        def run(feeds: Arrays) -> Arrays:
            return dict(zip(names, self._session.run(names, dict(feeds)), strict=True))

        def draw(seed: int) -> Arrays:
            return dict(zip(axes, varied_inputs(inputs, ITEMS, seed), strict=True))

        try:  # quantisation is unknown here, so the wider tolerance applies
            return first_mixed(run, draw, axes, quantised=True)
        except self._errors:  # not every model works on random inputs
            return None

    def run(self, inputs: Sequence[Array], positions: Sequence[int]) -> list[Array]:
        """Run the session."""
        names = [self._names[position] for position in positions]
        feeds = {spec.name: array for spec, array in zip(self.spec.inputs, inputs, strict=True)}
        try:
            if self._bfloat16:
                return run_by_bits(self._session, names, feeds)
            return [_array(value) for value in self._session.run(names, feeds)]
        except self._errors as error:
            raise ModelError(shorten_message(error)) from error


def _gives_constant_rows(path: Path, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Return whether an output's rows do not depend on the batch; reads the file only if names do not tell."""
    batches = {value.shape[0] for value in inputs if value.shape and isinstance(value.shape[0], str)}
    if all(value.shape and value.shape[0] in batches for value in outputs):
        return False
    from gpuprof.runtime.batch_items import find_constant_output

    return find_constant_output(path) is not None


def _array(value: Any) -> Array:
    import numpy as np

    return to_texts(value) if isinstance(value, list | dict) else np.asarray(value)


def _output_spec(value: Any) -> TensorSpec:
    """Return the specification of a served output: tensors unchanged, sequences and maps as JSON texts."""
    if is_collection(value.type):
        return TensorSpec(value.name, "BYTES", (1,) if value.type.startswith("map(") else (-1,))
    return _spec(value)


def _spec(value: Any) -> TensorSpec:
    datatype = datatype_of(value.type, value.name)
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in value.shape)
    return TensorSpec(value.name, datatype, shape)


def varied_inputs(inputs: Sequence[TensorSpec], rows: int | None, seed: int) -> list[Array]:
    """Return inputs whose items differ, with open dimensions 1: standard normal, or 0 and 1; masks are all ones.

    ``rows``: items of the batch; None: the first dimension is no batch.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    arrays: list[Array] = []
    for spec in inputs:
        sizes = [1 if size == -1 else size for size in spec.shape]
        shape = sizes if rows is None else (rows, *sizes[1:])
        if spec.datatype == "BYTES":
            arrays.append(np.full(shape, "a", dtype=object))
        elif "mask" in spec.name.lower() or spec.datatype == "BOOL":
            arrays.append(np.ones(shape, NUMPY_NAMES[spec.datatype]))
        elif spec.datatype.startswith(("INT", "UINT")):
            arrays.append(random.integers(0, 2, shape).astype(NUMPY_NAMES[spec.datatype]))
        else:
            arrays.append(random.standard_normal(shape).astype(NUMPY_NAMES[spec.datatype]))
    return arrays


@dataclass(frozen=True, slots=True)
class StagedInputs:
    """Inputs of a batch that have been gathered for the device."""

    batch: StagedBatch | None  #: None: inputs that cannot be bound, and are passed unchanged.
    inputs: Sequence[Array]


class BoundRuntime(OnnxRuntime):
    """A model on a GPU. It must be created and run in a single thread; `stage` may be called in another.

    ``device``: ONNX Runtime's name of the device, ``"cuda"``, which is the first visible device of the process;
    ``memory``: default pinned memory.
    """

    def __init__(
        self,
        name: str,
        version: str,
        path: Path,
        batch: int,
        threads: int,
        provider: str,
        device: str = "cuda",
        memory: HostMemory | None = None,
    ) -> None:
        super().__init__(name, version, path, batch, threads, provider)
        self._gpu: GpuSession | None = None
        if not is_bindable(self._session):
            return
        self._session = None  # its memory is the trial's
        rows = self.spec.max_batch or None
        names = [spec.name for spec in self.spec.inputs]
        # A merged model's members have their own numbers of rows, possibly 0.
        if not self.is_merged:
            feeds = dict(zip(names, varied_inputs(self.spec.inputs, rows, seed=0), strict=True))
            try:
                self._gpu = open_on_gpu(path, feeds, rows, threads=threads, memory=memory, device=device)
            except self._errors as error:  # not every model works on random inputs
                sys.stderr.write(f"{name}: no options for GPUs were tried: {error}\n")
        if self._gpu is None:
            self._gpu = open_plainly(path, None if self.is_merged else rows, threads=threads, device=device)
        remarks = "".join(f"; {remark}" for remark in self._gpu.remarks)
        sys.stderr.write(f"{name} runs {self._gpu.options.execution}{remarks}\n")

    def list_sizes(self, batch: int) -> tuple[int, ...]:
        """Return the batch sizes that the session runs, ascending."""
        if self._gpu is None:
            return tuple(range(1, batch + 1))
        padding = self._gpu.options.padding
        return tuple(sorted({padded_size(rows, batch, padding) for rows in range(1, batch + 1)}))

    def stage(self, inputs: Sequence[Array]) -> StagedInputs:
        """Gather inputs for the device."""
        if self._gpu is None:
            return StagedInputs(None, inputs)
        feeds = {spec.name: array for spec, array in zip(self.spec.inputs, inputs, strict=True)}
        return StagedInputs(self._gpu.stage(feeds), inputs)

    def run_staged(self, inputs: StagedInputs, positions: Sequence[int]) -> list[Array]:
        """Run the model on staged inputs; return the outputs at ``positions``, valid until the next batch is run.

        Raises `ModelError` when the model fails on the inputs.
        """
        if inputs.batch is None or self._gpu is None:
            return super().run(inputs.inputs, positions)
        try:
            return self._gpu.run_staged(inputs.batch, [self._names[position] for position in positions])
        except self._errors as error:
            raise ModelError(shorten_message(error)) from error

    def run(self, inputs: Sequence[Array], positions: Sequence[int]) -> list[Array]:
        """Run the model on inputs; return the outputs as `run_staged`."""
        return self.run_staged(self.stage(inputs), positions)
