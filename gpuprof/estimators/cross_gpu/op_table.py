"""Ops as rows of numbers: what the features of all of them are computed from at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Families of ops, each with a regressor of its own; ``movement`` has that of ``elementwise``.
FAMILIES = ("matmul", "conv", "elementwise", "norm", "softmax", "attention", "movement")


@dataclass(frozen=True, slots=True)
class OpTable:
    """N ops."""

    family: NDArray[np.int64]  #: Shape (N,). Positions in `FAMILIES`.
    #: ``b``, ``m``, ``n``, ``k``: Shape (N,). Of a product: how many, rows, columns and depth of each; a convolution as
    #: the product that it is, groups being ``b``; attention: batch x heads, queries, keys and head size.
    b: Array
    m: Array
    n: Array
    k: Array
    #: ``flops``, ``read_bytes``, ``written_bytes``: Shape (N,).
    flops: Array
    read_bytes: Array
    written_bytes: Array
    #: ``elements``, ``row``: Shape (N,). Elements that it gives, and how many of them one row has that is normalised
    #: together.
    elements: Array
    row: Array
    width: Array  #: Shape (N,). Bytes of an element.
    #: ``kernel``, ``stride``, ``image``: Shape (N,). Of a convolution: side of kernel, step, side of what it gives; 0
    #: otherwise.
    kernel: Array
    stride: Array
    image: Array
    #: Shape (N,). Of element-wise ops: 1 where they take a power or the like; of attention: keys' heads over queries'
    #: heads; of products 1 where the second operand is no weight.
    extra: Array
    causal: Array  #: Shape (N,). Of attention.

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
    """Return the ops of all tables, one after another."""
    return OpTable(*(np.concatenate([getattr(one, field.name) for one in tables]) for field in fields(OpTable)))


def repeat_table(table: OpTable, times: int) -> OpTable:
    """Return all ops of a table so many times, one round after another."""
    return OpTable(*(np.tile(getattr(table, field.name), times) for field in fields(OpTable)))


def make_table(family: str, count: int, **columns: Any) -> OpTable:
    """Return ``count`` ops of one family; columns that are not given are zero, ``b``, ``m``, ``n``, ``k`` one."""
    given = {name: np.broadcast_to(np.asarray(value, dtype=float), count).copy() for name, value in columns.items()}
    ones = dict.fromkeys(("b", "m", "n", "k", "row", "width"), np.ones(count))
    zeros = {field.name: np.zeros(count) for field in fields(OpTable)}
    family_column = np.full(count, FAMILIES.index(family))
    return OpTable(**{**zeros, **ones, **given, "family": family_column})


def table_of(rows: Iterable[tuple[str, Mapping[str, float]]]) -> OpTable:
    """Return a table of (family, columns), a row each."""
    listed = list(rows)
    names = [field.name for field in fields(OpTable) if field.name != "family"]
    ones = {"b", "m", "n", "k", "row", "width"}
    columns = {
        name: np.array([row.get(name, 1.0 if name in ones else 0.0) for _, row in listed], dtype=float)
        for name in names
    }
    return OpTable(family=np.array([FAMILIES.index(family) for family, _ in listed], dtype=np.int64), **columns)
