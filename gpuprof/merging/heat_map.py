"""The similarities of the layers of two models as a map: characters for a terminal, SVG for a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpuprof.errors import InputError
from gpuprof.merging.similarity import ModelSimilarity

Grid = npt.NDArray[np.float64]

#: A character for nothing, then for each fifth of the way from a similarity of 0 to 1; the last one means 1.
SHADES = "·░▒▓█"
_MOST_CHARACTERS, _LEAST = 76, 0.01
_CELL, _MARGIN, _LINE, _LEFT = 12, 46, 18, 40
_SCALE_BAR, _SCALE_WIDTH, _SCALE_HEIGHT = 240, 600, 72
_MIDDLE = 'text-anchor="middle"'
#: Nothing has the colour of the ground, the same the colour furthest from it.
_STYLE = """<style>
.page{fill:#fff} text{fill:#1f2328} .line{stroke:#59636e} .zero{fill:#eef1f4}
.cell{fill:#0b3c8c;stroke:#fff;stroke-width:.5}
.none{stop-color:#eef1f4} .same{stop-color:#0b3c8c}
@media(prefers-color-scheme:dark){
.page{fill:#0d1117} text{fill:#e6edf3} .line{stroke:#9198a1} .zero{fill:#212830} .cell{fill:#ffd54a;stroke:#0d1117}
.none{stop-color:#212830} .same{stop-color:#ffd54a}}
</style><defs><linearGradient id="scale"><stop class="none"/><stop class="same" offset="1"/></linearGradient></defs>"""


def similarity_grid(one: ModelSimilarity, kind: str) -> tuple[list[str], list[str], Grid]:
    """Return (layers of the first model, of the second, similarities of shape (first, second)) of one kind."""
    layers = [layer for layer in one.layers if layer.kind == kind]
    rows = list(dict.fromkeys(layer.first for layer in layers))
    columns = list(dict.fromkeys(layer.second for layer in layers))
    grid = np.zeros((len(rows), len(columns)))
    at_row, at_column = ({name: i for i, name in enumerate(names)} for names in (rows, columns))
    for layer in layers:
        grid[at_row[layer.first], at_column[layer.second]] = layer.similarity
    return rows, columns, grid


def text_map(one: ModelSimilarity) -> list[str]:
    """Return the lines of a map for a terminal; larger ones show the largest similarity of each square of layers."""
    lines = []
    for kind in sorted({layer.kind for layer in one.layers}):
        rows, columns, grid = similarity_grid(one, kind)
        step = -(-max(grid.shape) // _MOST_CHARACTERS)
        each = f", {step} × {step} layers a character" if step > 1 else ""
        lines.append(f"{kind}: {len(rows)} layers of {one.first} (down) × {len(columns)} of {one.second}{each}")
        if grid.max() < _LEAST:
            lines.append(f"  no two are {_LEAST} similar")
            continue
        for i in range(0, len(rows), step):
            cells = [grid[i : i + step, j : j + step].max() for j in range(0, len(columns), step)]
            lines.append("  " + "".join(_shade(float(value)) for value in cells))
    if any(line.startswith("  ") and set(line.strip()) <= set(SHADES) for line in lines):
        lines.append(
            f"{SHADES[0]} below 0.01  {SHADES[1]} to 1/3  {SHADES[2]} to 2/3  {SHADES[3]} below 1  {SHADES[4]} 1"
        )
    return lines


def write_heat_maps(found: Sequence[ModelSimilarity], path: Path) -> None:
    """Write the maps of all pairs of models below one another as SVG, under the scale of their colours.

    One hue grows darker on light pages and lighter on dark ones, so that no two colours need to be told apart.

    Raises
    ------
    InputError
        When the file cannot be written.
    """
    parts, top, width = [_scale()], _SCALE_HEIGHT, _SCALE_WIDTH
    for one in found:
        for kind in sorted({layer.kind for layer in one.layers}):
            rows, columns, grid = similarity_grid(one, kind)
            title = f"{kind}: layers of {one.first} (down) × {one.second} (across), numbered in the order they run"
            parts.append(_drawing(grid, rows, columns, title, top))
            top += _MARGIN + _CELL * len(rows) + _LINE
            width = max(width, _LEFT + _LINE + _CELL * len(columns), _LINE + 8 * len(title))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}" '
        f'font-family="sans-serif" font-size="11">{_STYLE}<rect class="page" width="{width}" height="{top}"/>'
    )
    try:
        path.write_text("\n".join([head, *parts, "</svg>", ""]), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def check_target(path: Path) -> None:
    """Refuse a heat map that cannot be written, before the work is done.

    Raises
    ------
    InputError
        For an ending other than ``.svg``, or a directory that is not there.
    """
    if path.suffix.lower() != ".svg":
        raise InputError(f"a heat map is written as SVG but {path} ends otherwise", "name it something.svg")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: {path.parent} is no directory")


def _shade(value: float) -> str:
    if value >= 1:
        return SHADES[4]
    return SHADES[0] if value < _LEAST else SHADES[1 + min(2, int(3 * value))]


def _scale() -> str:
    """Return the legend: what the colours mean."""
    left, top = _LINE, 40
    marks = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + round(_SCALE_BAR * value)
        marks.append(
            f'<path class="line" d="M{x} {top + 12}v4"/><text x="{x}" y="{top + 27}" {_MIDDLE}>{value:g}</text>'
        )
    return (
        f'<text x="{left}" y="18" font-size="13">similarity of two layers</text><text x="{left}" y="33">entries of '
        "their longest common submatrix, as a part of the entries of both: 0 none, 1 the same</text>"
        f'<rect class="line" x="{left}" y="{top}" width="{_SCALE_BAR}" height="12" fill="url(#scale)"/>{"".join(marks)}'
    )


def _drawing(grid: Grid, rows: Sequence[str], columns: Sequence[str], title: str, top: int) -> str:
    corner, width, height = top + _MARGIN, _CELL * len(columns), _CELL * len(rows)
    parts = [
        f'<text x="{_LINE}" y="{top + 20}" font-size="13">{escape(title)}</text>',
        f'<rect class="zero" x="{_LEFT}" y="{corner}" width="{width}" height="{height}"/>',
    ]
    for j in _numbered(len(columns)):
        x = _LEFT + _CELL * j + _CELL // 2
        parts.append(f'<text x="{x}" y="{corner - 5}" {_MIDDLE}>{j + 1}</text>')
    for i in _numbered(len(rows)):
        y = corner + _CELL * i + _CELL - 2
        parts.append(f'<text x="{_LEFT - 5}" y="{y}" text-anchor="end">{i + 1}</text>')
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            value = float(grid[i, j])
            said = escape(f"{row} × {column}: {value:.3g}")
            parts.append(
                f'<rect class="cell" x="{_LEFT + _CELL * j}" y="{corner + _CELL * i}" width="{_CELL}" '
                f'height="{_CELL}" fill-opacity="{value:.3g}"><title>{said}</title></rect>'
            )
    return "\n".join(parts)


def _numbered(count: int) -> Sequence[int]:
    """Return which of so many layers have their number written beside them: the first, and every tenth, or fifth."""
    step = 5 if count < 30 else 10
    return [0, *range(step - 1, count, step)]
