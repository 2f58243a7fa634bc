"""ONNX Runtime on a GPU with I/O binding: inputs are copied to the device before the model runs.

The copy goes through the default stream, the model through a stream of its session, which does not wait for the
default stream. So a batch is copied during the previous batch if another thread does the copying. Source: ONNX
Runtime's documentation, "I/O Binding" and "CUDA Execution Provider".

Models listed in `gpuprof.rules.padding` get full batches only: smaller batches are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprof.graph.op_types import list_op_types
from gpuprof.rules.padding import needs_padding
from gpuprof.serving.worker.runtime import ModelError, OnnxRuntime

if TYPE_CHECKING:
    from gpuprof.serving.transport.datatypes import Array


@dataclass(frozen=True, slots=True)
class StagedInputs:
    """Inputs in the memory from which the model runs."""

    binding: Any  #: I/O binding; None: inputs that cannot be bound, and are passed unchanged.
    inputs: Sequence[Array]
    #: Number of requested rows of a padded batch; None: all.
    rows: int | None = None


class BoundRuntime(OnnxRuntime):
    """A session that copies inputs to its device in a step before the run.

    ``device``: ONNX Runtime's name of the device, ``"cuda"``, which is the first visible device of the process.
    """

    def __init__(
        self, name: str, version: str, path: Path, batch: int, threads: int, provider: str, device: str = "cuda"
    ) -> None:
        super().__init__(name, version, path, batch, threads, provider)
        self._device = device
        # A merged model's members have their own numbers of rows, possibly 0.
        is_padded = self.spec.max_batch > 1 and not self.is_merged and needs_padding(list_op_types(path))
        self.full_rows = self.spec.max_batch if is_padded else None
        datatypes = {spec.datatype for spec in (*self.spec.inputs, *self.spec.outputs)}
        self._can_bind = not datatypes & {"BYTES", "BF16"}  # strings stay on the host; NumPy has no bfloat16

    def stage(self, inputs: Sequence[Array]) -> StagedInputs:
        """Copy inputs to the device. Raises `ModelError` when the device has no memory left for them."""
        import numpy as np
        import onnxruntime as ort

        inputs, rows = self._fill_up(inputs)
        if not self._can_bind or any(array.size == 0 for array in inputs):
            return StagedInputs(None, inputs, rows)
        binding = self._session.io_binding()
        try:
            for spec, array in zip(self.spec.inputs, inputs, strict=True):
                value = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self._device, 0)
                binding.bind_ortvalue_input(spec.name, value)
        except self._errors as error:
            raise ModelError(" ".join(str(error).split())[:300]) from error
        return StagedInputs(binding, inputs, rows)

    def _fill_up(self, inputs: Sequence[Array]) -> tuple[Sequence[Array], int | None]:
        """Return full inputs, and the number of their requested rows; None for unchanged inputs.

        The padding copies the last row: unlike zeros, such values are valid inputs of the model.
        """
        import numpy as np

        rows = len(inputs[0]) if inputs and self.full_rows is not None else 0
        if self.full_rows is None or not 0 < rows < self.full_rows:
            return inputs, None
        missing = self.full_rows - rows
        return [np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) for array in inputs], rows

    def run_staged(self, inputs: StagedInputs, positions: Sequence[int]) -> list[Array]:
        """Run the model on staged inputs; return the outputs at ``positions``, on the host.

        Raises `ModelError` when the model fails on the inputs.
        """
        if inputs.binding is None:
            return _drop_filling(super().run(inputs.inputs, positions), inputs.rows)
        binding = inputs.binding
        try:
            for position in positions:
                binding.bind_output(self._names[position], self._device)
            self._session.run_with_iobinding(binding)
            outputs: list[Array] = binding.copy_outputs_to_cpu()
        except self._errors as error:
            raise ModelError(" ".join(str(error).split())[:300]) from error
        return _drop_filling(outputs, inputs.rows)

    def run(self, inputs: Sequence[Array], positions: Sequence[int]) -> list[Array]:
        """Copy inputs to the device and run the model on them."""
        return self.run_staged(self.stage(inputs), positions)


def _drop_filling(outputs: list[Array], rows: int | None) -> list[Array]:
    """Return the requested rows. Outputs without a row per item are checked by the caller."""
    return outputs if rows is None else [array[:rows] if array.ndim else array for array in outputs]
