"""The longest common submatrix of weight matrices (USHER §2.4).

Interpretation of the paper: a submatrix is a block of adjacent rows and adjacent columns in their order, at possibly
different positions in the two matrices (the paper uses template matching and repositions the product, §3.4.3, which
only makes sense for blocks). Two entries are equal if they differ by at most 1e-7. The longest submatrix has the most
entries, since §2.4 divides its size by the sizes of the matrices.

Equal entries of two matrices vote for the displacement of one against the other, where a neighbour of theirs is equal
at that displacement too. A block has at most as many entries as its displacement has votes, so displacements are
searched by falling votes until none can hold a larger block. Of large matrices, and of those with too many equal
entries, a part votes, that with the rarest values, and the block is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Matrix = npt.NDArray[np.generic]
Ints = npt.NDArray[np.int64]
Pair = tuple[int, int]

#: Largest difference of weights treated as equal (USHER §2.4).
TOLERANCE = 1e-7
#: Most entries of a matrix that are looked up in another, and most equal entries that vote.
_MOST_LOOKED_UP, _MOST_EQUAL = 2**14, 2**20
_SEGMENT = 16  # adjacent entries that vote together, where not all do


@dataclass(frozen=True, slots=True)
class CommonBlock:
    """A block of ``rows`` × ``columns`` at (a_row, a_column) of one matrix and (b_row, b_column) of the other.

    ``exact`` is False if the search was incomplete and a larger block may exist.
    """

    rows: int
    columns: int
    a_row: int = 0
    a_column: int = 0
    b_row: int = 0
    b_column: int = 0
    exact: bool = True

    @property
    def area(self) -> int:
        """Number of entries."""
        return self.rows * self.columns


def common_blocks(
    first: Sequence[Matrix], second: Sequence[Matrix], pairs: Iterable[Pair] | None = None, tolerance: float = TOLERANCE
) -> dict[Pair, CommonBlock]:
    """Return the longest common submatrix for pairs (position in ``first``, position in ``second``).

    Parameters
    ----------
    first, second : sequence of ndarray, shape (rows, columns)
        Integers agree if equal; floats if they differ by at most ``tolerance``.
    pairs : iterable of (int, int) or None
        Pairs to compare; None: all.
    """
    candidates = [(i, j) for i in range(len(first)) for j in range(len(second))] if pairs is None else list(pairs)
    entry_order: dict[int, Ints] = {}
    blocks = {}
    for i, j in candidates:
        if j not in entry_order:
            entry_order[j] = np.argsort(second[j], axis=None)
        blocks[i, j] = _find_block(first[i], second[j], entry_order[j], tolerance)
    return blocks


def same_entries(a: Matrix, b: Matrix, tolerance: float = TOLERANCE) -> Mask:
    """Return the mask of agreeing entries of two matrices of equal shape; NaN never agrees.

    Parameters
    ----------
    a, b : ndarray of shape (rows, columns)
    """
    if a.dtype.kind in "iub" and b.dtype.kind in "iub":
        return np.equal(a, b)
    # The difference of two float32 is exact in float64, and so is the comparison.
    difference = np.subtract(a, b, dtype=np.float64)
    return np.less_equal(np.abs(difference), tolerance)


def largest_rectangle(mask: Mask) -> tuple[int, int, int, int]:
    """Return (row, column, rows, columns) of the all-true rectangle with the most entries; the topmost of equal ones.

    State per column, updated row by row: the height of the run of true entries above, and the left and right ends of
    the widest rectangle of that height. Each row costs a few vector operations.

    Parameters
    ----------
    mask : ndarray of bool, shape (rows, columns)
    """
    rows, columns = mask.shape
    if mask.all():
        return 0, 0, rows, columns
    position = np.arange(columns)
    height = np.zeros(columns, np.int64)
    left, right = np.zeros(columns, np.int64), np.full(columns, columns, np.int64)
    best, largest_area = (0, 0, 0, 0), 0
    for row in range(rows):
        is_equal = mask[row]
        height = np.where(is_equal, height + 1, 0)
        first = np.maximum.accumulate(np.where(is_equal, 0, position + 1))
        last = np.minimum.accumulate(np.where(is_equal, columns, position)[::-1])[::-1]
        left = np.where(is_equal, np.maximum(left, first), 0)
        right = np.where(is_equal, np.minimum(right, last), columns)
        area = np.where(is_equal, height * (right - left), 0)
        at = int(area.argmax())
        if area[at] > largest_area:
            largest_area, tall = int(area[at]), int(height[at])
            best = row - tall + 1, int(left[at]), tall, int(right[at] - left[at])
    return best


def _find_block(a: Matrix, b: Matrix, b_order: Ints, tolerance: float) -> CommonBlock:
    if not a.size or not b.size:
        return CommonBlock(0, 0)
    best = _block_at(a, b, 0, 0, tolerance) if a.shape == b.shape else CommonBlock(0, 0)
    most_possible = min(a.shape[0], b.shape[0]) * min(a.shape[1], b.shape[1])
    if best.area == most_possible:
        return best
    ahead, behind, is_sample = _find_equal(a, b, b_order, tolerance)
    if len(ahead) and not best.area:
        best = CommonBlock(1, 1, *divmod(int(ahead[0]), a.shape[1]), *divmod(int(behind[0]), b.shape[1]))
    down, right = behind // b.shape[1] - ahead // a.shape[1], behind % b.shape[1] - ahead % a.shape[1]
    width = a.shape[1] + b.shape[1]
    places = (down + a.shape[0]) * width + right + a.shape[1]
    keys, votes = np.unique(places[_have_neighbours(places * a.size + ahead, a.shape[1])], return_counts=True)
    order = np.argsort(-votes, kind="stable")
    most = _SEGMENT if is_sample else _MOST_EQUAL // a.size
    for at in order[:most]:
        if votes[at] <= best.area and not is_sample:
            return best
        row, column = divmod(int(keys[at]), width)
        block = _block_at(a, b, row - a.shape[0], column - a.shape[1], tolerance)
        best = block if block.area > best.area else best
        if best.area == most_possible:
            return best
    return replace(best, exact=not is_sample and len(order) <= most)


def _find_equal(a: Matrix, b: Matrix, b_order: Ints, tolerance: float) -> tuple[Ints, Ints, bool]:
    """Return the positions of equal entries in ``a`` and in ``b``, and whether these are only some of them."""
    kind = np.int64 if a.dtype.kind in "iub" and b.dtype.kind in "iub" else np.float64
    stride = -(-a.size // _MOST_LOOKED_UP)
    places = np.flatnonzero(np.arange(a.size) // _SEGMENT % stride == 0)
    queries, targets = a.ravel()[places].astype(kind), b.ravel()[b_order].astype(kind)
    reach = 0 if kind is np.int64 else tolerance * (1.0 + 1e-6)  # no equal entry may be lost by rounding
    begin = np.searchsorted(targets, queries - reach)
    count = np.searchsorted(targets, queries + reach, side="right") - begin
    count[~np.isfinite(queries)] = 0
    matches = np.flatnonzero(count)
    is_sample = stride > 1 or int(count.sum()) > _MOST_EQUAL
    if int(count.sum()) > _MOST_EQUAL:
        totals = np.add.reduceat(count, np.arange(0, len(count), _SEGMENT))
        rarest = np.argsort(totals, kind="stable")
        rarest = rarest[totals[rarest] > 0]
        kept = rarest[: max(1, int(np.searchsorted(np.cumsum(totals[rarest]), _MOST_EQUAL)))]
        matches = matches[np.isin(matches // _SEGMENT, kept)]
    begin, count = begin[matches], count[matches]
    ahead = np.repeat(places[matches], count)
    behind = b_order[np.repeat(begin - np.cumsum(count) + count, count) + np.arange(len(ahead))]
    return ahead, behind, is_sample


def _have_neighbours(points: Ints, columns: int) -> Mask:
    """Return which points, numbered by displacement and entry, lie beside another: in its row or its column."""
    return np.isin(points, np.concatenate([points + step for step in (-1, 1, -columns, columns)]))


def _block_at(a: Matrix, b: Matrix, down: int, right: int, tolerance: float) -> CommonBlock:
    """Return the largest common block when row r of ``a`` lies on row r + down of ``b``, columns likewise."""
    row, column = max(0, -down), max(0, -right)
    part_a = a[row : b.shape[0] - down, column : b.shape[1] - right]
    part_b = b[row + down : row + down + part_a.shape[0], column + right : column + right + part_a.shape[1]]
    top, left, rows, columns = largest_rectangle(same_entries(part_a, part_b, tolerance))
    if not rows:
        return CommonBlock(0, 0)
    top, left = row + top, column + left
    return CommonBlock(rows, columns, top, left, top + down, left + right)
