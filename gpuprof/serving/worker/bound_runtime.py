"""ONNX Runtime on a GPU: inputs of the next batch are gathered in pinned memory during the current batch.

Models run as `gpuprof.runtime.gpu_session` decides, in the same way as in `gpuprof profile`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.rules.padding import padded_size
from gpuprof.runtime.gpu_session import GpuSession, HostMemory, StagedBatch, is_bindable, open_on_gpu, open_plainly
from gpuprof.serving.worker.runtime import ModelError, OnnxRuntime, varied_inputs

if TYPE_CHECKING:
    from gpuprof.serving.transport.datatypes import Array


@dataclass(frozen=True, slots=True)
class StagedInputs:
    """Inputs of a batch on their way to the device."""

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
            raise ModelError(" ".join(str(error).split())[:300]) from error

    def run(self, inputs: Sequence[Array], positions: Sequence[int]) -> list[Array]:
        """Run the model on inputs; return the outputs as `run_staged`."""
        return self.run_staged(self.stage(inputs), positions)
