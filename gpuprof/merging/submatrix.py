"""The longest common submatrix of two weight matrices (USHER §2.4), exactly.

Interpretation of the paper: a submatrix is a block of adjacent rows and adjacent columns in their order, at possibly
different positions in the two matrices (the paper uses template matching and repositions the product, §3.4.3, which
only makes sense for blocks). Two entries are equal if they differ by at most 1e-7. The longest submatrix has the most
entries, since §2.4 divides its size by the sizes of the matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows ``row`` … ``row + rows - 1`` and columns ``column`` … ``column + columns - 1``."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def area(self) -> int:
        """Number of entries."""
        return self.rows * self.columns


NOTHING = Rectangle(0, 0, 0, 0)


def largest_rectangle(mask: Mask) -> Rectangle:
    """Return the all-true rectangle of ``mask`` with the most entries; the topmost of equal rectangles.

    State per column, updated row by row: the height of the run of true entries above, and the left and right ends of
    the widest rectangle of that height. Each row costs a few vector operations.

    Parameters
    ----------
    mask : ndarray of bool, shape (rows, columns)
    """
    rows, columns = mask.shape
    if mask.all():
        return Rectangle(0, 0, rows, columns) if mask.size else NOTHING
    if not mask.any():
        return NOTHING
    position = np.arange(columns)
    height = np.zeros(columns, np.int64)
    left, right = np.zeros(columns, np.int64), np.full(columns, columns, np.int64)
    best = NOTHING
    for row in range(rows):
        here = mask[row]
        height = np.where(here, height + 1, 0)
        first = np.maximum.accumulate(np.where(here, 0, position + 1))
        last = np.minimum.accumulate(np.where(here, columns, position)[::-1])[::-1]
        left = np.where(here, np.maximum(left, first), 0)
        right = np.where(here, np.minimum(right, last), columns)
        area = np.where(here, height * (right - left), 0)
        at = int(area.argmax())
        if area[at] > best.area:
            tall = int(height[at])
            best = Rectangle(row - tall + 1, int(left[at]), tall, int(right[at] - left[at]))
    return best


Matrix = npt.NDArray[np.generic]

#: Largest difference of weights treated as equal (USHER §2.4).
TOLERANCE = 1e-7


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

    def swap(self) -> CommonBlock:
        """Return the same block with the two matrices exchanged."""
        return CommonBlock(self.rows, self.columns, self.b_row, self.b_column, self.a_row, self.a_column, self.exact)


EMPTY = CommonBlock(0, 0)


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


def block_at(a: Matrix, b: Matrix, down: int, right: int, tolerance: float = TOLERANCE) -> CommonBlock:
    """Return the largest common block when row r of ``a`` lies on row r + down of ``b``, columns likewise."""
    overlap = _overlap(a.shape, b.shape, down, right)
    if overlap.area == 0:
        return EMPTY
    mine = a[overlap.row : overlap.row + overlap.rows, overlap.column : overlap.column + overlap.columns]
    row, column = overlap.row + down, overlap.column + right
    theirs = b[row : row + overlap.rows, column : column + overlap.columns]
    rectangle = largest_rectangle(same_entries(mine, theirs, tolerance))
    if rectangle.area == 0:
        return EMPTY
    top, left = overlap.row + rectangle.row, overlap.column + rectangle.column
    return CommonBlock(rectangle.rows, rectangle.columns, top, left, top + down, left + right)


def most_possible(a: Matrix, b: Matrix) -> int:
    """Return an upper bound of the entries of a common block of ``a`` and ``b``."""
    return int(min(a.shape[0], b.shape[0]) * min(a.shape[1], b.shape[1]))


def choose_larger(first: CommonBlock, second: CommonBlock) -> CommonBlock:
    """Return the larger block, the first if equal."""
    return second if second.area > first.area else first


def exhaustive_block(a: Matrix, b: Matrix, tolerance: float = TOLERANCE, known: CommonBlock = EMPTY) -> CommonBlock:
    """Return the largest common block over all displacements of ``b`` against ``a``; for small matrices.

    Displacements are tried by decreasing overlap, until no overlap exceeds the incumbent block.
    """
    best = known
    for area, down, right in _displacements(a.shape, b.shape):
        if area <= best.area:
            break
        best = choose_larger(best, block_at(a, b, down, right, tolerance))
    return best


def displacement_work(a: Matrix, b: Matrix) -> int:
    """Return an upper bound of the comparisons of `exhaustive_block`."""
    return int((a.shape[0] * b.shape[0]) * (a.shape[1] * b.shape[1]))


def _overlap(a: tuple[int, ...], b: tuple[int, ...], down: int, right: int) -> Rectangle:
    row, column = max(0, -down), max(0, -right)
    rows = min(a[0], b[0] - down) - row
    columns = min(a[1], b[1] - right) - column
    return Rectangle(row, column, rows, columns) if rows > 0 and columns > 0 else NOTHING


def _displacements(a: tuple[int, ...], b: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    downs = np.arange(1 - a[0], b[0])
    rights = np.arange(1 - a[1], b[1])
    rows = np.minimum(a[0], b[0] - downs) - np.maximum(0, -downs)
    columns = np.minimum(a[1], b[1] - rights) - np.maximum(0, -rights)
    areas = np.multiply.outer(rows, columns)
    for flat in np.argsort(-areas, axis=None, kind="stable"):
        i, j = divmod(int(flat), len(rights))
        yield int(areas[i, j]), int(downs[i]), int(rights[j])
