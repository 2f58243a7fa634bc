"""Markers and dash patterns, which distinguish series besides their colour."""

from __future__ import annotations

from gpuprof.reporting.palette import COLORS

#: Dash patterns: with the eight colours, 32 series differ; neighbours in the legend differ in colour and mark as well.
DASHES = ("", "7 3", "2 3", "9 3 2 3")
#: Paths around the origin, of about the same area at size 1.
_SHAPES = (
    "M-1,0a1,1 0 1,0 2,0a1,1 0 1,0 -2,0Z",  # disc
    "M-.9,-.9H.9V.9H-.9Z",  # square
    "M0,-1.2L1.15,.85H-1.15Z",  # triangle
    "M0,-1.3L1.1,0L0,1.3L-1.1,0Z",  # diamond
    "M0,1.2L1.15,-.85H-1.15Z",  # triangle on its tip
    "M-.4,-1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2V-.4H-.4Z",  # cross
    "M0,-1.25L1.19,-.39L.73,1.01L-.73,1.01L-1.19,-.39Z",  # pentagon
)


def dash_of(series: int) -> str:
    """Return the dashes of a series' line; empty for a solid line."""
    return DASHES[series // COLORS % len(DASHES)]


def mark_of(series: int, x: float, y: float, size: float = 4.0, more: str = "") -> str:
    """Return the beginning of the mark of a series at a pixel, up to the end of its attributes."""
    shape = _SHAPES[series % len(_SHAPES)]
    return (
        f'<path class="f{series % COLORS}" d="{shape}" transform="translate({x:.1f} {y:.1f}) scale({size:g})"'
        f"{f' {more}' if more else ''}"
    )
