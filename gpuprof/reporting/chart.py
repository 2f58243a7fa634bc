"""A chart as data: axes with units, and marks with tooltips."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
        """Return a mark of each series, the first."""
        marks: tuple[Line | Points | Box, ...] = (*self.lines, *self.points, *self.boxes)
        by_name: dict[str, Line | Points | Box] = {}
        for mark in marks:
            if name := series_of(mark):
                by_name.setdefault(name, mark)
        return by_name


def series_of(mark: Line | Points | Box) -> str:
    """Return the legend name of a mark's series; empty for none."""
    return mark.name if isinstance(mark, Box) else mark.series or mark.name


def stack_bars(
    groups: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str, colors: Iterable[int]
) -> tuple[Box, ...]:
    """Return stacked bars at 0, 1, …, a bar for each group; the boxes of the lowest part come first."""
    half = _bar_width(groups) / 2
    below = [0.0] * len(groups)
    boxes = []
    for (part, values), color in zip(parts.items(), colors, strict=True):
        for i, group in enumerate(groups):
            if values[i] > 0:
                tip = f"{group}, {part}: {show_number(values[i])} {unit}"
                boxes.append(
                    Box(part, i - half, i + half, below[i], below[i] + values[i], tip, color, shade=shade_of(color))
                )
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
    """Return the part of its place that a group's bars fill; a bar alone is not as wide as the drawing."""
    return min(0.8, len(groups) / 4)


def lay_bars(chart: Chart) -> Chart:
    """Return a chart whose bars lie where there is no room below them for their names."""
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
    """Return how much of its colour a box of the series of this number has: paler in each round of the palette."""
    return 0.7 ** (color // COLORS)
