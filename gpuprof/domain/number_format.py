"""Number formats: a number of significant digits, with equal decimals in all rows of a column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

#: Relative difference, or absolute at values of about 1, up to which figures differ by rounding alone.
ROUNDING = 1e-6
#: Bytes of a gibibyte.
GIB = 2**30
#: Extra digits allowed for the largest number of a column, so that the smallest keeps all digits but the last.
_MORE = 2
#: Least significant digits of a number; a smaller number gets more decimals than the rest of its column.
_LEAST_DIGITS = 2


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Formatter of numbers to ``digits`` significant digits; None as a dash.

    Examples
    --------
    >>> show = NumberFormat(3)
    >>> show(1234.5), show(0.0012345), show(None)
    ('1,234', '0.00123', '–')
    """

    digits: int

    def __call__(self, value: object) -> str:
        """Format a single number."""
        if not _is_finite_number(value):
            return _show_other(value)
        return f"{value:,.{_decimals(value, self.digits)}f}" if value else "0"

    def show_column(self, values: Sequence[object]) -> list[str]:
        """Format the values of a column with equal decimals: none where all are whole.

        Numbers too small for these decimals get more.
        """
        sizes = [abs(value) for value in values if _is_finite_number(value) and value]
        if not sizes:
            return [self(value) for value in values]
        decimals = 0
        if not all(float(size).is_integer() for size in sizes):
            smallest = min(_decimals(min(sizes), self.digits - 1), _decimals(max(sizes), self.digits + _MORE))
            decimals = max(smallest, _decimals(max(sizes), self.digits))
        return [self._show(value, decimals) for value in values]

    def _show(self, value: object, decimals: int) -> str:
        if not _is_finite_number(value):
            return _show_other(value)
        if not value:
            return "0"
        if float(value).is_integer() or decimals >= _decimals(value, _LEAST_DIGITS):
            return f"{value:,.{decimals}f}"
        return self(value)


def _is_finite_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _show_other(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return "∞" if value == math.inf else "–"
    return str(value)


def _decimals(value: float, digits: int) -> int:
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))
