"""Renders rows as a table for people, or as JSON or CSV for programs; progress goes to stderr."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import field_validator

from gpuprof.domain.table import Column, ColumnTexts, show_column
from gpuprof.errors import InputError
from gpuprof.pipeline.settings import Settings, option
from gpuprof.pipeline.verdicts import VERDICTS, SloVerdict, check_output, replace_non_finite

if TYPE_CHECKING:
    from rich.console import Console

    from gpuprof.pipeline.result import Progress as Step
    from gpuprof.pipeline.result import ProgressCallback


#: Characters between two columns, as rich's padding makes them.
_GAP = 3
#: Width of tables in a pipe, which has none of its own.
_PIPE_COLUMNS = 200
#: Columns that identify a row, and its conditions: they stand in every part of a table that is too wide for the
#: terminal. Conditions, and texts of several rows, stand above the table where all rows have the same.
_SUBJECTS = "model policy batch predictor where neighbour first replica place begin_s number verdict"
_CONDITIONS = (
    "device dims share share_pct processes beside node gpu mig turns setting quantity end_s suite scenario run_id "
    "sm_share_pct mig_profile position"
)


class Format(StrEnum):
    """The format of printed results."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


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
    sys.stdout.write(json.dumps(replace_non_finite(document), indent=1, ensure_ascii=escaped) + "\n")


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
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Each redrawn bar would be a line in a pipe or a log.
    is_hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, auto_refresh=refresh_between, disable=is_hidden) as bar:
        task = bar.add_task("", total=None, visible=False)

        def show(step: Step) -> None:
            if not step.total:
                say(step.step)
                return
            if bar.tasks[0].total != step.total:  # other work, with a pace of its own
                bar.reset(task, total=step.total, visible=True)
            bar.update(task, description=step.step, completed=step.done, refresh=not refresh_between)

        yield show


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
    """Print a table of the columns that have a value; a table wider than the terminal in parts with the same keys."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not _has_width(console):
        console.width = _PIPE_COLUMNS
    columns = [column for column in columns if not rows or any(row.get(column.key) not in (None, "") for row in rows)]
    shown = [show_column(rows, column) for column in columns]
    is_wide = _share_width(shown, console.width) is None
    common = [cells for cells in shown if is_wide and _is_common(cells)]
    lines = (title, "; ".join(f"{cells.column.heading}: {cells.texts[0]}" for cells in common))
    for line in filter(None, lines):
        console.print(Text(line))
    shown = [cells for cells in shown if cells not in common] or shown[:1]
    for number, part in enumerate(_split_columns(shown, console.width)):
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        widths: Sequence[int | None] = _share_width(part, console.width) or [None] * len(part)
        for cells, width in zip(part, widths, strict=True):
            side: Literal["left", "right"] = "right" if cells.is_number else "left"
            table.add_column(cells.column.heading, justify=side, width=width, overflow="fold")
        for texts in zip(*(cells.texts for cells in part), strict=True):
            table.add_row(*map(Text, texts))
        if number:
            console.print()
        console.print(table)


def _is_common(cells: ColumnTexts) -> bool:
    """Return whether all rows have the same condition, or several rows the same text."""
    key = cells.column.key
    is_text = len(cells.texts) > 1 and not cells.is_number and key not in _SUBJECTS.split()
    return len(set(cells.texts)) == 1 and (key in _CONDITIONS.split() or is_text)


def _share_width(part: Sequence[ColumnTexts], width: int) -> list[int] | None:
    """Return the width of each column of a table, the widest narrowed first; None where words would be broken."""
    from rich.cells import cell_len

    least, widths = [], []
    for cells in part:
        heading, lines = cells.column.heading, [line for text in cells.texts for line in text.split("\n")]
        words = [*heading.split(), *(lines if cells.is_number else " ".join(lines).split())]
        least.append(max(map(cell_len, words), default=1))
        widths.append(max(map(cell_len, (heading, *lines))))
    available = width - _GAP * (len(part) - 1)
    if sum(least) > available:
        return None
    while sum(widths) > available:
        widths[max(range(len(part)), key=lambda i: (widths[i] > least[i], widths[i]))] -= 1
    return widths


def _split_columns(shown: Sequence[ColumnTexts], width: int) -> Iterator[Sequence[ColumnTexts]]:
    """Yield the columns of each table: the keys, and as many others as fit beside them."""
    keys = [cells for cells in shown if cells.column.key in f"{_SUBJECTS} {_CONDITIONS}".split()] or list(shown[:1])
    part, rest = list(keys), [cells for cells in shown if cells not in keys]
    while rest:
        size = next((i for i, cells in enumerate(rest[1:], 1) if not cells.column.is_joined), len(rest))
        wider = sorted([*part, *rest[:size]], key=shown.index)
        if len(part) > len(keys) and _share_width(wider, width) is None:
            yield part
            part = list(keys)
        else:
            part, rest = wider, rest[size:]
    yield part


def _has_width(console: Console) -> bool:
    """Return whether output goes to a terminal, or ``COLUMNS`` gives its width."""
    return console.is_terminal or "COLUMNS" in os.environ


class VerdictOptions(Settings):
    """Sources of the predictions that verdicts compare with, and output files."""

    title: ClassVar[str] = "Predictions and output"

    db: Path | None = option(None, "Kernel database for --estimator.")
    estimator: str | None = option(None, "Estimator of the predicted times; default: the times in the map.")
    output: Path | None = option(
        None,
        "File to write to, too: results as .json, verdicts as .md or JUnit's .xml.",
        "-o",
        "--output",
        output="file",
    )
    verbose: bool = option(False, "Print all tables and remarks.", "--verbose", "-v")
    no_fail: bool = option(False, "Exit with code 0 even when an SLO was missed.")

    @field_validator("output")
    @classmethod
    def _check_suffix(cls, path: Path | None) -> Path | None:
        return None if path is None else check_output(path)


def show_verdicts(verdicts: Sequence[SloVerdict]) -> None:
    """Print the verdicts, with predictions if there are any."""
    print_rows([verdict.record() for verdict in verdicts], VERDICTS, Format.TABLE)
    for verdict in verdicts:
        if verdict.reason:
            print_text(f"{verdict.model}: {verdict.reason}")
