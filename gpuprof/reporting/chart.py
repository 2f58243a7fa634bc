"""A chart as data, axes with units and marks with tooltips, and its drawing as SVG."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape

#: Mean width of a letter and height of a line of text, in pixels: the units of all margins.
LETTER, LINE = 7, 18


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis."""

    label: str  #: Quantity, with its unit.
    log: bool = False
    #: ``low``, ``high``: Ends; None: from the marks.
    low: float | None = None
    high: float | None = None
    names: tuple[str, ...] = ()  #: Names of the whole numbers 0, 1, …, for a categorical axis.
    marks: tuple[float, ...] = ()  #: The labelled values; empty: round values.
    is_count: bool = False  #: Whether only whole numbers are labelled.
    is_downwards: bool = False  #: Whether a vertical axis starts at the top.


@dataclass(frozen=True, slots=True)
class Line:
    """Points joined by a line."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    color: int  #: Counts the series: beyond the palette, dashes and shapes tell them apart.
    is_dashed: bool = False  #: Whether the line is a bound or an objective instead of a series.
    series: str = ""  #: Name of its series in the legend; empty: its own name.


@dataclass(frozen=True, slots=True)
class Points:
    """Separate points; ``tips`` has a text for each, ``series`` the name in the legend if not ``name``."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    tips: tuple[str, ...]
    color: int
    series: str = ""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in the units of the axes, with a label and a tooltip."""

    name: str
    x0: float
    x1: float
    y0: float
    y1: float
    tip: str
    color: int
    label: str = ""
    shade: float = 1.0  #: Strength of its colour, from 0, the background, to 1.
    has_frame: bool = False  #: Whether the box is an empty frame instead of a filled rectangle.
    strip: bool = False  #: Pale, with an edge and a label: a heading for the boxes below.


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture."""

    #: ``title``, ``note``: Subject of the chart, and an explanation for its reader.
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...] = ()
    points: tuple[Points, ...] = ()
    boxes: tuple[Box, ...] = field(default=())
    note: str = ""
    height: int = 260  #: Height of the drawing area, in pixels.
    width: int = 580  #: Width of the whole picture, in pixels.

    def legend(self) -> dict[str, Line | Points | Box]:
        """Return the first mark of each series, for the legend."""
        marks: tuple[Line | Points | Box, ...] = (*self.lines, *self.points, *self.boxes)
        by_name: dict[str, Line | Points | Box] = {}
        for mark in marks:
            if name := series_of(mark):
                by_name.setdefault(name, mark)
        return by_name


def series_of(mark: Line | Points | Box) -> str:
    """Return the legend name of a mark's series; empty for none."""
    return mark.name if isinstance(mark, Box) else mark.series or mark.name


def join_points(series: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[Line, ...]:
    """Return a line through the points of each series."""
    return tuple(
        Line(name, tuple(x for x, _ in points), tuple(y for _, y in points), color)
        for color, (name, points) in enumerate(series.items())
    )


def stack_bars(
    groups: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    unit: str,
    colors: Iterable[int],
    spans: Sequence[tuple[float, float]] = (),
) -> tuple[Box, ...]:
    """Return stacked bars, a bar for each group; the boxes of the lowest part come first.

    ``spans``: ends of each bar; by default the bars stand at 0, 1, …
    """
    half = _bar_width(groups) / 2
    spans = spans or [(i - half, i + half) for i in range(len(groups))]
    below = [0.0] * len(groups)
    boxes = []
    for (part, values), color in zip(parts.items(), colors, strict=True):
        for i, (group, span) in enumerate(zip(groups, spans, strict=True)):
            if values[i] > 0:
                tip = f"{group}, {part}: {show_number(values[i])} {unit}"
                boxes.append(Box(part, *span, below[i], below[i] + values[i], tip, color, shade=shade_of(color)))
                below[i] += values[i]
    return tuple(boxes)


def group_bars(groups: Sequence[str], parts: Mapping[str, Sequence[float | None]], unit: str) -> tuple[Box, ...]:
    """Return bars at 0, 1, …, with the parts of each group side by side; a part that is None is left out."""
    whole = _bar_width(groups)
    width = whole / max(1, len(parts))
    return tuple(
        Box(
            part,
            i - whole / 2 + j * width,
            i - whole / 2 + (j + 1) * width,
            0.0,
            value,
            f"{group}, {part}: {show_number(value)} {unit}",
            j,
            shade=shade_of(j),
        )
        for j, (part, values) in enumerate(parts.items())
        for i, group in enumerate(groups)
        if (value := values[i]) is not None
    )


def _bar_width(groups: Sequence[str]) -> float:
    """Return the fraction of its slot that a group's bars fill; a single bar does not fill the chart."""
    return min(0.8, len(groups) / 4)


def lay_bars(chart: Chart) -> Chart:
    """Return a chart with horizontal bars if their names do not fit below them."""
    names, is_upright = chart.x.names, chart.boxes and not (chart.lines or chart.points or chart.y.names)
    longest = max(map(len, names), default=0)
    if not is_upright or LETTER * (longest + 1) * (len(names) + 2) <= chart.width or all(map(str.isdigit, names)):
        return chart
    bars_per_name = len({(box.x0, box.x1) for box in chart.boxes}) / len(names)
    return replace(
        chart,
        x=chart.y,
        y=replace(chart.x, is_downwards=True),
        boxes=tuple(replace(box, x0=box.y0, x1=box.y1, y0=box.x0, y1=box.x1) for box in chart.boxes),
        height=round(LINE * len(names) * max(1.0, bars_per_name / 2)),
    )


def show_number(value: float) -> str:
    """Return a number with at least four digits, and without an exponent for large numbers."""
    return f"{value:,.0f}" if abs(value) >= 9_999.5 else f"{value:,.4g}"


#: Number of colours in ``page.css``.
COLORS = 8


def shade_of(color: int) -> float:
    """Return the opacity of the boxes of a series, by its number: paler in each round of the palette."""
    return 0.7 ** (color // COLORS)


#: Dashes of the second, third and fourth eight series, and shapes of points, which differ from series to series.
DASHES = ("", "7 3", "2 3", "9 3 2 3")
_SHAPES = (
    "M-1,0a1,1 0 1,0 2,0a1,1 0 1,0 -2,0Z",  # disc
    "M-.9,-.9H.9V.9H-.9Z",  # square
    "M0,-1.2L1.15,.85H-1.15Z",  # triangle
    "M0,-1.3L1.1,0L0,1.3L-1.1,0Z",  # diamond
    "M-.4,-1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2V-.4H-.4Z",  # cross
)
_TARGETS = 240  # approximate number of points with a tooltip on a line


def inline(chart: Chart) -> str:
    """Return the chart for a page with ``page.css``; its width follows the page."""
    body, height = _draw(chart)
    return f'<svg role="img" aria-label="{escape(chart.title)}" viewBox="0 0 {chart.width} {height}">{body}</svg>'


def _draw(chart: Chart) -> tuple[str, int]:
    chart = lay_bars(chart)
    titles = textwrap.wrap(chart.title, int(0.75 * chart.width / LETTER))
    legend, rows = _draw_legend(chart, LINE * (len(titles) + 1))
    top = LINE * (len(titles) + 1 + rows)
    bottom = top + chart.height
    ends = (top, bottom) if chart.y.is_downwards else (bottom, top)
    y = scale_of(chart.y, _list_values(chart, "y"), *ends)
    letters = int(0.4 * chart.width / LETTER)
    tick_labels = _label_ticks(y, LINE, letters)
    left = LETTER * (2 + max((len(_shorten(text, letters)) for _, text in tick_labels), default=0))
    if not chart.y.names:
        left += LINE  # the axis' label
    x = scale_of(chart.x, _list_values(chart, "x"), left, chart.width - LINE)
    parts = [
        f'<text class="title" x="{LETTER}" y="{LINE * (i + 1)}">{escape(line)}</text>' for i, line in enumerate(titles)
    ]
    parts += [legend, _draw_grid(chart, x, y, tick_labels, letters)]
    numbers = {name: number for number, name in enumerate(chart.legend())}
    marks: tuple[Box | Line | Points, ...] = (*chart.boxes, *chart.lines, *chart.points)
    for mark in marks:
        number = numbers.get(series_of(mark))
        shape = _draw_mark(mark, x, y)
        parts.append(shape if number is None else f'<g data-series="{number}">{shape}</g>')
    return "".join(parts), bottom + 3 * LINE


def _draw_legend(chart: Chart, top: int) -> tuple[str, int]:
    """Return the legend of a chart in columns, from ``top`` down, and its number of rows; empty for a single series."""
    marks = chart.legend()
    if len(marks) < 2:
        return "", 0
    swatch = 2 * LINE
    longest = min(max(map(len, marks)) + 1, (chart.width - swatch) // LETTER - 2)
    width = swatch + LETTER * longest
    columns = max(1, chart.width // width)
    parts = []
    for number, (name, mark) in enumerate(marks.items()):
        x, y = LETTER + number % columns * width, top + number // columns * LINE
        parts.append(
            f'<g class="key" data-key="{number}" tabindex="0" role="button" aria-pressed="true">'
            f'<title>{escape(name)}</title><rect class="area" x="{x}" y="{y - LINE // 2 - 2}" width="{width - LETTER}" '
            f'height="{LINE}"/>{_draw_swatch(mark, x, y)}<text class="faint" x="{x + swatch - LETTER}" y="{y + 4}">'
            f"{escape(_shorten(name, longest))}</text></g>"
        )
    return "".join(parts), math.ceil(len(marks) / columns)


def _draw_swatch(mark: Line | Points | Box, x: int, y: int) -> str:
    if isinstance(mark, Box):
        return f'<rect class="f{mark.color % COLORS}"{_opacity(mark)} x="{x}" y="{y - 5}" width="{LINE}" height="10"/>'
    if isinstance(mark, Points):
        return f"{_draw_shape(mark.color, x + LINE / 2, y)}/>"
    return f'<line class="s{mark.color % COLORS}"{_dash(mark)} x1="{x}" x2="{x + LINE}" y1="{y}" y2="{y}"/>'


def _shorten(text: str, letters: int) -> str:
    """Return a text shortened to ``letters`` by cutting its middle: beginnings and ends distinguish names."""
    if len(text) <= letters:
        return text
    tail = max(0, (letters - 1) // 2)
    return f"{text[: letters - 1 - tail]}…{text[len(text) - tail :]}"


def _list_values(chart: Chart, which: str) -> list[float]:
    values: list[float] = []
    marks: tuple[Line | Points, ...] = (*chart.lines, *chart.points)
    for mark in marks:
        values += mark.x if which == "x" else mark.y
    for box in chart.boxes:
        values += (box.x0, box.x1) if which == "x" else (box.y0, box.y1)
    return values


def _label_ticks(scale: Scale, least_pixels: float, letters: int) -> list[tuple[float, str]]:
    """Return the labels of an axis; where names have less than ``least_pixels`` each, some are omitted."""
    axis = scale.axis
    if not axis.names:
        return [(value, tick_text(value)) for value in axis.marks or scale.ticks()]
    spacing = abs(scale.end - scale.begin) / len(axis.names)
    stride = max(1, math.ceil(min(least_pixels, LETTER * letters) / spacing - 0.5))
    return [(float(i), name) for i, name in enumerate(axis.names) if i % stride == 0]


def _draw_grid(chart: Chart, x: Scale, y: Scale, tick_labels: Sequence[tuple[float, str]], letters: int) -> str:
    parts = []
    for value, text in tick_labels:
        at = y(value)
        if not chart.y.names:
            parts.append(f'<line class="grid" x1="{x.begin:.1f}" x2="{x.end:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
        place = f'text-anchor="end" x="{x.begin - LETTER:.1f}" y="{at + 4:.1f}"'
        parts.append(f'<text class="faint" {place}>{_draw_name(text, letters)}</text>')
    bottom = max(y.begin, y.end)
    room = int((x.end - x.begin) / max(1, len(chart.x.names)) / LETTER)
    below = _label_ticks(x, LETTER * (max(map(len, chart.x.names), default=0) + 1), max(4, room))
    for value, text in below:
        at = x(value)
        place = f'text-anchor="middle" x="{at:.1f}" y="{bottom + LINE:.1f}"'
        parts.append(f'<text class="faint" {place}>{_draw_name(text, max(4, room)) if chart.x.names else text}</text>')
        if not chart.x.names:
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{y.begin:.1f}" y2="{y.end:.1f}"/>')
    parts.append(f'<line class="axis" x1="{x.begin}" x2="{x.end}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>')
    half = LETTER * len(chart.x.label) / 2 + 4  # a long label may stand below the margins, too
    center = max(half, min((x.begin + x.end) / 2, chart.width - half))
    parts.append(_draw_label(chart.x, f'x="{center:.1f}" y="{bottom + 2.2 * LINE:.1f}"'))
    if not chart.y.names:  # names need no label, but the space
        parts.append(_draw_label(chart.y, f'transform="translate({LINE} {(y.begin + y.end) / 2:.1f}) rotate(-90)"'))
    return "".join(parts)


def _draw_label(axis: Axis, place: str) -> str:
    return f'<text class="ink" text-anchor="middle" {place}>{escape(axis.label)}</text>'


def _draw_name(name: str, letters: int) -> str:
    label = _shorten(name, letters)
    return escape(label) if label == name else f"{escape(label)}<title>{escape(name)}</title>"


def _draw_mark(mark: Box | Line | Points, x: Scale, y: Scale) -> str:
    if isinstance(mark, Box):
        return _draw_box(mark, x, y)
    if isinstance(mark, Line):
        return _draw_line(mark, x, y)
    return "".join(
        f"{_draw_shape(mark.color, x(a), y(b))}{_end_with_tip('path', tip)}"
        for a, b, tip in zip(mark.x, mark.y, mark.tips, strict=True)
    )


def _draw_line(line: Line, x: Scale, y: Scale) -> str:
    points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(line.x, line.y, strict=True))
    color = line.color % COLORS
    # A line of thousands of points would make the file as many elements larger.
    stride = max(1, len(line.x) // _TARGETS)
    axes = f"{y.axis.label}; {x.axis.label}"
    targets = "".join(
        f'<circle class="target f{color}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="5" opacity="0"'
        f"{_end_with_tip('circle', _describe_point(line, a, b, axes))}"
        for a, b in zip(line.x[::stride], line.y[::stride], strict=True)
    )
    return f'<polyline class="s{color}"{_dash(line)} points="{points}"/>{targets}'


def _dash(line: Line) -> str:
    pattern = "6 4" if line.is_dashed else DASHES[line.color // COLORS % len(DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def _describe_point(line: Line, x: float, y: float, axes: str) -> str:
    """Return the tooltip of a point on a line: its values or, on a vertical line, the line's name."""
    if len(set(line.x)) == 1 < len(line.x):
        return line.name
    return f"{line.name}: {show_number(y)} at {show_number(x)} ({axes})"


def _draw_shape(series: int, x: float, y: float) -> str:
    """Return the SVG element of a series' point at a pixel, up to the end of its attributes."""
    shape = _SHAPES[series % len(_SHAPES)]
    return f'<path class="f{series % COLORS}" d="{shape}" transform="translate({x:.1f} {y:.1f}) scale(4)"'


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
    if not box.label or letters < 3 or height < LINE / 2:
        return rectangle
    ink = "faint" if box.has_frame else "ink" if box.strip else "inbox" if box.shade > 0.6 else "onbox"
    label = box.label if len(box.label) <= letters else _shorten(box.name or box.label, letters)
    return (
        f'{rectangle}<text class="{ink}" text-anchor="middle" pointer-events="none" x="{left + width / 2:.1f}" '
        f'y="{top + height / 2 + 4:.1f}">{escape(label)}</text>'
    )


def _opacity(box: Box) -> str:
    return f' fill-opacity="{box.shade:.3g}"' if box.shade < 1.0 else ""


def _end_with_tip(element: str, tip: str) -> str:
    """Return the end of an element with a tooltip, for a page with and without its script."""
    text = escape(tip)
    return f' data-tip="{text}"><title>{text}</title></{element}>'


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to pixels [begin, end]."""

    low: float
    high: float
    begin: float
    end: float
    axis: Axis

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; values outside are moved to the nearer end."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.axis.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Return the values that are labelled on the axis."""
        if self.axis.log:
            return _log_ticks(self.low, self.high)
        return _linear_ticks(self.low, self.high, 1.0 if self.axis.is_count else 0.0)


def scale_of(axis: Axis, values: Sequence[float], begin: float, end: float) -> Scale:
    """Return the scale of an axis for these values; ends given by the axis take precedence."""
    if axis.names:
        return Scale(-0.5, len(axis.names) - 0.5, begin, end, axis)
    finite = [value for value in values if math.isfinite(value) and (value > sys.float_info.min or not axis.log)]
    low = axis.low if axis.low is not None else min(finite, default=1.0 if axis.log else 0.0)
    high = axis.high if axis.high is not None else max(finite, default=low + 1.0)
    if axis.log:
        low, high = (low / 1.2 if axis.low is None else low), (high * 1.2 if axis.high is None else high)
        return Scale(low, max(high, low * 1.5), begin, end, axis)
    if axis.low is None and 0.0 < low < 0.5 * high:
        low = 0.0
    if math.isclose(low, high, abs_tol=1e-9):  # an axis of no length would divide by zero
        high = low + max(1.0, abs(low))
    return Scale(low, high if axis.high is not None else low + (high - low) * 1.05, begin, end, axis)


def _linear_ticks(low: float, high: float, least_step: float = 0.0) -> list[float]:
    raw = max((high - low) / 5, least_step)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round((first + i) * step, 12) for i in range(int((high - first * step) / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    stride = max(1, (last - first) // 8)
    ticks = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
    visible = [tick for tick in ticks if low <= tick <= high]
    return visible if len(visible) > 2 else _linear_ticks(low, high)


def tick_text(value: float) -> str:
    """Return a short text for a number: 2.5, 30k, 1.2M, 5e-06."""
    for limit, unit, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / unit:g}{suffix}"
    return f"{value:g}"
