"""The longest common submatrix of pairs from two lists of matrices.

Small matrices are compared at every displacement. For larger matrices, windows of a few adjacent entries are looked up
among the windows of the other matrix. Equal windows vote for a displacement, and the blocks at the displacements with
most votes are measured. A common block is missed only if no sampled window lies in it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gpuprof.merging.submatrix import (
    EMPTY,
    TOLERANCE,
    CommonBlock,
    Matrix,
    block_at,
    choose_larger,
    displacement_work,
    exhaustive_block,
    most_possible,
    same_entries,
)

Pair = tuple[int, int]
Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

#: Most comparisons for which all displacements are tried: immediately; and after voting, where values repeat often.
_SMALL_WORK, _BEARABLE_WORK = 2**16, 2**20
#: Number of windows looked up in the other matrix: a block of a thousandth of the matrix holds some of them.
_LOOKUPS = 2**14
#: Most windows indexed of a matrix; of larger matrices every n-th row is indexed.
_KEPT_WINDOWS = 2**22
#: Number of displacements measured; most occurrences of a window for its vote to count.
_DISPLACEMENTS, _REPEATS = 16, 64
#: Number of entries compared before the whole matrix.
_SAMPLE = 4096
#: Width of the cells into which floats are cut, in tolerances, and its minimum: equal values mostly share a cell.
_CELL, _LEAST_CELL = 16.0, 1e-9
#: Window width beyond which values repeat so often that a larger block may contain no window.
_FEW_ENTRIES = 2
_BASE = np.uint64(0x9E3779B97F4A7C15)


def common_blocks(
    first: Sequence[Matrix], second: Sequence[Matrix], pairs: Iterable[Pair] | None = None, tolerance: float = TOLERANCE
) -> dict[Pair, CommonBlock]:
    """Return the longest common submatrix for pairs (position in ``first``, position in ``second``).

    Parameters
    ----------
    first, second : sequence of ndarray, shape (rows, columns)
        Integers agree if equal; floats if they differ by at most ``tolerance`` (16-bit floats as float32).
    pairs : iterable of (int, int) or None
        Pairs to compare; None: all.
    """
    wanted = [(i, j) for i in range(len(first)) for j in range(len(second))] if pairs is None else list(pairs)
    known: dict[str, _Searched] = {}
    ours, theirs = ([_prepare(matrix, tolerance, known) for matrix in matrices] for matrices in (first, second))
    found: dict[tuple[int, int], CommonBlock] = {}
    blocks = {}
    for i, j in wanted:
        a, b = ours[i], theirs[j]
        if (id(b), id(a)) in found:
            blocks[i, j] = found[id(b), id(a)].swap()
            continue
        if (id(a), id(b)) not in found:
            found[id(a), id(b)] = _find_block(a, b, tolerance)
        blocks[i, j] = found[id(a), id(b)]
    return blocks


class _Searched:
    """A matrix and the sorted hashes of its windows along rows and columns, computed on first use."""

    def __init__(self, matrix: Matrix, tolerance: float) -> None:
        self.matrix = matrix
        self._tolerance = tolerance
        self._windows: dict[tuple[bool, int], _Windows] = {}
        self._distinct = 0

    def width(self) -> int:
        """Return the number of adjacent entries that rarely agree by chance: more if few values are distinct."""
        if not self._distinct:
            step = max(1, self.matrix.size // 2**16)
            self._distinct = max(2, len(np.unique(self._cells(self.matrix.ravel()[::step]))))
        return max(2, -(-(self.matrix.size.bit_length() + 4) // (self._distinct.bit_length() - 1)))

    def windows(self, down: bool, width: int) -> _Windows:
        """Return the indexed windows: those of every row, or of every n-th row of a large matrix."""
        if (down, width) not in self._windows:
            matrix = self.matrix.T if down else self.matrix
            every = max(1, matrix.size // _KEPT_WINDOWS)
            cells = self._cells(matrix[::every])
            columns = cells.shape[1] - width + 1
            keys = _hash([cells[:, step : step + columns] for step in range(width)]).ravel()
            order = np.argsort(keys)
            rows, starts = np.divmod(order, columns)
            self._windows[down, width] = _Windows(keys[order], rows * every, starts, every == 1)
        return self._windows[down, width]

    def sample(self, down: bool, width: int) -> _Windows:
        """Return the windows to look up: all, or a random sample of a large matrix."""
        matrix = self.matrix.T if down else self.matrix
        columns = matrix.shape[1] - width + 1
        every = len(matrix) * columns
        if every <= _LOOKUPS:
            return self.windows(down, width)
        rows, starts = np.divmod(np.random.default_rng(0).integers(0, every, _LOOKUPS), columns)
        keys = _hash([self._cells(matrix[rows, starts + step]) for step in range(width)])
        return _Windows(keys, rows, starts, False)

    def _cells(self, values: Matrix) -> Keys:
        if values.dtype.kind != "f":
            whole: Keys = np.ascontiguousarray(values, np.int64).view(np.uint64)
            return whole
        scaled = np.nan_to_num(np.floor(values.astype(np.float64) / max(_CELL * self._tolerance, _LEAST_CELL)))
        cells: Keys = np.clip(scaled, -(2.0**62), 2.0**62).astype(np.int64).view(np.uint64)
        return cells


@dataclass(frozen=True, slots=True)
class _Windows:
    keys: Keys  #: Hashes, ascending if the windows are an index.
    #: ``rows``, ``columns``: The windows' first entries.
    rows: Ints
    columns: Ints
    are_all: bool  #: Whether these are all windows of the matrix.


def _hash(cells: Sequence[Keys]) -> Keys:
    """Return a hash of each window; ``cells`` holds the windows' first entries, their second entries, and so on."""
    keys: Keys = np.zeros_like(cells[0])
    for cell in cells:
        keys *= _BASE
        keys += cell
        keys ^= keys >> np.uint64(29)
    return keys


def _prepare(matrix: Matrix, tolerance: float, known: dict[str, _Searched]) -> _Searched:
    if matrix.dtype.kind in "iub":
        matrix = np.ascontiguousarray(matrix, np.int64)
    else:
        matrix = np.ascontiguousarray(matrix, np.float32 if matrix.dtype.itemsize <= 2 else None)
    digest = hashlib.blake2b(matrix.view(np.uint8).data if matrix.size else b"", digest_size=16).hexdigest()
    return known.setdefault(f"{matrix.dtype}{matrix.shape}{digest}", _Searched(matrix, tolerance))


def _find_block(first: _Searched, second: _Searched, tolerance: float) -> CommonBlock:
    a, b = first.matrix, second.matrix
    best = _find_without_displacement(a, b, tolerance)
    if best.area == most_possible(a, b):
        return best
    if displacement_work(a, b) <= _SMALL_WORK:
        return exhaustive_block(a, b, tolerance, best)
    width, is_whole = max(first.width(), second.width()), True
    votes: Counter[tuple[int, int]] = Counter()
    for down in (False, True):
        fits = min(width, *(matrix.shape[0 if down else 1] for matrix in (a, b)))
        is_whole &= _vote(first.sample(down, fits), second.windows(down, fits), down, votes)
    for down_by, right_by in sorted(votes, key=lambda place: (-votes[place], place))[:_DISPLACEMENTS]:
        best = choose_larger(best, block_at(a, b, down_by, right_by, tolerance))
    if (not is_whole or width > _FEW_ENTRIES) and displacement_work(a, b) <= _BEARABLE_WORK:
        return exhaustive_block(a, b, tolerance, best)
    return replace(best, exact=is_whole or best.area == most_possible(a, b))


def _find_without_displacement(a: Matrix, b: Matrix, tolerance: float) -> CommonBlock:
    """Return the common block at displacement 0, empty if a sample of entries shows no agreement."""
    if a.shape != b.shape or not a.size:
        return EMPTY
    step = max(1, a.size // _SAMPLE)
    sampled_a, sampled_b = (matrix.ravel()[::step][None, :] for matrix in (a, b))
    return block_at(a, b, 0, 0, tolerance) if same_entries(sampled_a, sampled_b, tolerance).any() else EMPTY


def _vote(asking: _Windows, answering: _Windows, down: bool, votes: Counter[tuple[int, int]]) -> bool:
    """Count the common windows by displacement; return whether all windows were counted."""
    begin = np.searchsorted(answering.keys, asking.keys)
    count = np.searchsorted(answering.keys, asking.keys, side="right") - begin
    chosen = np.flatnonzero((count > 0) & (count <= _REPEATS))
    is_whole = asking.are_all and answering.are_all and int(count.max(initial=0)) <= _REPEATS
    begin, count = begin[chosen], count[chosen]
    ahead = np.repeat(chosen, count)
    behind = np.repeat(begin - np.cumsum(count) + count, count) + np.arange(len(ahead))
    along, across = answering.rows[behind] - asking.rows[ahead], answering.columns[behind] - asking.columns[ahead]
    places, times = np.unique(np.stack([across, along] if down else [along, across]), axis=1, return_counts=True)
    for (down_by, right_by), voted in zip(places.T.tolist(), times.tolist(), strict=True):
        votes[down_by, right_by] += voted
    return is_whole
