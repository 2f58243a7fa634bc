"""Draws a chart as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gpuprof.reporting.chart import Axis, Box, Chart, Line, Points
from gpuprof.reporting.palette import COLORS, THEMES, style
from gpuprof.reporting.scale import Scale, scale_of, tick_text

_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 24, 36, 50
_MOST_LETTERS = 26  # of a name beside the drawing
_LEGEND_LINE = 18
_LETTER = 7.0  # mean width of a letter at 12 pixels
_PALE = 0.6  # on paler boxes than this, text has the colour of text
_TARGETS = 240  # of a line, that can be pointed at


def standalone(charts: Sequence[Chart], theme: str = "light", columns: int = 1) -> str:
    """Return charts, so many beside one another, as a file of its own, with its colours and background in it."""
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


def inline(chart: Chart) -> str:
    """Return the chart for a page that has the style; it is as wide as its place on the page."""
    body, height = _draw(chart)
    return f'<svg role="img" aria-label="{escape(chart.title)}" viewBox="0 0 {chart.width} {height}">{body}</svg>'


def _draw(chart: Chart) -> tuple[str, int]:
    """Return the elements of a chart, and its height."""
    legend, rows = _legend(chart)
    top = _TOP + rows * _LEGEND_LINE
    ends = (top, top + chart.height) if chart.y.downwards else (top + chart.height, top)
    x = scale_of(chart.x, _values(chart, "x"), _left_margin(chart.y), chart.width - _RIGHT)
    y = scale_of(chart.y, _values(chart, "y"), *ends)
    parts = [f'<text class="title" x="12" y="20">{escape(chart.title)}</text>', legend]
    parts += [_grid(chart, x, y), *(_box(box, x, y) for box in chart.boxes)]
    parts += [*(_line(line, x, y, chart) for line in chart.lines), *(_points(points, x, y) for points in chart.points)]
    return "".join(parts), top + chart.height + _BOTTOM


def _left_margin(axis: Axis) -> float:
    """Return where the drawing begins: names beside it take as much as they need."""
    letters = min(_MOST_LETTERS, max(map(len, axis.names), default=0))
    return max(_LEFT, 14 + _LETTER * letters)


def _values(chart: Chart, which: str) -> list[float]:
    values: list[float] = []
    marks: tuple[Line | Points, ...] = (*chart.lines, *chart.points)
    for mark in marks:
        values += mark.x if which == "x" else mark.y
    for box in chart.boxes:
        values += (box.x0, box.x1) if which == "x" else (box.y0, box.y1)
    return values


def _legend(chart: Chart) -> tuple[str, int]:
    marks = chart.legend()
    if len(marks) < 2:
        return "", 0
    parts, x, row = [], 12.0, 0
    for name, mark in marks.items():
        width = 22 + _LETTER * len(name)
        if x + width > chart.width - 12 and x > 12:
            x, row = 12.0, row + 1
        y = _TOP + row * _LEGEND_LINE
        swatch = (
            f'<line class="s{mark.color % COLORS}" stroke-dasharray="4 2" x1="{x:.0f}" x2="{x + 10:.0f}" '
            f'y1="{y - 1:.0f}" y2="{y - 1:.0f}"/>'
            if isinstance(mark, Line) and mark.dashed
            else f'<rect class="f{mark.color % COLORS}"{_opacity(mark)} x="{x:.0f}" y="{y - 6:.0f}" '
            'width="10" height="10"/>'
        )
        parts.append(f'{swatch}<text class="faint" x="{x + 15:.0f}" y="{y + 3:.0f}">{escape(name)}</text>')
        x += width + 10
    return "".join(parts), row + 1


def _grid(chart: Chart, x: Scale, y: Scale) -> str:
    parts = []
    for value, text in _labels(chart.y, y, across=False):
        at = y(value)
        if not chart.y.names:
            parts.append(f'<line class="grid" x1="{x.begin:.1f}" x2="{x.end:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="faint" text-anchor="end" x="{x.begin - 6:.1f}" y="{at + 4:.1f}">{text}</text>')
    for value, text in _labels(chart.x, x, across=True):
        at = x(value)
        parts.append(
            f'<text class="faint" text-anchor="middle" x="{at:.1f}" y="{max(y.begin, y.end) + 17:.1f}">{text}</text>'
        )
        if not chart.x.names:
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{y.begin:.1f}" y2="{y.end:.1f}"/>')
    middle, bottom = (y.begin + y.end) / 2, max(y.begin, y.end)
    parts.append(f'<line class="axis" x1="{x.begin}" x2="{x.end}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>')
    parts.append(
        f'<text class="ink" text-anchor="middle" x="{(x.begin + x.end) / 2:.1f}" y="{bottom + 38:.1f}">'
        f"{escape(chart.x.label)}</text>"
    )
    if not chart.y.names:  # names say themselves what they are, and need the space
        parts.append(
            f'<text class="ink" text-anchor="middle" transform="translate(16 {middle:.1f}) rotate(-90)">'
            f"{escape(chart.y.label)}</text>"
        )
    return "".join(parts)


def _labels(axis: Axis, scale: Scale, across: bool) -> list[tuple[float, str]]:
    """Return what stands at an axis; a row of names needs their width, a column their height."""
    if not axis.names:
        return [(value, tick_text(value)) for value in axis.marks or scale.ticks()]
    each = abs(scale.end - scale.begin) / len(axis.names)
    numbers = all(name.isdigit() for name in axis.names)
    every = max(1, round((_LETTER * 3 if across else 14) / each)) if numbers or not across else 1
    longest = max(3, int(each * every / _LETTER)) if across else _MOST_LETTERS
    return [
        (float(i), escape(name if len(name) <= longest else name[: longest - 1] + "…"))
        for i, name in enumerate(axis.names)
        if i % every == 0
    ]


def _line(line: Line, x: Scale, y: Scale, chart: Chart) -> str:
    if not line.x:
        return ""
    color = line.color % COLORS
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(line.x, line.y, strict=True))
    every = max(1, len(line.x) // _TARGETS)
    targets = "".join(
        f'<circle class="target f{color}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="5" opacity="0"'
        f"{_end_with_tip('circle', f'{line.name}: {b:.4g} at {a:.4g} ({chart.y.label}; {chart.x.label})')}"
        for a, b in zip(line.x[::every], line.y[::every], strict=True)
    )
    return f'<polyline class="s{color}"{dash} points="{points}"/>{targets}'


def _points(points: Points, x: Scale, y: Scale) -> str:
    color = points.color % COLORS
    return "".join(
        f'<circle class="f{color}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="4" opacity="0.8"{_end_with_tip("circle", tip)}'
        for a, b, tip in zip(points.x, points.y, points.tips, strict=True)
    )


def _box(box: Box, x: Scale, y: Scale) -> str:
    left, right = sorted((x(box.x0), x(box.x1)))
    top, bottom = sorted((y(box.y0), y(box.y1)))
    width, height = max(right - left, 0.5), max(bottom - top, 0.5)
    kind = "frame" if box.framed else f"f{box.color % COLORS}"
    rectangle = (
        f'<rect class="{kind}"{_opacity(box)} x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
        f"{_end_with_tip('rect', box.tip)}"
    )
    letters = int(width / 6.5)
    if not box.label or letters < 3 or height < 12:
        return rectangle
    ink = "faint" if box.framed else "inbox" if box.shade > _PALE else "ink"
    label = box.label if len(box.label) <= letters else box.label[: letters - 1] + "…"
    return (
        f'{rectangle}<text class="{ink}" text-anchor="middle" pointer-events="none" x="{left + width / 2:.1f}" '
        f'y="{top + height / 2 + 4:.1f}">{escape(label)}</text>'
    )


def _opacity(mark: Line | Points | Box) -> str:
    return f' fill-opacity="{mark.shade:.3g}"' if isinstance(mark, Box) and mark.shade < 1.0 else ""


def _end_with_tip(element: str, tip: str) -> str:
    """Return the end of an element that says something when it is pointed at, with and without the page's script."""
    text = escape(tip)
    return f' data-tip="{text}"><title>{text}</title></{element}>'
