"""The arguments of a cost formula: a node's operands by position, its results and its attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from gpuprof.domain.model import Tensor


@dataclass(frozen=True, slots=True)
class OpCall:
    """A node with its shapes."""

    op_type: str
    domain: str
    #: ``inputs``, ``outputs``: Tensors by ONNX's positions; None for absent optional tensors.
    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]
    attributes: Mapping[str, object]

    @property
    def x(self) -> Tensor:
        """The first input."""
        return self.input(0)

    @property
    def y(self) -> Tensor:
        """The first output."""
        tensor = self.outputs[0] if self.outputs else None
        if tensor is None:
            raise ValueError(f"{self.op_type} has no first output")
        return tensor

    def input(self, position: int) -> Tensor:
        """Return a required input of the op. Raises `ValueError` if absent."""
        tensor = self.optional(position)
        if tensor is None:
            raise ValueError(f"{self.op_type} lacks its input {position}")
        return tensor

    def optional(self, position: int) -> Tensor | None:
        """Return an input, or None when it is absent."""
        return self.inputs[position] if position < len(self.inputs) else None

    def has(self, position: int) -> bool:
        """Return whether an input is given."""
        return self.optional(position) is not None

    def whole(self, name: str, default: int) -> int:
        """Return an integer attribute."""
        value = self.attributes.get(name, default)
        return value if isinstance(value, int) else default

    def number(self, name: str, default: float) -> float:
        """Return a float attribute."""
        value = self.attributes.get(name, default)
        return float(value) if isinstance(value, int | float) else default

    def text(self, name: str, default: str) -> str:
        """Return a string attribute."""
        value = self.attributes.get(name, default)
        return value if isinstance(value, str) else default

    def wholes(self, name: str) -> tuple[int, ...]:
        """Return a list of integers, empty when absent."""
        value = self.attributes.get(name, ())
        return tuple(int(item) for item in value) if isinstance(value, list | tuple) else ()


def count_slices(tensor: Tensor, first_axis: int) -> int:
    """Return the number of slices of ``tensor`` before ``first_axis`` (negative: from the end)."""
    axis = first_axis + len(tensor.shape) if first_axis < 0 else first_axis
    return prod(tensor.shape[:axis])
