"""Draws a chart as SVG."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from html import escape

from gpuprof.reporting.chart import Axis, Box, Chart, Line, Points, fit_bars
from gpuprof.reporting.legend import LETTER, draw_legend, group_series, shorten
from gpuprof.reporting.marker import dash_of, mark_of
from gpuprof.reporting.number import show_number
from gpuprof.reporting.palette import COLORS, THEMES, style
from gpuprof.reporting.scale import Scale, scale_of, tick_text

_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 24, 36, 50
_MOST_LETTERS = 34  # maximum letters of a name at the side of the drawing or, slanted, below it
_LEAST_LETTERS = 7  # minimum letters of a shortened name
_LABEL_LETTER = 6.2  # mean width of a letter of an axis' label, in pixels
_MOST_BESIDE = 0.45  # maximum part of the width for names at the side of the drawing
_MOST_MARGIN = 0.17  # maximum part of the width for numbers at the side of the drawing
_MARGIN_LETTERS = 24  # letters of a slanted name for which the drawing makes room at its left
_TITLE_LETTER, _TITLE_LINE = 8.8, 18
_WIDE_LETTER = 7.6  # width of a letter of names that must not be cut, in pixels
_SLANT = 40.0  # degrees of the names below a drawing without room side by side
_UNTOUCHED = 'pointer-events="none"'
_SEE_THROUGH = 'opacity="0.85"'
_MARKS = 8  # marks on a long line, which distinguish the series
_PALE, _PALE_INK = 0.6, 0.5  # paler boxes have labels in the colour of text; the second is for boxes in this colour
_TARGETS = 240  # approximate number of points with a tooltip on a line


def standalone(charts: Sequence[Chart], theme: str = "light", columns: int = 1) -> str:
    """Return charts in ``columns`` as a self-contained file with its colours and background."""
    values = THEMES[theme]
    parts, top, width = [], 0, 0
    for first in range(0, len(charts), columns):
        left = height = 0
        for chart in charts[first : first + columns]:
            body, own = _draw(chart)
            parts.append(f'<g transform="translate({left} {top})">{body}</g>')
            left, height = left + chart.width, max(height, own)
        top, width = top + height, max(width, left)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}">'
        f"<style>{style(values)}</style>"
        f'<rect width="{width}" height="{top}" fill="{values["paper"]}"/>{"".join(parts)}</svg>\n'
    )


def inline(chart: Chart, kind: str = "") -> str:
    """Return the chart for a page with the style, in the class ``kind``; its width follows the page."""
    body, height = _draw(chart)
    named = f' class="{kind}"' if kind else ""
    return (
        f'<svg role="img"{named} aria-label="{escape(chart.title)}" viewBox="0 0 {chart.width} {height}">{body}</svg>'
    )


def _draw(chart: Chart) -> tuple[str, int]:
    chart = fit_bars(chart)
    titles = textwrap.wrap(chart.title, int((chart.width - 24) / _TITLE_LETTER))
    above = _TOP + _TITLE_LINE * (len(titles) - 1 if titles else 0)
    legend, rows = draw_legend(chart, above)
    top = above + round(rows)
    ends = (top, top + chart.height) if chart.y.is_downwards else (top + chart.height, top)
    x = scale_of(chart.x, _list_values(chart, "x"), _left_margin(chart), chart.width - _RIGHT)
    y = scale_of(chart.y, _list_values(chart, "y"), *ends)
    below = _BOTTOM + _slant_height(chart.x, x)
    parts = [
        f'<text class="title" x="12" y="{20 + _TITLE_LINE * i}">{escape(line)}</text>' for i, line in enumerate(titles)
    ]
    parts += [legend, _draw_grid(chart, x, y, below)]
    drawn: list[tuple[Box | Line | Points, Callable[[], str]]] = [
        (box, partial(_draw_box, box, x, y)) for box in chart.boxes
    ]
    drawn += [(line, partial(_draw_line, line, x, y, chart)) for line in chart.lines]
    drawn += [(points, partial(_draw_points, points, x, y)) for points in chart.points]
    return "".join((*parts, group_series(chart, drawn))), top + chart.height + round(below)


def _left_margin(chart: Chart) -> float:
    """Return the left margin of the drawing, with room for names at its side and for slanted names below it."""
    letters = min(_letters_beside(chart), max(map(len, chart.y.names), default=0))
    return max(min(_LEFT, _MOST_MARGIN * chart.width), 14 + _WIDE_LETTER * letters, _slant_margin(chart))


def _letters_beside(chart: Chart) -> int:
    """Return the maximum letters of a name at the side of the drawing, which must keep its room."""
    return min(_MOST_LETTERS, int(_MOST_BESIDE * chart.width / _WIDE_LETTER))


def _slant_margin(chart: Chart) -> float:
    """Return the room to the left for slanted names below the drawing; longer names are shortened."""
    across = Scale(0.0, 1.0, min(_LEFT, _MOST_MARGIN * chart.width), chart.width - _RIGHT, False)
    if not _is_slanted(chart.x, across):
        return 0.0
    each = (across.end - across.begin) / len(chart.x.names)
    reach = LETTER * math.cos(math.radians(_SLANT))
    sizes = (min(_MARGIN_LETTERS, len(name)) * reach - each * (i + 0.5) for i, name in enumerate(chart.x.names))
    return min(max(sizes) + 4.0, _MOST_BESIDE * chart.width)


def _is_slanted(axis: Axis, scale: Scale) -> bool:
    """Return whether names below the drawing have no room side by side; numbers are left out instead."""
    if not axis.names or all(name.isdigit() for name in axis.names):
        return False
    return max(map(len, axis.names)) * LETTER > abs(scale.end - scale.begin) / len(axis.names)


def _slant_height(axis: Axis, scale: Scale) -> float:
    if not _is_slanted(axis, scale):
        return 0.0
    shown = max(len(shorten(name, _slanted_letters(scale(float(i))))) for i, name in enumerate(axis.names))
    return LETTER * shown * math.sin(math.radians(_SLANT))


def _slanted_letters(at: float) -> int:
    """Return how many letters of a name that ends aslant at ``at`` pixels have room to its left."""
    return max(_LEAST_LETTERS, min(_MOST_LETTERS, int(at / (LETTER * math.cos(math.radians(_SLANT))))))


def _list_values(chart: Chart, which: str) -> list[float]:
    values: list[float] = []
    marks: tuple[Line | Points, ...] = (*chart.lines, *chart.points)
    for mark in marks:
        values += mark.x if which == "x" else mark.y
    for box in chart.boxes:
        values += (box.x0, box.x1) if which == "x" else (box.y0, box.y1)
    return values


def _draw_grid(chart: Chart, x: Scale, y: Scale, below: float) -> str:
    parts = []
    for value, text in _place_labels(chart.y, y, across=False, letters=_letters_beside(chart)):
        at = y(value)
        if not chart.y.names:
            parts.append(f'<line class="grid" x1="{x.begin:.1f}" x2="{x.end:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="faint" text-anchor="end" x="{x.begin - 6:.1f}" y="{at + 4:.1f}">{text}</text>')
    slanted = _is_slanted(chart.x, x)
    for value, text in _place_labels(chart.x, x, across=True, letters=_MOST_LETTERS):
        at, under = x(value), max(y.begin, y.end) + (12 if slanted else 17)
        place = (
            f'text-anchor="end" transform="translate({at + 4:.1f} {under:.1f}) rotate(-{_SLANT:g})"'
            if slanted
            else f'text-anchor="middle" x="{at:.1f}" y="{under:.1f}"'
        )
        parts.append(f'<text class="faint" {place}>{text}</text>')
        if not chart.x.names:
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{y.begin:.1f}" y2="{y.end:.1f}"/>')
    middle, bottom = (y.begin + y.end) / 2, max(y.begin, y.end)
    parts.append(f'<line class="axis" x1="{x.begin}" x2="{x.end}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>')
    half = _LABEL_LETTER * len(chart.x.label) / 2 + 4  # a long label may stand below the margins, too
    center = max(half, min((x.begin + x.end) / 2, chart.width - half))
    parts.append(
        f'<text class="ink" text-anchor="middle" x="{center:.1f}" y="{bottom + below - 12:.1f}">'
        f"{escape(chart.x.label)}</text>"
    )
    if not chart.y.names:  # names need no label, but the space
        parts.append(
            f'<text class="ink" text-anchor="middle" transform="translate(16 {middle:.1f}) rotate(-90)">'
            f"{escape(chart.y.label)}</text>"
        )
    return "".join(parts)


def _place_labels(axis: Axis, scale: Scale, across: bool, letters: int) -> list[tuple[float, str]]:
    """Return the labels of an axis; names in a row need their width, names in a column their height."""
    if not axis.names:
        return [(value, tick_text(value)) for value in axis.marks or scale.ticks()]
    each = abs(scale.end - scale.begin) / len(axis.names)
    numbers = all(name.isdigit() for name in axis.names)
    least = LETTER * 3 if across and numbers else 14.0
    every = max(1, math.ceil(least / each - 0.5))
    slanted = across and _is_slanted(axis, scale)
    return [
        (float(i), _draw_name(name, _slanted_letters(scale(float(i))) if slanted else letters))
        for i, name in enumerate(axis.names)
        if i % every == 0
    ]


def _draw_name(name: str, letters: int) -> str:
    shown = shorten(name, letters)
    return escape(shown) if shown == name else f"{escape(shown)}<title>{escape(name)}</title>"


def _draw_line(line: Line, x: Scale, y: Scale, chart: Chart) -> str:
    if not line.x:
        return ""
    color = line.color % COLORS
    pattern = "6 4" if line.is_dashed else dash_of(line.color)
    dash = f' stroke-dasharray="{pattern}"' if pattern else ""
    points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(line.x, line.y, strict=True))
    # A line of thousands of points would make the file as many elements larger.
    every = max(1, len(line.x) // _TARGETS)
    axes = f"{chart.y.label}; {chart.x.label}"
    targets = "".join(
        f'<circle class="target f{color}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="5" opacity="0"'
        f"{_end_with_tip('circle', _describe_point(line, a, b, axes))}"
        for a, b in zip(line.x[::every], line.y[::every], strict=True)
    )
    return f'<polyline class="s{color}"{dash} points="{points}"/>{_draw_line_marks(line, x, y, chart)}{targets}'


def _describe_point(line: Line, x: float, y: float, axes: str) -> str:
    """Return the tooltip of a point on a line: its values or, on a vertical line, the line's name."""
    if len(set(line.x)) == 1 < len(line.x):
        return line.name
    return f"{line.name}: {show_number(y)} at {show_number(x)} ({axes})"


def _draw_line_marks(line: Line, x: Scale, y: Scale, chart: Chart) -> str:
    """Return some marks along a line of several; each line starts at another point, so that marks stay apart."""
    if chart.points or not chart.is_marked(line):
        return ""
    every = max(1, len(line.x) // _MARKS)
    first = line.color * every // max(2, len(chart.lines)) % every
    return "".join(
        f"{mark_of(line.color, x(a), y(b), 3.5, _UNTOUCHED)}/>"
        for a, b in zip(line.x[first::every], line.y[first::every], strict=True)
    )


def _draw_points(points: Points, x: Scale, y: Scale) -> str:
    return "".join(
        f"{mark_of(points.color, x(a), y(b), 4.0, _SEE_THROUGH)}{_end_with_tip('path', tip)}"
        for a, b, tip in zip(points.x, points.y, points.tips, strict=True)
    )


def _draw_box(box: Box, x: Scale, y: Scale) -> str:
    left, right = sorted((x(box.x0), x(box.x1)))
    top, bottom = sorted((y(box.y0), y(box.y1)))
    width, height = max(right - left, 0.5), max(bottom - top, 0.5)
    kind = "frame" if box.has_frame else "strip" if box.strip else f"f{box.color % COLORS}"
    rectangle = (
        f'<rect class="{kind}"{_opacity(box)} x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
        f"{_end_with_tip('rect', box.tip)}"
    )
    letters = int(width / LETTER)
    if not box.label or letters < 3 or height < 12:
        return rectangle
    pale = _PALE if box.color % COLORS != COLORS - 1 else _PALE_INK
    ink = "faint" if box.has_frame else "ink" if box.strip else "inbox" if box.shade > pale else "onbox"
    label = box.label if len(box.label) <= letters else shorten(box.name or box.label, letters)
    return (
        f'{rectangle}<text class="{ink}" text-anchor="middle" pointer-events="none" x="{left + width / 2:.1f}" '
        f'y="{top + height / 2 + 4:.1f}">{escape(label)}</text>'
    )


def _opacity(mark: Line | Points | Box) -> str:
    return f' fill-opacity="{mark.shade:.3g}"' if isinstance(mark, Box) and mark.shade < 1.0 else ""


def _end_with_tip(element: str, tip: str) -> str:
    """Return the end of an element with a tooltip, for a page with and without its script."""
    text = escape(tip)
    return f' data-tip="{text}"><title>{text}</title></{element}>'
