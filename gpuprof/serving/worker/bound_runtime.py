"""ONNX Runtime on a GPU with I/O binding: inputs are copied to the device before the model is run on them.

The copy goes through the default stream, the model through a stream of its session's own, which does not wait for it:
so a batch is copied while the one before it is computed, if another thread does the copying. Source: ONNX Runtime's
documentation, "I/O Binding" and "CUDA Execution Provider".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprof.serving.worker.runtime import ModelError, OnnxRuntime

if TYPE_CHECKING:
    from gpuprof.serving.transport.datatypes import Array


@dataclass(frozen=True, slots=True)
class StagedInputs:
    """Inputs that are where the model can be run on them."""

    binding: Any  #: None: they could not be bound, and are given as they are.
    inputs: Sequence[Array]


class BoundRuntime(OnnxRuntime):
    """A session whose inputs are copied to its device apart from running it.

    ``device``: as ONNX Runtime calls it, ``"cuda"``; the first that the process sees.
    """

    def __init__(
        self, name: str, version: str, path: Path, batch: int, threads: int, provider: str, device: str = "cuda"
    ) -> None:
        super().__init__(name, version, path, batch, threads, provider)
        self._device = device
        own = {spec.datatype for spec in (*self.spec.inputs, *self.spec.outputs)}
        self._can_bind = not own & {"BYTES", "BF16"}  # strings stay on the host; NumPy has no bfloat16

    def stage(self, inputs: Sequence[Array]) -> StagedInputs:
        """Copy inputs to the device. Raises `ModelError` when the device has no memory left for them."""
        import numpy as np
        import onnxruntime as ort

        if not self._can_bind or any(array.size == 0 for array in inputs):
            return StagedInputs(None, inputs)
        binding = self._session.io_binding()
        try:
            for spec, array in zip(self.spec.inputs, inputs, strict=True):
                value = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self._device, 0)
                binding.bind_ortvalue_input(spec.name, value)
        except self._errors as error:
            raise ModelError(" ".join(str(error).split())[:300]) from error
        return StagedInputs(binding, inputs)

    def run_staged(self, staged: StagedInputs, wanted: Sequence[int]) -> list[Array]:
        """Run the model on inputs that were staged; return the outputs at the positions ``wanted``, on the host.

        Raises `ModelError` when the model cannot work on them.
        """
        if staged.binding is None:
            return super().run(staged.inputs, wanted)
        binding = staged.binding
        try:
            for position in wanted:
                binding.bind_output(self._names[position], self._device)
            self._session.run_with_iobinding(binding)
            outputs: list[Array] = binding.copy_outputs_to_cpu()
        except self._errors as error:
            raise ModelError(" ".join(str(error).split())[:300]) from error
        return outputs

    def run(self, inputs: Sequence[Array], wanted: Sequence[int]) -> list[Array]:
        """Copy inputs to the device and run the model on them."""
        return self.run_staged(self.stage(inputs), wanted)
