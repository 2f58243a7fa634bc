"""Number format of the page."""

from __future__ import annotations


def show_number(value: float) -> str:
    """Return a number with at least four digits, and without an exponent for large numbers."""
    return f"{value:,.0f}" if abs(value) >= 9_999.5 else f"{value:,.4g}"
