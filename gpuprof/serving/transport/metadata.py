"""Inputs and outputs of a served model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or an output of a model."""

    name: str
    datatype: str  #: Name in the Open Inference Protocol, ``"FP32"``.
    shape: tuple[int, ...]  #: -1 where any size will do.

    def mismatch(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of ``shape`` does not fit."""
        if len(shape) != len(self.shape):
            return True
        return any(expected not in (-1, size) for expected, size in zip(self.shape, shape, strict=True))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as described by its workers."""

    name: str
    version: str
    platform: str  #: Runtime of the model, ``"onnxruntime_onnx"``.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int  #: Largest number of rows in a request; 0 when the first dimension is not a batch.
    #: ``input_index``, ``output_index``: Position by name.
    input_index: dict[str, int] = field(init=False)
    output_index: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_index", {spec.name: i for i, spec in enumerate(self.inputs)})
        object.__setattr__(self, "output_index", {spec.name: i for i, spec in enumerate(self.outputs)})

    def to_message(self) -> dict[str, Any]:
        """Return the spec as JSON for the wire."""
        return {
            "name": self.name,
            "version": self.version,
            "platform": self.platform,
            "inputs": [[spec.name, spec.datatype, spec.shape] for spec in self.inputs],
            "outputs": [[spec.name, spec.datatype, spec.shape] for spec in self.outputs],
            "max_batch": self.max_batch,
        }

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> ModelSpec:
        """Return the specification written by `to_message`."""
        return cls(
            message["name"],
            message["version"],
            message["platform"],
            tuple(TensorSpec(name, datatype, tuple(shape)) for name, datatype, shape in message["inputs"]),
            tuple(TensorSpec(name, datatype, tuple(shape)) for name, datatype, shape in message["outputs"]),
            message["max_batch"],
        )


def is_batched(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Return whether the first dimension of every input and output is a common batch dimension of any size."""
    return bool(inputs) and all(spec.shape[:1] == (-1,) for spec in (*inputs, *outputs))
