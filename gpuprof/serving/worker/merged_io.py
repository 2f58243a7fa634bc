"""Batches of a merged model: each of its models has its own rows in them, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuprof.graph.merged_model import MergedModel
from gpuprof.serving.transport.batch_io import BatchInputs, BatchOutputs, Part
from gpuprof.serving.transport.metadata import ModelSpec

if TYPE_CHECKING:
    from gpuprof.serving.transport.datatypes import Array


class MergedInputs(BatchInputs):
    """Reads the tensors of a batch; models without a request in it get empty tensors."""

    def __init__(self, spec: ModelSpec, arena: memoryview, merged: MergedModel) -> None:
        super().__init__(spec, arena)
        self._absent: dict[int, Array] = {}
        for member in merged.members:
            self._absent |= {spec.input_index[name]: value for name, value in member.nothing().items()}

    def gather(self, parts: Sequence[Part], payload: memoryview) -> list[Array]:
        """Return the merged model's inputs."""
        arrays = super().gather(parts, payload)
        return [array if len(array) else self._absent[position] for position, array in enumerate(arrays)]


class MergedOutputs(BatchOutputs):
    """Writes the outputs of a batch: a request's rows follow the earlier rows of its own model."""

    def __init__(self, spec: ModelSpec, arena: memoryview, merged: MergedModel) -> None:
        super().__init__(spec, arena)
        self._of_input: dict[int, int] = {}
        self._of_output: dict[int, int] = {}
        for number, member in enumerate(merged.members):
            self._of_input |= {spec.input_index[value.merged]: number for value in member.inputs}
            self._of_output |= {spec.output_index[value.merged]: number for value in member.outputs}

    def find_row_offsets(self, parts: Sequence[Part]) -> list[int]:
        """Return the first row of each request's outputs."""
        reached: dict[int, int] = {}
        begins = []
        for part in parts:
            member = self._member(part)
            begins.append(reached.get(member, 0))
            reached[member] = begins[-1] + part.rows
        return begins

    def rows(self, parts: Sequence[Part], position: int) -> int:
        """Return the number of rows of an output of the batch, the rows of its own model."""
        return sum(part.rows for part in parts if self._member(part) == self._of_output[position])

    def _member(self, part: Part) -> int:
        # A request is for a single model: it has no rows in the inputs of the others.
        return next(self._of_input[i] for i, (shape, _, _) in enumerate(part.inputs) if shape[0])
