"""Ops as rows of numbers, from which the features of all ops are computed at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Families of ops, each with a regressor of its own; ``movement`` shares that of ``elementwise``.
FAMILIES = ("matmul", "conv", "elementwise", "norm", "softmax", "attention", "movement")


@dataclass(frozen=True, slots=True)
class OpTable:
    """N ops."""

    family: NDArray[np.int64]  #: Shape (N,). Positions in `FAMILIES`.
    #: ``b``, ``m``, ``n``, ``k``: Shape (N,). Products: number, rows, columns and depth of each; convolutions: their
    #: equivalent product, with groups as ``b``; attention: batch x heads, queries, keys and head size.
    b: Array
    m: Array
    n: Array
    k: Array
    #: ``flops``, ``read_bytes``, ``written_bytes``: Shape (N,).
    flops: Array
    read_bytes: Array
    written_bytes: Array
    #: ``elements``, ``row``: Shape (N,). Elements of the output, and elements normalised together in a row.
    elements: Array
    row: Array
    width: Array  #: Shape (N,). Bytes of an element.
    #: ``kernel``, ``stride``, ``image``: Shape (N,). Convolutions: side of the kernel, stride, side of the output; 0
    #: for other ops.
    kernel: Array
    stride: Array
    image: Array
    #: Shape (N,). Element-wise ops: 1 where they compute a power or the like; attention: heads of keys over heads of
    #: queries; products: 1 where the second operand is no weight.
    extra: Array
    causal: Array  #: Shape (N,). Whether attention is causal.

    def __len__(self) -> int:
        return len(self.family)

    @property
    def bytes_moved(self) -> Array:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    def take(self, rows: Any) -> OpTable:
        """Return the rows at positions, or where a mask is true."""
        return OpTable(*(getattr(self, field.name)[rows] for field in fields(self)))


def stack_tables(tables: Sequence[OpTable]) -> OpTable:
    """Return the ops of all tables, concatenated."""
    return OpTable(*(np.concatenate([getattr(table, field.name) for table in tables]) for field in fields(OpTable)))


def make_table(family: str, count: int, **columns: Any) -> OpTable:
    """Return ``count`` ops of a family; absent columns are 0, ``b``, ``m``, ``n``, ``k``, ``row``, ``width`` 1."""
    values = {name: np.broadcast_to(np.asarray(value, dtype=float), count).copy() for name, value in columns.items()}
    ones = dict.fromkeys(("b", "m", "n", "k", "row", "width"), np.ones(count))
    zeros = {field.name: np.zeros(count) for field in fields(OpTable)}
    family_column = np.full(count, FAMILIES.index(family))
    return OpTable(**{**zeros, **ones, **values, "family": family_column})


def table_of(rows: Iterable[tuple[str, Mapping[str, float]]]) -> OpTable:
    """Return a table of (family, columns), a row each."""
    ops = list(rows)
    names = [field.name for field in fields(OpTable) if field.name != "family"]
    ones = {"b", "m", "n", "k", "row", "width"}
    columns = {
        name: np.array([row.get(name, 1.0 if name in ones else 0.0) for _, row in ops], dtype=float) for name in names
    }
    return OpTable(family=np.array([FAMILIES.index(family) for family, _ in ops], dtype=np.int64), **columns)
