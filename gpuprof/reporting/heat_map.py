"""Heat maps: a cell for each pair, whose colour grows stronger with the value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from gpuprof.reporting.chart import LINE, Axis, Box, Chart


def heat_map(title: str, rows: Sequence[str], columns: Sequence[str], values: NDArray[Any]) -> Chart:
    """Return the map of values from 0 to 1, with the number of each row and column at its edges.

    Parameters
    ----------
    rows, columns : sequence of str
        Names, which are shown when a cell is pointed at.
    values : ndarray of shape (rows, columns)
    """
    cells = (
        Box("", j - 0.5, j + 0.5, i - 0.5, i + 0.5, f"{row} × {column}: {value:.3g}", 0, shade=value)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
        if (value := float(values[i, j])) >= 0.01  # nothing of a paler cell would be seen
    )
    frame = Box("", -0.5, len(columns) - 0.5, -0.5, len(rows) - 0.5, "", 0, has_frame=True)
    chart = Chart(
        title,
        Axis("", names=tuple(str(j + 1) for j in range(len(columns)))),
        Axis("", names=tuple(str(i + 1) for i in range(len(rows))), is_downwards=True),
        boxes=(frame, *cells),
        height=max(LINE, LINE * len(rows)),
    )
    return replace(chart, width=max(chart.width, LINE * (len(columns) + 4)))


def heat_scale(title: str, label: str) -> Chart:
    """Return the scale of the colours: from 0, nothing, to 1."""
    boxes = tuple(Box("", step / 20, (step + 1) / 20, 0.0, 1.0, "", 0, shade=(step + 0.5) / 20) for step in range(20))
    return Chart(
        title, Axis(label, low=0.0, high=1.0), Axis("", names=("",), is_downwards=True), boxes=boxes, height=LINE
    )
