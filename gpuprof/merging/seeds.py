"""Finds where two sets of matrices share two adjacent entries, without comparing every pair of positions.

Any common block of two or more entries holds a common pair of neighbours, side by side or one above the other.
Trained weights are spread so finely that unrelated matrices share few such pairs; so all pairs of one set go into
one large table by value, the other set looks itself up, and only what both sides hit is compared.

Values are laid into cells some tolerances wide. Two values that agree lie in the same cell, or one of them is so
close to a border that it is looked up on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpuprof.merging.submatrix import Matrix
from gpuprof.merging.table import CELLS_PER_TOLERANCE, REACH, PairTable

Index = npt.NDArray[np.int64]

#: Odd multipliers that spread bits: 2⁶⁴ over the golden ratio, and the second prime of xxHash64.
_MIX_FIRST, _MIX_SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
#: Matches compared at once, and the most that are compared at all: repeated values match everywhere.
_CHUNK, _MOST_MATCHES = 2**21, 2**23
_SIFTINGS = 2


@dataclass(slots=True)
class Pool:
    """Matrices compared with one another."""

    matrices: Sequence[Matrix]  #: Sequence of ndarray, shape (rows, columns).
    #: Which of them are looked up, and in ``answers`` which are looked up in. One may be both; it is then compared with
    #: every other one, but not with itself.
    asks: Sequence[bool]
    answers: Sequence[bool]
    tolerance: float

    def order(self) -> list[int]:
        """Return the matrices in an order in which all that only answer come before those that ask."""
        return sorted(range(len(self.matrices)), key=lambda i: (self.asks[i], not self.answers[i]))


@dataclass(slots=True)
class Matches:
    """Pairs of neighbours that two matrices share."""

    #: ``first``, ``second``: Positions of the two matrices in the pool; ``second`` came later in its order.
    first: Index
    second: Index
    #: ``first_at``, ``second_at``: Flat position of the upper or left entry in each.
    first_at: Index
    second_at: Index
    #: Pairs of matrices of which some matches were not compared because their values repeat too often.
    unfinished: set[tuple[int, int]] = field(default_factory=set)


def neighbour_matches(pool: Pool, down: bool) -> Iterator[Matches]:
    """Yield the pairs of neighbours (one above the other if ``down``, else side by side) that matrices share."""
    asking, answering = _survivors(pool, down)
    # Only one side looks into its values' neighbouring cells: if both did, a match would be found several times.
    keys_a, owner_a, at_a = _hash_cells(pool, answering, down, variants=False)
    keys_b, owner_b, at_b = _hash_cells(pool, asking, down, variants=True)
    by_key = np.argsort(keys_a, kind="stable")
    keys_a, owner_a, at_a = keys_a[by_key], owner_a[by_key], at_a[by_key]
    by_key = np.argsort(keys_b, kind="stable")  # sorted questions keep to the cache
    keys_b, owner_b, at_b = keys_b[by_key], owner_b[by_key], at_b[by_key]
    start = np.searchsorted(keys_a, keys_b)
    count = np.searchsorted(keys_a, keys_b, side="right") - start
    kept, dropped = _affordable(count)
    unfinished = _pairs_with_dropped(owner_a, owner_b, start, count, dropped)
    rank = {index: position for position, index in enumerate(pool.order())}
    ranks = np.array([rank[i] for i in range(len(pool.matrices))], np.int64)
    none: Index = np.empty(0, np.int64)
    yield Matches(none, none, none, none, unfinished)
    for part in _chunks(kept, count):
        left = np.repeat(start[part] - np.cumsum(count[part]) + count[part], count[part])
        left += np.arange(len(left))
        right = np.repeat(part, count[part])
        earlier = ranks[owner_a[left]] < ranks[owner_b[right]]
        left, right = left[earlier], right[earlier]
        yield Matches(owner_a[left], owner_b[right], at_a[left], at_b[right])


def _survivors(pool: Pool, down: bool) -> tuple[list[Index], list[Index]]:
    """Return for each matrix which of its pairs may have a match, as one that asks and as one that answers."""
    steps = [matrix.shape[1] if down else 1 for matrix in pool.matrices]
    shapes = {matrix.shape for matrix in pool.matrices}
    by_shape = {shape: _positions(shape[0], shape[1], down) for shape in shapes}
    places = [by_shape[matrix.shape] for matrix in pool.matrices]
    asking = [at if yes else at[:0] for at, yes in zip(places, pool.asks, strict=True)]
    answering = [at if yes else at[:0] for at, yes in zip(places, pool.answers, strict=True)]
    table = PairTable(sum(map(len, answering)), pool.tolerance, 0)
    for i in pool.order():  # so that one that both asks and answers does not find itself
        asking[i] = table.find(pool.matrices[i], steps[i], asking[i])
        table.enter(pool.matrices[i], steps[i], answering[i])
    # Most of what was found is chance: each side is sifted by what is left of the other.
    for salt in range(1, _SIFTINGS + 1):
        answering = _filter_positions(pool, steps, answering, asking, salt, asked=False)
        # Another salt for each side and round, so that a collision in one table is none in the next.
        asking = _filter_positions(pool, steps, asking, answering, -salt % 2**32, asked=True)
    return asking, answering


def _filter_positions(
    pool: Pool, steps: Sequence[int], chosen: list[Index], other: list[Index], salt: int, asked: bool
) -> list[Index]:
    table = PairTable(sum(map(len, other)), pool.tolerance, salt)
    for matrix, step, at in zip(pool.matrices, steps, other, strict=True):
        table.enter(matrix, step, at, both_sides=not asked)
    return [
        table.find(matrix, step, at, both_sides=asked)
        for matrix, step, at in zip(pool.matrices, steps, chosen, strict=True)
    ]


def _variants(pool: Pool, i: int, down: bool, at: Index) -> Iterator[tuple[npt.NDArray[np.uint64], Index]]:
    """Yield (keys, flat positions): first each pair by its own cells, then those near a border by their neighbours'."""
    matrix = pool.matrices[i]
    flat = matrix.ravel()
    first, second = flat[at], flat[at + (matrix.shape[1] if down else 1)]
    own_first, other_first = _cells(first, pool.tolerance)
    own_second, other_second = _cells(second, pool.tolerance)
    yield _hash_pairs(own_first, own_second), at
    near_first, near_second = own_first != other_first, own_second != other_second
    for chosen, one, two in (
        (near_first, other_first, own_second),
        (near_second, own_first, other_second),
        (near_first & near_second, other_first, other_second),
    ):
        where = np.flatnonzero(chosen)
        if len(where):
            yield _hash_pairs(one[where], two[where]), at[where]


def _positions(rows: int, columns: int, down: bool) -> Index:
    if down:
        return np.arange((rows - 1) * columns)
    flat = np.arange(rows * columns).reshape(rows, columns)
    return flat[:, :-1].ravel()


def _cells(values: Matrix, tolerance: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return each value's cell, and the other one that its equals may lie in (its own where there is none)."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = values.astype(np.float64) / (CELLS_PER_TOLERANCE * tolerance)
        cells = np.floor(scaled)
        within = scaled - cells
        other = cells + (within > 1 - REACH) - (within < REACH)
        return cells.astype(np.int64), other.astype(np.int64)


def _hash_pairs(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    mixed = first.view(np.uint64) * _MIX_FIRST + second.view(np.uint64)
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MIX_SECOND
    return mixed ^ (mixed >> np.uint64(32)) * _MIX_FIRST


def _hash_cells(
    pool: Pool, chosen: list[Index], down: bool, variants: bool
) -> tuple[npt.NDArray[np.uint64], Index, Index]:
    keys, owners, positions = [], [], []
    for i, at in enumerate(chosen):
        for key, where in _variants(pool, i, down, at):
            keys.append(key)
            owners.append(np.full(len(key), i, np.int64))
            positions.append(where)
            if not variants:
                break
    return np.concatenate(keys), np.concatenate(owners), np.concatenate(positions)


def _affordable(count: Index) -> tuple[Index, Index]:
    """Return which lookups to follow and which to drop: those with the most matches, once there are too many."""
    order = np.argsort(count, kind="stable")
    order = order[count[order] > 0]
    fits = np.cumsum(count[order]) <= _MOST_MATCHES
    return order[fits], order[~fits]


def _pairs_with_dropped(
    owner_a: Index, owner_b: Index, start: Index, count: Index, dropped: Index
) -> set[tuple[int, int]]:
    """Return the pairs of matrices that have matches among the dropped lookups, each group of equal keys once."""
    if not len(dropped):
        return set()
    span = int(owner_b.max()) + 1
    codes, first = np.unique(start[dropped] * span + owner_b[dropped], return_index=True)
    begins, length = codes // span, count[dropped[first]]
    pair_codes: list[Index] = []
    for part in _chunks(np.arange(len(codes)), length):
        left = np.repeat(begins[part] - np.cumsum(length[part]) + length[part], length[part])
        left += np.arange(len(left))
        pair_codes.append(np.unique(owner_a[left] * span + np.repeat(codes[part] % span, length[part])))
    return {(int(code) // span, int(code) % span) for code in np.unique(np.concatenate(pair_codes))}


def _chunks(kept: Index, count: Index) -> Iterable[Index]:
    if not len(kept):
        return []
    edges = np.searchsorted(np.cumsum(count[kept]), np.arange(_CHUNK, int(count[kept].sum()) + _CHUNK, _CHUNK))
    return [part for part in np.split(kept, np.unique(edges)) if len(part)]
