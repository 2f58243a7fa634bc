"""The legend of a chart: a key for each series, which a page's script lets switch its marks off and on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from gpuprof.reporting.chart import Box, Chart, Line, Points, series_of
from gpuprof.reporting.marker import dash_of, mark_of
from gpuprof.reporting.palette import COLORS

LETTER = 7.0  # mean width of a letter at 12 pixels
_LINE = 18
_SWATCH = 26
_LEFT = 12.0
_MOST_ROWS = 1.4  # rows of columns over rows of consecutive keys, at most


def draw_legend(chart: Chart, top: float) -> tuple[str, float]:
    """Return the keys of a chart, drawn from ``top`` down, and their height; empty for a chart of one series."""
    marks = chart.legend()
    if len(marks) < 2:
        return "", 0.0
    longest = int((chart.width - 24 - _SWATCH) / LETTER)
    texts = [shorten(name, longest) for name in marks]
    widths = [_SWATCH + LETTER * len(text) + 12 for text in texts]
    places = _place_keys(widths, chart.width - 20)
    parts = []
    for number, (name, mark) in enumerate(marks.items()):
        (x, row), shown, width = places[number], texts[number], widths[number]
        y = top + row * _LINE
        parts.append(
            f'<g class="key" data-key="{number}" tabindex="0" role="button" aria-pressed="true">'
            f"<title>{escape(name)}</title>"
            f'<rect class="area" x="{x - 3:.0f}" y="{y - 11:.0f}" width="{width - 6:.0f}" height="17"/>'
            f'{_swatch(chart, mark, x, y)}<text class="faint" x="{x + _SWATCH - 3:.0f}" y="{y + 3:.0f}">'
            f"{escape(shown)}</text></g>"
        )
    return "".join(parts), (places[-1][1] + 1) * _LINE


def _place_keys(widths: Sequence[float], available: float) -> list[tuple[float, int]]:
    """Return the position and row of each key: consecutive keys or, for many keys, columns."""
    places: list[tuple[float, int]] = []
    x, row = _LEFT, 0
    for width in widths:
        if x + width > _LEFT + available and x > _LEFT:
            x, row = _LEFT, row + 1
        places.append((x, row))
        x += width
    columns = max(1, int(available / max(widths)))
    rows = math.ceil(len(widths) / columns)
    if row < 2 or rows > (row + 1) * _MOST_ROWS:  # a single long name would make too many rows
        return places
    return [(_LEFT + i % columns * max(widths), i // columns) for i in range(len(widths))]


def group_series(chart: Chart, marks: Sequence[tuple[Line | Points | Box, Callable[[], str]]]) -> str:
    """Return the marks in their order, with successive marks of a series in a group with its number."""
    numbers = {name: number for number, name in enumerate(chart.legend())}
    parts: list[str] = []
    open_group: int | None = None
    for mark, draw in marks:
        number = numbers.get(series_of(mark))
        if number != open_group:
            parts.append("" if open_group is None else "</g>")
            parts.append("" if number is None else f'<g data-series="{number}">')
            open_group = number
        parts.append(draw())
    parts.append("" if open_group is None else "</g>")
    return "".join(parts)


def shorten(text: str, letters: int) -> str:
    """Return a text shortened to ``letters`` by cutting its middle: beginnings and ends distinguish names."""
    if len(text) <= letters:
        return text
    tail = max(0, (letters - 1) // 2)
    return f"{text[: letters - 1 - tail]}…{text[len(text) - tail :]}"


def _swatch(chart: Chart, mark: Line | Points | Box, x: float, y: float) -> str:
    if isinstance(mark, Box):
        shade = f' fill-opacity="{mark.shade:.3g}"' if mark.shade < 1.0 else ""
        return f'<rect class="f{mark.color % COLORS}"{shade} x="{x + 4:.0f}" y="{y - 6:.0f}" width="10" height="10"/>'
    if isinstance(mark, Points):
        return f"{mark_of(mark.color, x + 9, y - 1)}/>"
    dash = "4 2" if mark.is_dashed else dash_of(mark.color)
    stroke = f' stroke-dasharray="{dash}"' if dash else ""
    line = f'<line class="s{mark.color % COLORS}"{stroke} x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y - 1}" y2="{y - 1}"/>'
    return f"{line}{mark_of(mark.color, x + 9, y - 1)}/>" if chart.is_marked(mark) else line
