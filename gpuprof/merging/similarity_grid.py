"""The similarities of the layers of two models as a grid, and as a map of characters for a terminal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpuprof.merging.similarity import ModelSimilarity

Grid = npt.NDArray[np.float64]

#: Characters in order of similarity: below 0.01, up to 1/3, up to 2/3, below 1, and 1.
SHADES = "·░▒▓█"
_MOST_CHARACTERS, _LEAST = 76, 0.01


def similarity_grid(similarity: ModelSimilarity, kind: str) -> tuple[list[str], list[str], Grid]:
    """Return (layers of the first model, layers of the second, similarities of shape (first, second)) of a kind."""
    layers = [layer for layer in similarity.layers if layer.kind == kind]
    rows = list(dict.fromkeys(layer.first for layer in layers))
    columns = list(dict.fromkeys(layer.second for layer in layers))
    grid = np.zeros((len(rows), len(columns)))
    at_row, at_column = ({name: i for i, name in enumerate(names)} for names in (rows, columns))
    for layer in layers:
        grid[at_row[layer.first], at_column[layer.second]] = layer.similarity
    return rows, columns, grid


def text_map(similarity: ModelSimilarity) -> list[str]:
    """Return the lines of a map for a terminal; in large maps a character is the maximum of a square of layers."""
    lines = []
    for kind in sorted({layer.kind for layer in similarity.layers}):
        rows, columns, grid = similarity_grid(similarity, kind)
        step = -(-max(grid.shape) // _MOST_CHARACTERS)
        each = f", {step} × {step} layers a character" if step > 1 else ""
        lines.append(
            f"{kind}: {len(rows)} layers of {similarity.first} (down) × {len(columns)} of {similarity.second}{each}"
        )
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


def _shade(value: float) -> str:
    if value >= 1:
        return SHADES[4]
    return SHADES[0] if value < _LEAST else SHADES[1 + min(2, int(3 * value))]
