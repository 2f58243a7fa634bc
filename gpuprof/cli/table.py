"""Fits a table into a terminal: numbers stay whole, texts break between words, and columns too many go below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Between two columns, with the line that a heading's rule would have.
GAP = 3
#: Names without a space that are longer are broken where the column ends.
_LONGEST_NAME = 24


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """Where a column stands: its position among those asked for, and its width in characters."""

    position: int
    width: int


def lay_out_columns(
    headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], width: int
) -> tuple[tuple[ColumnPlace, ...], ...]:
    """Return the columns of each table below one another; all but the first repeat the first column.

    Parameters
    ----------
    headings : sequence of str, N
    rows : sequence of sequences of str, each N
    right : sequence of bool, N
        Which columns hold numbers, which are not broken.
    width : int
        Of the terminal in characters. One column beside the first stands there whatever its width.
    """
    cells = [[row[i] for row in rows] for i in range(len(headings))]
    full = [max(map(_length, (heading, *column))) for heading, column in zip(headings, cells, strict=True)]
    least = [
        max(_word(heading), *(_length(cell) if whole else min(_word(cell), _LONGEST_NAME) for cell in column), 1)
        for heading, column, whole in zip(headings, cells, right, strict=True)
    ]
    return tuple(_share_width(group, full, least, width) for group in _groups(least, width))


def _groups(least: Sequence[int], width: int) -> list[list[int]]:
    groups = [[0]] if least else []
    for position in range(1, len(least)):
        group = groups[-1]
        if len(group) > 1 and sum(least[i] + GAP for i in (*group, position)) - GAP > width:
            groups.append([0, position])
        else:
            group.append(position)
    return groups


def _share_width(
    group: Sequence[int], full: Sequence[int], least: Sequence[int], width: int
) -> tuple[ColumnPlace, ...]:
    """Give each column its full width; where that is too much, narrow the widest that can be narrowed."""
    widths = {position: full[position] for position in group}
    available = width - GAP * (len(group) - 1)
    while sum(widths.values()) > available:
        wide = [position for position in group if widths[position] > least[position]]
        if not wide:
            break
        widths[max(wide, key=lambda position: widths[position])] -= 1
    return tuple(ColumnPlace(position, widths[position]) for position in group)


def _length(text: str) -> int:
    from rich.cells import cell_len

    return max((cell_len(line) for line in text.split("\n")), default=0)


def _word(text: str) -> int:
    return max((_length(word) for word in text.split()), default=0)
