"""Renders rows as a table for people, or as JSON or CSV for programs; progress goes to stderr."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gpuprof.cli.table import ColumnRole, ColumnText, TableLayout, lay_out_columns
from gpuprof.domain.number_format import NumberFormat
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from gpuprof.pipeline.result import Progress as Step
    from gpuprof.pipeline.result import ProgressCallback

#: At the end of a heading.
_UNIT = re.compile(r" (ms|MiB|%)$")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")]


class Format(StrEnum):
    """The format of printed results."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its key in each row, its heading, the text of a value, and its role.

    Machine-readable formats contain every key of the row, unrounded, whatever the columns.
    """

    key: str
    heading: str
    show: Callable[[object], str] = str
    right: bool = True
    role: ColumnRole = ColumnRole.FIGURE
    joined: bool = False


def chosen_format(as_json: bool, as_csv: bool) -> Format:
    """Return the format of the two flags. Raises `InputError` when both are set."""
    if as_json and as_csv:
        raise InputError("--json and --csv exclude each other", "leave one of them out")
    return Format.JSON if as_json else Format.CSV if as_csv else Format.TABLE


def print_rows(
    rows: Sequence[Mapping[str, object]], columns: Sequence[Column], chosen: Format, title: str = ""
) -> None:
    """Print ``rows`` on stdout: a table of ``columns``, a JSON array of objects, or CSV with a header."""
    if chosen is Format.JSON:
        print_json(list(rows))
    elif chosen is Format.CSV:
        _print_csv(rows, [column.key for column in columns])
    else:
        _print_table(rows, columns, title)


def print_json(document: object) -> None:
    """Print one JSON document on stdout; NaN and infinities become null, because JSON cannot express them."""
    # A terminal of another encoding could not print the letters themselves.
    escaped = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    sys.stdout.write(json.dumps(_replace_non_finite(document), indent=1, ensure_ascii=escaped) + "\n")


def print_text(text: str) -> None:
    """Print a line of text on stdout; a terminal breaks the line between words."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(Text(text), soft_wrap=not _has_width(console))


def say(message: str) -> None:
    """Print a line for people on stderr; a terminal breaks the line between words.

    A line for a full disk is lost, without an error.
    """
    with suppress(OSError):
        sys.stderr.write(_break_lines(message) + "\n")


def _break_lines(message: str) -> str:
    """Return a text with line breaks between words where stderr is a terminal; names longer than a line stay whole."""
    if not sys.stderr.isatty():
        return message
    width = shutil.get_terminal_size().columns
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in message.split("\n"))
    return "\n".join("\n".join(line) for line in lines)


def say_note(*notes: str) -> None:
    """Print remarks on a result on stderr, like `say`."""
    for note in notes:
        say(f"gpuprof: {note}")


@contextmanager
def show_progress(refresh_between: bool = True) -> Iterator[ProgressCallback]:
    """Yield a callback that shows progress: steps as a bar, work without a known end as separate lines.

    ``refresh_between``: whether the bar is redrawn between steps, too, ten times a second; False where this process
    measures latencies.
    """
    with progress(refresh_between) as bar:
        task: TaskID | None = None

        def show(step: Step) -> None:
            nonlocal task
            if not step.total:
                say(step.step)
                return
            if task is None or bar.tasks[0].total != step.total:  # another piece of work, with a pace of its own
                if task is not None:
                    bar.remove_task(task)
                task = bar.add_task(step.step, total=step.total, completed=step.done, first=step.done)
            paced_s = bar.tasks[0].elapsed or 0.0
            bar.update(task, description=step.step, completed=step.done, paced_s=paced_s, refresh=not refresh_between)

        yield show


def progress(refresh_between: bool = True) -> Progress:
    """Return a progress bar on stderr, with the time left; the bar vanishes when done and is absent in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from gpuprof.cli.time_left import TimeLeftColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeLeftColumn(),
        console=console,
        transient=True,
        auto_refresh=refresh_between,
        # Each redrawn bar would be a line in a pipe or a log.
        disable=not console.is_terminal,
    )


def mebibytes(value: object) -> str:
    """Show bytes as MiB; None as a dash."""
    return f"{value / 2**20:,.1f}" if isinstance(value, int | float) else "–"


def percent(value: object) -> str:
    """Show a fraction as a signed percentage; None as a dash."""
    return f"{100 * value:+.1f}%" if isinstance(value, int | float) else "–"


def _print_csv(rows: Sequence[Mapping[str, object]], keys: Sequence[str]) -> None:
    # The columns that people see first, then all others: programs get every key of any row.
    names = list(dict.fromkeys([*keys, *(name for row in rows for name in row)]))
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _flatten_value(row.get(name)) for name in names})


def _flatten_value(value: object) -> object:
    return json.dumps(value) if isinstance(value, dict | list | tuple) else value


def _print_table(rows: Sequence[Mapping[str, object]], columns: Sequence[Column], title: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not _has_width(console):
        console.width = 200  # a pipe has no width to fold to
    cells = [_show_column(column, [row.get(column.key) for row in rows]) for column in columns]
    texts = [
        ColumnText(c.heading, tuple(shown), c.right, c.role, c.joined) for c, shown in zip(columns, cells, strict=True)
    ]
    layout = lay_out_columns(texts, console.width)
    for line in (title, _describe_common(texts, layout)):
        if line:
            console.print(Text(line))
    for order, group in enumerate(layout.tables):
        # Padding at each side of the divider, which is one character wide.
        left = (layout.gap - 1) // 2
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, layout.gap - 1 - left, 0, left))
        if order:
            console.print()
        for place in group:
            column = columns[place.position]
            side: Literal["left", "right"] = "right" if column.right else "left"
            table.add_column(column.heading, justify=side, overflow="fold", width=place.width)
        for row in range(len(rows)):
            table.add_row(*(Text(cells[place.position][row]) for place in group))
        console.width = max(console.width, sum(place.width + layout.gap for place in group) - layout.gap)
        console.print(table)
    if layout.left_out:
        names = dict.fromkeys(_full_heading(texts, position) for position in layout.left_out)
        say(f"not shown at this width: {', '.join(names)} (--json and --csv have everything)")


def _has_width(console: Console) -> bool:
    """Return whether the output goes to a terminal, or its width is given by ``COLUMNS``."""
    return console.is_terminal or "COLUMNS" in os.environ


def _show_column(column: Column, values: Sequence[object]) -> list[str]:
    if isinstance(column.show, NumberFormat):
        return column.show.show_column(values)
    return ["–" if value is None else column.show(value) for value in values]


def _describe_common(texts: Sequence[ColumnText], layout: TableLayout) -> str:
    """Return the values common to all rows, without empty values."""
    shown = ((position, texts[position].cells[0]) for position in layout.above)
    named = [_name_cell(_full_heading(texts, position), cell) for position, cell in shown if cell.strip(" –")]
    return ("; " if any(", " in one for one in named) else ", ").join(named)


def _name_cell(heading: str, cell: str) -> str:
    """Return a cell with its heading in natural order: ``"share 25%"`` for the heading "share %"."""
    return f"{heading.removesuffix(' %')} {cell}%" if heading.endswith(" %") else f"{heading} {cell}"


def _full_heading(texts: Sequence[ColumnText], position: int) -> str:
    """Return a heading for use alone: a joined column's heading follows its owner's, without the owner's unit."""
    owner = position
    while texts[owner].joined and owner:
        owner -= 1
    own = texts[position].heading
    return own if owner == position else f"{_UNIT.sub('', texts[owner].heading)} {own}"


def _replace_non_finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return value
