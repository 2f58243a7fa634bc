"""Renders rows as a table for people, or as JSON or CSV for programs; progress goes to stderr."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpuprof.domain.number_format import NumberFormat, number_formatter
from gpuprof.errors import InputError
from gpuprof.pipeline.settings import Settings, option

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from gpuprof.pipeline.result import Progress as Step
    from gpuprof.pipeline.result import ProgressCallback
    from gpuprof.pipeline.verdicts import SloVerdict


#: Space between two columns, as rich's padding makes it.
_GAP = "   "
#: Width of tables in a pipe, which has none of its own.
_PIPE_COLUMNS = 200


class Format(StrEnum):
    """The format of printed results."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class ColumnRole(StrEnum):
    """The role of a column, which decides its treatment in a narrow terminal."""

    SUBJECT = "subject"  #: subject of the rows: in every part of the table
    KEY = "key"  #: identifies a row: in every part, or above where all its values are equal
    FIGURE = "figure"
    DERIVED = "derived"  #: follows from other columns: left out first


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its key in each row, its heading, the text of a value, and its role.

    JSON and CSV contain every key of the row, unrounded, even without a column. ``right``: whether the column holds
    numbers, which are not wrapped; ``joined``: whether it must follow the preceding column, which it qualifies.
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
    """Print a line for people on stderr. A line for a full disk is lost, without an error."""
    with suppress(OSError):
        sys.stderr.write(f"{message}\n")


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
        task = bar.add_task("", total=None, visible=False)

        def show(step: Step) -> None:
            if not step.total:
                say(step.step)
                return
            if bar.tasks[0].total != step.total:  # other work, with a pace of its own
                bar.reset(task, total=step.total, visible=True)
            bar.update(task, description=step.step, completed=step.done, refresh=not refresh_between)

        yield show


def progress(refresh_between: bool = True) -> Progress:
    """Return a progress bar on stderr, with the time left; the bar vanishes when done and is absent in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
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
    """Print a table of the columns that have a value.

    Where it is wider than the terminal, equal values stand above and derived columns are left out; if that is not
    enough, the other columns are printed in several tables with the same keys.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if not _has_width(console):
        console.width = _PIPE_COLUMNS
    columns = [column for column in columns if not rows or any(row.get(column.key) is not None for row in rows)]
    texts = {column.key: _show_column(column, [row.get(column.key) for row in rows]) for column in columns}
    shown_columns, common, left_out = list(columns), list[Column](), list[Column]()
    if _share_width(shown_columns, texts, console.width) is None:
        has_subject = any(column.role is ColumnRole.SUBJECT for column in columns)
        common = [column for column in columns[not has_subject :] if _is_common(column, texts[column.key])]
        shown_columns = [column for column in columns if column not in common] or shown_columns[:1]
    if _share_width(shown_columns, texts, console.width) is None:
        left_out = [column for column in shown_columns if column.role is ColumnRole.DERIVED]
        shown_columns = [column for column in shown_columns if column not in left_out]
    cells = [_describe_cell(columns, column, texts[column.key][0]) for column in common]
    for line in filter(None, (title, "; ".join(cells))):
        console.print(Text(line))
    for number, part in enumerate(_split_columns(shown_columns, texts, console.width)):
        if number:
            console.print()
        widths = _share_width(part, texts, console.width)
        console.print(_make_table(part, texts, widths or [None] * len(part)))
    if left_out:
        names = ", ".join(_describe_cell(columns, column) for column in left_out)
        say(f"not shown at this width: {names} (--json and --csv have everything)")


def _is_common(column: Column, cells: Sequence[str]) -> bool:
    """Return whether all rows have the same key or text; of a single row, only texts that qualify a figure."""
    is_text = column.role is ColumnRole.FIGURE and not column.right and (column.joined or len(cells) > 1)
    return len(set(cells)) == 1 and (column.role is ColumnRole.KEY or is_text)


def _describe_cell(columns: Sequence[Column], column: Column, cell: str = "") -> str:
    """Return a cell with its heading, in natural order: ``latency from measured``, ``share 25%``."""
    heading = column.heading
    if column.joined:
        owner = next(previous for previous in reversed(columns[: columns.index(column)]) if not previous.joined)
        heading = f"{owner.heading.removesuffix(' ms').removesuffix(' MiB')} {heading}"
    if heading.endswith(" %") and cell:
        return f"{heading.removesuffix(' %')} {cell}%"
    return f"{heading} {cell}".rstrip()


def _make_table(columns: Sequence[Column], texts: Mapping[str, Sequence[str]], widths: Sequence[int | None]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column.heading, justify="right" if column.right else "left", width=width, overflow="fold")
    for cells in zip(*(texts[column.key] for column in columns), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _share_width(columns: Sequence[Column], texts: Mapping[str, Sequence[str]], width: int) -> list[int] | None:
    """Return the width of each column of a table, the widest narrowed first; None where words would be broken."""
    from rich.cells import cell_len

    least, widths = [], []
    for column in columns:
        heading, cells = column.heading.split(), [line for text in texts[column.key] for line in text.split("\n")]
        words = [*heading, *(cells if column.right else " ".join(cells).split())]
        least.append(max(map(cell_len, words), default=1))
        widths.append(max(map(cell_len, (column.heading, *cells))))
    available = width - len(_GAP) * (len(columns) - 1)
    if sum(least) > available:
        return None
    while sum(widths) > available:
        widths[max(range(len(columns)), key=lambda i: (widths[i] > least[i], widths[i]))] -= 1
    return widths


def _split_columns(
    columns: Sequence[Column], texts: Mapping[str, Sequence[str]], width: int
) -> Iterator[Sequence[Column]]:
    """Yield the columns of each table: the keys, and as many others as fit beside them."""
    keys = [column for column in columns if column.role in (ColumnRole.SUBJECT, ColumnRole.KEY)] or list(columns[:1])
    part, rest = list(keys), [column for column in columns if column not in keys]
    while rest:
        size = next((i for i, column in enumerate(rest[1:], 1) if not column.joined), len(rest))
        wider = sorted([*part, *rest[:size]], key=columns.index)
        if len(part) > len(keys) and _share_width(wider, texts, width) is None:
            yield part
            part = list(keys)
        else:
            part, rest = wider, rest[size:]
    yield part


def _has_width(console: Console) -> bool:
    """Return whether the output goes to a terminal, or its width is given by ``COLUMNS``."""
    return console.is_terminal or "COLUMNS" in os.environ


def _show_column(column: Column, values: Sequence[object]) -> list[str]:
    if isinstance(column.show, NumberFormat):
        return column.show.show_column(values)
    return ["–" if value is None else column.show(value) for value in values]


def _replace_non_finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return value


_VERDICTS = (
    Column("model", "model", right=False, role=ColumnRole.SUBJECT),
    Column("verdict", "SLO", right=False, role=ColumnRole.SUBJECT),
    Column("in_time_pct", "in time %", number_formatter(4)),
    Column("latency_ms", "p99 ms", number_formatter()),
    Column("predicted_ms", "predicted", number_formatter(), joined=True),
    Column("slo_ms", "SLO ms", number_formatter()),
    Column("rate_rps", "sent/s", number_formatter(4)),
    Column("goodput_rps", "goodput/s", number_formatter(4)),
)


class VerdictOptions(Settings):
    """Times that verdicts are compared with, and their output."""

    title: ClassVar[str] = "Predictions and output"

    db: Path | None = option(None, "Kernel database, for another estimator.")
    estimator: str | None = option(None, "Estimator of the predicted times; default: the times in the map.")
    output: Path | None = option(
        None,
        "File to write to, too: results as .json, verdicts as .md or JUnit's .xml.",
        "-o",
        "--output",
        output=True,
    )
    verbose: bool = option(False, "Print all tables and remarks.", "--verbose", "-v")
    no_fail: bool = option(False, "Exit with code 0 even when an SLO was missed.")


def show_verdicts(verdicts: Sequence[SloVerdict]) -> None:
    """Print the verdicts; predictions only where there are any."""
    print_rows([verdict.record() for verdict in verdicts], _VERDICTS, Format.TABLE)
    for verdict in verdicts:
        if verdict.reason:
            print_text(f"{verdict.model}: {verdict.reason}")
