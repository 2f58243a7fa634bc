"""The largest rectangle of true entries in a Boolean matrix."""

from __future__ import annotations

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
    """Return the true rectangle of ``mask`` with the most entries; the first from the top where several have as many.

    For each row and column: how high the true run above it is, and how far left and right a rectangle of that
    height reaches. All three follow from the row before, so a row costs a few vector operations.

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
