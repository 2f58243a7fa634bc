"""What every reproduction is: a table, the numbers that the paper prints with ours beside them, and why they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuprof.reporting.chart import Axis, Chart, Line

Cell = str | float | None


@dataclass(frozen=True, slots=True)
class Fact:
    """A number that a paper prints, and what came out here.

    Attributes
    ----------
    what, where : str
        What it says; the section, figure or table that says it.
    printed : float or (float, float)
        The number, or the range, as printed; up to infinity: at least so much.
    ours : float or None
        None: nothing here corresponds to it.
    digits : int
        Digits after the point that the paper prints.
    """

    what: str
    where: str
    printed: float | tuple[float, float]
    ours: float | None
    digits: int = 0

    @property
    def agrees(self) -> bool:
        """Whether ours is the printed number, or within its range, to the digits printed."""
        low, high = self.printed if isinstance(self.printed, tuple) else (self.printed, self.printed)
        half = 0.5 * 10.0**-self.digits * (1.0 + 1e-9)
        return self.ours is not None and low - half <= self.ours <= high + half

    def row(self) -> tuple[Cell, ...]:
        """Return what, where, printed, ours, and whether they agree."""
        low, high = self.printed if isinstance(self.printed, tuple) else (self.printed, self.printed)
        shown = f"{low:.{self.digits}f}" if low == high else f"{low:.{self.digits}f}…{high:.{self.digits}f}"
        if high == math.inf:
            shown = f"at least {low:.{self.digits}f}"
        ours = "–" if self.ours is None else f"{self.ours:.{self.digits}f}"
        return (self.what, self.where, shown, ours, "as printed" if self.agrees else "differs")


@dataclass(frozen=True, slots=True)
class Reproduction:
    """The outcome of one experiment.

    Attributes
    ----------
    title : str
    header : tuple of str
    rows : tuple of tuples as long as ``header``
    facts : tuple of Fact
    differences : tuple of str
        What differs from the paper, and why.
    charts : tuple of Chart
    sound : bool
        Whether every map passed the independent check, where the policy promises maps that do.
    commands : tuple of str
        The lines that were run for it.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    facts: tuple[Fact, ...]
    differences: tuple[str, ...]
    charts: tuple[Chart, ...]
    sound: bool = True
    commands: tuple[str, ...] = ()

    def column(self, name: str) -> tuple[Cell, ...]:
        """Return the cells of one column."""
        index = self.header.index(name)
        return tuple(row[index] for row in self.rows)

    def row(self, name: str) -> tuple[Cell, ...]:
        """Return the cells, after the first, of the row whose first cell is ``name``."""
        return next(row[1:] for row in self.rows if row[0] == name)


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of those that are known; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def lines(title: str, x: Axis, y: Axis, series: Mapping[str, Mapping[float, float | None]], note: str = "") -> Chart:
    """Return a chart of one line a series, colour and dashes telling them apart."""
    drawn = []
    for number, (name, points) in enumerate(series.items()):
        known = {at: value for at, value in points.items() if value is not None}
        if known:
            drawn.append(Line(name, tuple(known), tuple(known.values()), number % 8, is_dashed=number % 2 == 1))
    return Chart(title, x, y, lines=tuple(drawn), note=note)


def text_table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table for people: words to the left, numbers to the right."""
    shown = [[_text(cell) for cell in row] for row in rows]
    numeric = [any(not isinstance(row[i], str) and row[i] is not None for row in rows) for i in range(len(header))]
    widths = [max(len(line[i]) for line in [list(header), *shown]) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [list(header), ["─" * width for width in widths], *shown]
    )


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    return f"{cell:,.0f}" if float(cell).is_integer() or abs(cell) >= 1000 else f"{cell:.3g}"
