"""Slowdown of a batch by its neighbours: a table filled as combinations occur.

Replicas of the same partition interfere. A batch is slowed by the replicas that run a batch at its start. The slowdown
stays until the batch ends: the effects of neighbours starting later and neighbours ending earlier balance. A replica
runs if any of its processes does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Slowdown(NamedTuple):
    """The combination of running replicas per partition, and the table of factors.

    ``partition`` (R,): partition of each replica. ``weight`` (R,): amount added to ``running`` (partitions,) while the
    replica runs. ``base`` (R,): added to the neighbours' weights for a combination's key, -1 for replicas without
    slowdown. ``keys``, ``factors``: the table, ascending by key. ``missing`` (3,): replica (-1: none) and key of a
    missing factor, and the start time of the batch waiting for it.
    """

    partition: Ints
    weight: Ints
    base: Ints
    running: Ints
    keys: Ints
    factors: Floats
    missing: Ints


def no_slowdown(replicas: int) -> Slowdown:
    """Return a table for replicas without interference in addition to their batch times."""
    zeros = np.zeros(replicas, np.int64)
    return new_slowdown(zeros, zeros, np.full(replicas, -1))


def new_slowdown(partition: Ints, weight: Ints, base: Ints) -> Slowdown:
    """Return a table whose only key is above all others, which ends every search."""
    return Slowdown(
        partition=partition,
        weight=weight,
        base=base,
        running=np.zeros(int(partition.max()) + 1, np.int64),
        keys=np.array([np.iinfo(np.int64).max]),
        factors=np.ones(1),
        missing=np.array([-1, -1, 0]),
    )


def factor_now(table: Slowdown, replica: int, runs: bool, now: int) -> float:
    """Return the slowdown of a batch that starts now; if absent from the table, note it as missing and return -1.

    ``runs``: whether another process of the same replica runs, which does not count as a neighbour.
    """
    if table.base[replica] < 0:
        return 1.0
    neighbours = table.running[table.partition[replica]] - (table.weight[replica] if runs else 0)
    key = table.base[replica] + neighbours
    slot = np.searchsorted(table.keys, key)
    if table.keys[slot] == key:
        factor: float = table.factors[slot]
        return factor
    table.missing[0], table.missing[1], table.missing[2] = replica, key, now
    return -1.0


def with_factor(table: Slowdown, key: int, factor: float) -> Slowdown:
    """Return the table with another combination."""
    table.missing[0] = -1
    slot = np.searchsorted(table.keys, key)
    return table._replace(keys=np.insert(table.keys, slot, key), factors=np.insert(table.factors, slot, factor))
