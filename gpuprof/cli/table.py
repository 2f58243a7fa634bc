"""Layout of a table in a terminal: numbers are never broken, texts break between words, and key columns are kept.

With too many columns, columns of equal values move into a line above; if that is not enough, derived columns are left
out, and the rest is split into tables below one another, each with the keys of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

#: Characters between two columns, and the narrow gap for more columns in a table.
GAP, _NARROW_GAP = 3, 2
#: Longer names without a space are broken at the column's end.
_LONGEST_NAME = 32
#: Largest part of the width for keys that every part of a table repeats.
_MOST_FOR_KEYS = 0.6


class ColumnRole(StrEnum):
    """The role of a column, which decides its treatment in a narrow terminal."""

    SUBJECT = "subject"  #: subject of the rows: in every part of the table
    KEY = "key"  #: identifies a row: in every part, or above where all its values are equal
    FIGURE = "figure"
    DERIVED = "derived"  #: follows from other columns: left out first


@dataclass(frozen=True, slots=True)
class ColumnText:
    """A column as text."""

    heading: str
    cells: tuple[str, ...]
    right: bool = True  #: Whether the column holds numbers, which are not broken.
    role: ColumnRole = ColumnRole.FIGURE
    joined: bool = False  #: Whether the column qualifies its predecessor, from which it is not separated.

    @property
    def full(self) -> int:
        """The width in which nothing is broken."""
        return max(map(_length, (self.heading, *self.cells)))

    @property
    def least(self) -> int:
        """The width in which no number and no word but a long name is broken."""
        cells = (_length(cell) if self.right else min(_word(cell), _LONGEST_NAME) for cell in self.cells)
        return max(_word(self.heading), *cells, 1)


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """The place of a column: its position in the input, and its width in characters."""

    position: int
    width: int


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The layout of a table: columns of each part, common columns above, and omitted columns, by position."""

    tables: tuple[tuple[ColumnPlace, ...], ...]
    above: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    gap: int = GAP  #: Characters between two columns.


def lay_out_columns(columns: Sequence[ColumnText], width: int) -> TableLayout:
    """Return the layout of the columns in a terminal of ``width`` characters.

    Each part has a column in addition to its keys, whatever the width.
    """
    usual, narrow = (_lay_out(columns, width, gap) for gap in (GAP, _NARROW_GAP))
    worse = (len(usual.tables), len(usual.left_out)) > (len(narrow.tables), len(narrow.left_out))
    return narrow if worse else usual


def _lay_out(columns: Sequence[ColumnText], width: int, gap: int) -> TableLayout:
    least, full = [column.least for column in columns], [column.full for column in columns]
    kept = list(range(len(columns)))
    above: list[int] = []
    left_out: list[int] = []
    if not _fit(kept, full, width, gap):
        above = [position for position in kept if _is_above(columns, position)]
        kept = [position for position in kept if position not in above]
    if not _fit(kept, least, width, gap):
        left_out = [position for position in kept if columns[position].role is ColumnRole.DERIVED]
        kept = [position for position in kept if position not in left_out]
    groups = [kept] if _fit(kept, least, width, gap) else _split_table(columns, kept, least, width, gap)
    tables = tuple(_share_width(group, full, least, width - gap * (len(group) - 1)) for group in groups)
    return TableLayout(tables, tuple(above), tuple(left_out), gap)


def _is_above(columns: Sequence[ColumnText], position: int) -> bool:
    """Return whether a column is printed above: no figure, and equal in every row.

    With a single row, only its keys, and texts that qualify a figure, such as its source.
    """
    column = columns[position]
    if position == 0 and not any(one.role is ColumnRole.SUBJECT for one in columns):
        return False
    wanted = column.role is ColumnRole.KEY or (
        not column.right and column.role is ColumnRole.FIGURE and (column.joined or len(column.cells) > 1)
    )
    return wanted and len(set(column.cells)) == 1


def _fit(positions: Sequence[int], least: Sequence[int], width: int, gap: int) -> bool:
    return len(positions) <= 1 or sum(least[i] + gap for i in positions) - gap <= width


def _split_table(
    columns: Sequence[ColumnText], kept: Sequence[int], least: Sequence[int], width: int, gap: int
) -> list[list[int]]:
    """Return the positions of each table; all begin with the keys, as many as leave room for figures."""
    keys = _repeated_keys(columns, kept, least, width)
    units: list[list[int]] = []
    for position in kept:
        if position in keys:
            continue
        if columns[position].joined and units and units[-1][-1] == position - 1:
            units[-1].append(position)
        else:
            units.append([position])
    groups: list[list[int]] = [list(keys)]
    for unit in units:
        group = groups[-1]
        if len(group) > len(keys) and not _fit([*group, *unit], least, width, gap):
            groups.append([*keys, *unit])
        else:
            group.extend(unit)
    return groups


def _repeated_keys(
    columns: Sequence[ColumnText], kept: Sequence[int], least: Sequence[int], width: int
) -> tuple[int, ...]:
    roles = {role: [i for i in kept if columns[i].role is role] for role in ColumnRole}
    keys = roles[ColumnRole.SUBJECT] + roles[ColumnRole.KEY] or _first_that_tell_apart(columns, kept)
    taken: list[int] = []
    for position in keys:
        if not taken or sum(least[i] + GAP for i in (*taken, position)) <= _MOST_FOR_KEYS * width:
            taken.append(position)
    return tuple(sorted(taken))


def _first_that_tell_apart(columns: Sequence[ColumnText], kept: Sequence[int]) -> list[int]:
    """Return the first columns that together identify each row, for columns without roles, such as a query's."""
    keys = list(kept[:1])
    for position in kept[1:]:
        distinct_rows = set(zip(*(columns[key].cells for key in keys), strict=True))
        if len(distinct_rows) == len(columns[0].cells):
            break
        if len(set(zip(*(columns[key].cells for key in (*keys, position)), strict=True))) > len(distinct_rows):
            keys.append(position)
    return keys


def _share_width(
    group: Sequence[int], full: Sequence[int], least: Sequence[int], available: int
) -> tuple[ColumnPlace, ...]:
    """Give each column its full width; if the sum is too large, narrow the widest columns first."""
    widths = {position: full[position] for position in group}
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
