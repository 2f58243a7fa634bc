"""Small ONNX files of many kinds, with random weights, as their users' tools write them.

They are small, since what matters is which ops, inputs and types a kind has, and how its exporter writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes
    ----------
    name : str
    build : callable
        Writes the model to the path that it is given.
    dims : mapping of str to int
        Sizes of free dimensions that have no usual size: what the user gives with ``--dim``.
    """

    name: str
    build: Callable[[Path], object]
    dims: Mapping[str, int] = field(default_factory=dict)
