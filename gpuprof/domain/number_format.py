"""How numbers are shown to people: to so many significant digits, with as many decimals in all rows of a column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

#: Digits that the largest number of a column may have beyond those asked for, so that the smallest keeps all but one.
_MORE = 2
#: Numbers that would keep fewer significant digits are shown with more decimals than the rest of their column.
_LEAST_DIGITS = 2


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Shows a number to ``digits`` significant digits; None as a dash."""

    digits: int = 3

    def __call__(self, value: object) -> str:
        """Show one number by itself."""
        if not _is_finite_number(value):
            return _show_other(value)
        return f"{value:,.{_decimals(value, self.digits)}f}" if value else "0"

    def show_column(self, values: Sequence[object]) -> list[str]:
        """Show the values of a column with as many decimals each: none where all are whole.

        A number so much smaller than the largest that it would lose its digits has more.
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


def number_formatter(digits: int = 3) -> NumberFormat:
    """Return a formatter to ``digits`` significant digits; None shows as a dash.

    Examples
    --------
    >>> show = number_formatter(3)
    >>> show(1234.5), show(0.0012345), show(None)
    ('1,234', '0.00123', '–')
    """
    return NumberFormat(digits)


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
