"""Draws a chart as SVG."""

from __future__ import annotations

from html import escape

from gpuprof.reporting.chart import Axis, Box, Chart, Line, Points
from gpuprof.reporting.palette import COLORS, THEMES, style
from gpuprof.reporting.scale import Scale, scale_of, tick_text

WIDTH = 580
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 24, 36, 50
_MOST_LETTERS = 26  # of a name beside the drawing
_LEGEND_LINE = 18
_LETTER = 7.0  # mean width of a letter at 12 pixels
_TARGETS = 240  # of a line, that can be pointed at


def standalone(chart: Chart, theme: str = "light") -> str:
    """Return the chart as a file of its own, with its colours and background in it."""
    values = THEMES[theme]
    body, height = _drawn(chart)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
        f"<style>{style(values)}</style>"
        f'<rect width="{WIDTH}" height="{height}" fill="{values["paper"]}"/>{body}</svg>\n'
    )


def inline(chart: Chart) -> str:
    """Return the chart for a page that has the style; it is as wide as there is room."""
    body, height = _drawn(chart)
    return f'<svg role="img" aria-label="{escape(chart.title)}" viewBox="0 0 {WIDTH} {height}">{body}</svg>'


def _drawn(chart: Chart) -> tuple[str, int]:
    legend, rows = _legend(chart)
    top = _TOP + rows * _LEGEND_LINE
    height = top + chart.height + _BOTTOM
    x = scale_of(chart.x, _values(chart, "x"), _left(chart.y), WIDTH - _RIGHT)
    y = scale_of(chart.y, _values(chart, "y"), top + chart.height, top)
    parts = [f'<text class="title" x="12" y="20">{escape(chart.title)}</text>', legend]
    parts += [_grid(chart, x, y), *(_box(box, x, y) for box in chart.boxes)]
    parts += [*(_line(line, x, y, chart) for line in chart.lines), *(_points(points, x, y) for points in chart.points)]
    return "".join(parts), height


def _left(axis: Axis) -> float:
    """Return where the drawing begins: names beside it get the room they need."""
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
    names = chart.names()
    if len(names) < 2:
        return "", 0
    parts, x, row = [], 12.0, 0
    for name, (color, dashed) in names.items():
        width = 22 + _LETTER * len(name)
        if x + width > WIDTH - 12 and x > 12:
            x, row = 12.0, row + 1
        y = _TOP + row * _LEGEND_LINE
        swatch = (
            f'<line class="s{color % COLORS}" stroke-dasharray="4 2" x1="{x:.0f}" x2="{x + 10:.0f}" '
            f'y1="{y - 1:.0f}" y2="{y - 1:.0f}"/>'
            if dashed
            else f'<rect class="f{color % COLORS}" x="{x:.0f}" y="{y - 6:.0f}" width="10" height="10"/>'
        )
        parts.append(f'{swatch}<text class="faint" x="{x + 15:.0f}" y="{y + 3:.0f}">{escape(name)}</text>')
        x += width + 10
    return "".join(parts), row + 1


def _grid(chart: Chart, x: Scale, y: Scale) -> str:
    parts = []
    for value, text in _labels(chart.y, y):
        at = y(value)
        if not chart.y.names:
            parts.append(f'<line class="grid" x1="{x.begin:.1f}" x2="{x.end:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="faint" text-anchor="end" x="{x.begin - 6:.1f}" y="{at + 4:.1f}">{text}</text>')
    for value, text in _labels(chart.x, x):
        at = x(value)
        parts.append(f'<text class="faint" text-anchor="middle" x="{at:.1f}" y="{y.begin + 17:.1f}">{text}</text>')
        if not chart.x.names:
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{y.begin:.1f}" y2="{y.end:.1f}"/>')
    middle = (y.begin + y.end) / 2
    parts.append(f'<line class="axis" x1="{x.begin}" x2="{x.end}" y1="{y.begin:.1f}" y2="{y.begin:.1f}"/>')
    parts.append(
        f'<text class="ink" text-anchor="middle" x="{(x.begin + x.end) / 2:.1f}" y="{y.begin + 38:.1f}">'
        f"{escape(chart.x.label)}</text>"
    )
    if not chart.y.names:  # names say themselves what they are, and need the room
        parts.append(
            f'<text class="ink" text-anchor="middle" transform="translate(16 {middle:.1f}) rotate(-90)">'
            f"{escape(chart.y.label)}</text>"
        )
    return "".join(parts)


def _labels(axis: Axis, scale: Scale) -> list[tuple[float, str]]:
    if not axis.names:
        return [(value, tick_text(value)) for value in axis.marks or scale.ticks()]
    room = abs(scale.end - scale.begin) / len(axis.names)
    across = scale.begin < scale.end  # a row of names needs their width, a column their height
    every = 1 if across else max(1, round(14 / room))
    longest = max(3, int(room / _LETTER)) if across else _MOST_LETTERS
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
        f"{_told('circle', f'{line.name}: {b:.4g} at {a:.4g} ({chart.y.label}; {chart.x.label})')}"
        for a, b in zip(line.x[::every], line.y[::every], strict=True)
    )
    return f'<polyline class="s{color}"{dash} points="{points}"/>{targets}'


def _points(points: Points, x: Scale, y: Scale) -> str:
    color = points.color % COLORS
    return "".join(
        f'<circle class="f{color}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="4" opacity="0.8"{_told("circle", tip)}'
        for a, b, tip in zip(points.x, points.y, points.tips, strict=True)
    )


def _box(box: Box, x: Scale, y: Scale) -> str:
    left, right = sorted((x(box.x0), x(box.x1)))
    top, bottom = sorted((y(box.y0), y(box.y1)))
    width, height = max(right - left, 0.5), max(bottom - top, 0.5)
    drawn = (
        f'<rect class="f{box.color % COLORS}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
        f"{_told('rect', box.tip)}"
    )
    room = int(width / 6.5)
    if not box.label or room < 3 or height < 12:
        return drawn
    label = box.label if len(box.label) <= room else box.label[: room - 1] + "…"
    return (
        f'{drawn}<text class="inbox" text-anchor="middle" pointer-events="none" x="{left + width / 2:.1f}" '
        f'y="{top + height / 2 + 4:.1f}">{escape(label)}</text>'
    )


def _told(element: str, tip: str) -> str:
    """Return the end of an element that says something when it is pointed at, with and without the page's script."""
    text = escape(tip)
    return f' data-tip="{text}"><title>{text}</title></{element}>'
