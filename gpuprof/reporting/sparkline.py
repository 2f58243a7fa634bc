"""Sparkline: a series as one line of text."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """Return one character for each value, from zero (lowest bar) to the largest; a zero shows as a blank."""
    top = max(values, default=0.0)
    if top <= 0:
        return " " * len(values)
    return "".join(" " if value <= 0 else _BARS[min(7, int(8 * value / top))] for value in values)
