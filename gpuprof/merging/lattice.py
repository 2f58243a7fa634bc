"""Longest common submatrices of matrices with few distinct entries: integers, halves, quantised floats.

There a value is the same as another or clearly is not, so blocks of any shape can be compared by their hashes, and
one search tells for a number of entries whether a common block of at least as many exists.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gpuprof.merging.submatrix import TOLERANCE, CommonBlock, Matrix, block_at, choose_larger, most_possible

Codes = npt.NDArray[np.uint64]

#: More distinct values than a 16-bit type has are no lattice.
MOST_VALUES = 2**16
_ROW_BASE, _COLUMN_BASE = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # odd, so that they have an inverse modulo 2^64


def distinct_values(matrix: Matrix) -> npt.NDArray[np.float64] | None:
    """Return the sorted distinct entries, or None when there are more than `MOST_VALUES` or one is no number."""
    sample = np.unique(matrix.ravel()[:: max(1, matrix.size // MOST_VALUES)])
    if len(sample) > MOST_VALUES // 2 and matrix.dtype.itemsize > 2:
        return None
    values = np.unique(matrix).astype(np.float64)
    return values if len(values) <= MOST_VALUES and np.isfinite(values).all() else None


def is_lattice(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], tolerance: float = TOLERANCE) -> bool:
    """Return whether any two different values of both matrices are further apart than the tolerance."""
    return bool((np.diff(np.union1d(a, b)) > tolerance).all())


def lattice_block(a: Matrix, b: Matrix, known: CommonBlock, tolerance: float = TOLERANCE) -> CommonBlock:
    """Return the largest common block; both matrices together must be a lattice.

    Whether a block of n entries exists is monotone in n, so n is doubled until there is none and then halved in
    on. A common block of at least n entries contains one of each minimal shape h × ⌈n/h⌉ for some h: those are
    looked for by hash.
    """
    values = np.union1d(np.unique(a), np.unique(b))
    words = np.random.default_rng(0).integers(1, 2**63, len(values), dtype=np.uint64)
    coded_a, coded_b = words[np.searchsorted(values, a)], words[np.searchsorted(values, b)]
    best, impossible = known, most_possible(a, b) + 1
    while best.area + 1 < impossible:
        doubled = max(2 * best.area, 1)
        wanted = doubled if doubled < impossible else (best.area + 1 + impossible) // 2
        block = _block_of(a, b, coded_a, coded_b, wanted, tolerance)
        if block is None:
            impossible = wanted
        else:
            best = choose_larger(best, block)
    return best


def _block_of(
    a: Matrix, b: Matrix, coded_a: Codes, coded_b: Codes, entries: int, tolerance: float
) -> CommonBlock | None:
    for rows, columns in _minimal_shapes(a, b, entries):
        hashes_a, hashes_b = _block_hashes(coded_a, rows, columns), _block_hashes(coded_b, rows, columns)
        _, in_a, in_b = np.intersect1d(hashes_a, hashes_b, return_indices=True)
        for flat_a, flat_b in zip(in_a[:1], in_b[:1], strict=True):
            a_row, a_column = divmod(int(flat_a), hashes_a.shape[1])
            b_row, b_column = divmod(int(flat_b), hashes_b.shape[1])
            return block_at(a, b, b_row - a_row, b_column - a_column, tolerance)
    return None


def _minimal_shapes(a: Matrix, b: Matrix, entries: int) -> Iterator[tuple[int, int]]:
    most_rows, most_columns = min(a.shape[0], b.shape[0]), min(a.shape[1], b.shape[1])
    seen = 0
    for rows in range(1, most_rows + 1):
        columns = -(-entries // rows)
        if columns <= most_columns and columns != seen:
            seen = columns
            yield rows, columns
        if columns == 1:
            return


def _block_hashes(coded: Codes, rows: int, columns: int) -> Codes:
    """Return the hash of the block of this shape that begins at each entry."""
    return _windows(_windows(coded, columns, _COLUMN_BASE).T, rows, _ROW_BASE).T


def _windows(coded: Codes, width: int, base: int) -> Codes:
    """Return the hash of each run of ``width`` entries along a row: a polynomial in ``base`` modulo 2^64."""
    count = coded.shape[1]
    powers = np.cumprod(np.full(count, base, np.uint64), dtype=np.uint64)
    back = np.cumprod(np.full(count, pow(base, -1, 2**64), np.uint64), dtype=np.uint64)
    sums = np.zeros((coded.shape[0], count + 1), np.uint64)
    np.cumsum(coded * powers, axis=1, dtype=np.uint64, out=sums[:, 1:])
    return (sums[:, width:] - sums[:, : count - width + 1]) * back[: count - width + 1]
