"""Slowdown of a batch by its neighbours: a hash table filled as combinations occur.

Replicas of the same partition interfere. A batch is slowed by the replicas that run a batch at its start. The slowdown
stays until the batch ends: the effects of neighbours starting later and neighbours ending earlier balance. A replica
runs if any of its processes does. Combinations are numbered by kinds of replicas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_FIRST_SLOTS = 1024  # a power of two, since slots are found by masking


class Slowdown(NamedTuple):
    """The combination of running replicas per partition, and the hash table of factors.

    ``partition`` (R,): partition of each replica. ``weight`` (R,): amount added to ``running`` (partitions,) while the
    replica runs. ``base`` (R,): first key of the replica's combinations, -1 for replicas without slowdown. ``keys`` and
    ``factors`` (slots,): the table, by open addressing, key -1 for empty slots. ``missing`` (3,): replica (-1: none)
    and combination of a missing factor, and the start time of the batch waiting for it.
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
    return _slowdown(zeros, zeros, np.full(replicas, -1), 1)


def new_slowdown(partition: Ints, weight: Ints, base: Ints) -> Slowdown:
    """Return an empty table."""
    return _slowdown(partition, weight, base, int(partition.max()) + 1)


def _slowdown(partition: Ints, weight: Ints, base: Ints, partitions: int) -> Slowdown:
    return Slowdown(
        partition=partition,
        weight=weight,
        base=base,
        running=np.zeros(partitions, np.int64),
        keys=np.full(_FIRST_SLOTS, -1),
        factors=np.ones(_FIRST_SLOTS),
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
    slot = slot_of(table.keys, key)
    if table.keys[slot] == key:
        factor: float = table.factors[slot]
        return factor
    table.missing[0], table.missing[1], table.missing[2] = replica, neighbours, now
    return -1.0


def slot_of(keys: Ints, key: int) -> int:
    """Return the slot of a key, or the empty slot for inserting it."""
    mask = len(keys) - 1
    slot = key & mask
    while keys[slot] != key and keys[slot] >= 0:
        slot = (slot + 1) & mask
    return slot


def with_factor(table: Slowdown, key: int, factor: float) -> Slowdown:
    """Return the table with another combination, enlarged if half full."""
    # The table is at most half full, because `slot_of` ends only at the key or at an empty slot.
    count = int(np.count_nonzero(table.keys >= 0))
    if 2 * (count + 1) > len(table.keys):
        larger = table._replace(keys=np.full(2 * len(table.keys), -1), factors=np.ones(2 * len(table.keys)))
        for old in np.flatnonzero(table.keys >= 0):
            _store_factor(larger, int(table.keys[old]), float(table.factors[old]))
        table = larger
    _store_factor(table, key, factor)
    table.missing[0] = -1
    return table


def _store_factor(table: Slowdown, key: int, factor: float) -> None:
    slot = slot_of(table.keys, key)
    table.keys[slot], table.factors[slot] = key, factor
