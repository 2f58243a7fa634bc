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
_CELL, _MARGIN, _LINE = 12, 40, 18


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
    """Write the maps of all pairs of models below one another as SVG.

    Raises
    ------
    InputError
        When the file cannot be written.
    """
    parts, top, width = [], 0, 0
    for one in found:
        for kind in sorted({layer.kind for layer in one.layers}):
            rows, columns, grid = similarity_grid(one, kind)
            title = f"{kind}: {one.first} (down) × {one.second} (across)"
            parts.append(_drawing(grid, rows, columns, title, top))
            top += _MARGIN + _CELL * len(rows) + _LINE
            width = max(width, 2 * _LINE + _CELL * len(columns), 8 * len(title))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" font-family="sans-serif">'
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


def _drawing(grid: Grid, rows: Sequence[str], columns: Sequence[str], title: str, top: int) -> str:
    cells = [f'<text x="{_LINE}" y="{top + _MARGIN - 12}" font-size="13">{escape(title)}</text>']
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            shade = round(255 * (1 - float(grid[i, j])))
            said = escape(f"{row} × {column}: {grid[i, j]:.3g}")
            cells.append(
                f'<rect x="{_LINE + _CELL * j}" y="{top + _MARGIN + _CELL * i}" width="{_CELL}" height="{_CELL}" '
                f'fill="rgb({shade},{shade},255)" stroke="#eee"><title>{said}</title></rect>'
            )
    return "\n".join(cells)
