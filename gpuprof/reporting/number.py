"""Number format of the page."""

from __future__ import annotations

#: Numbers from here on are shown whole: four digits would give an exponent.
_WHOLE = 9_999.5


def show_number(value: float) -> str:
    """Return a number with at least four digits, and without an exponent for large numbers."""
    return f"{value:,.0f}" if abs(value) >= _WHOLE else f"{value:,.4g}"
