"""Tables: columns as data, with their headings and the texts of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpuprof.domain.number_format import NumberFormat

_HEADINGS = {
    "cost_per_hour": "$/h",
    "gpus": "GPUs",
    "latency_mean_ms": "mean ms",
    "latency_p50_ms": "p50 ms",
    "latency_p99_ms": "p99 ms",
    "memory_peak_bytes": "memory MiB",
    "mig": "MIG",
    "processes": "procs",
    "rate_rps": "req/s",
    "slo_ms": "SLO ms",
    "source": "from",
    "throughput_rps": "requests/s",
}
_UNITS = {"_ms": " ms", "_us": " µs", "_rps": "/s", "_pct": " %", "_bytes": " MiB", "_s": " s"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its key in each row, its heading, and the text of a value.

    Without ``show``, numbers are rounded, bytes in MiB, errors in percent. JSON and CSV contain every key of the row,
    unrounded, even without a column.
    """

    key: str
    heading: str
    show: Callable[[object], str] | None = None

    @property
    def is_joined(self) -> bool:
        """Whether the column qualifies the preceding one and must follow it."""
        return self.key.startswith("predicted_") or self.key.endswith(
            ("_error", "_source", "interval", "_low_ms", "_high_ms")
        )


def make_columns(text: str, show: Mapping[str, Callable[[object], str]] | None = None) -> tuple[Column, ...]:
    """Return columns from words ``key``, or ``key:heading_with_underscores`` where the heading does not follow from it.

    ``show``: texts of values, by key.
    """
    pairs = (word.partition(":") for word in text.split())
    headings = {key: heading.replace("_", " ") or _make_heading(key) for key, _, heading in pairs}
    return tuple(Column(key, heading, (show or {}).get(key)) for key, heading in headings.items())


def _make_heading(key: str) -> str:
    if key.startswith("predicted_") or key.endswith("_error"):
        return "predicted" if key.startswith("predicted_") else "off by"
    if key in _HEADINGS:
        return _HEADINGS[key]
    name, unit = next(((key.removesuffix(end), unit) for end, unit in _UNITS.items() if key.endswith(end)), (key, ""))
    return "from" if key.endswith("_source") else f"{name.replace('_', ' ')}{unit}"


def mebibytes(value: object) -> str:
    """Show bytes as MiB; None as a dash."""
    return f"{value / 2**20:,.1f}" if isinstance(value, int | float) else "–"


def percent(value: object) -> str:
    """Show a fraction as a signed percentage; None as a dash."""
    return f"{100 * value:+.1f}%" if isinstance(value, int | float) else "–"


@dataclass(frozen=True, slots=True)
class ColumnTexts:
    """A column with the texts of its rows."""

    column: Column
    texts: Sequence[str]
    is_number: bool  #: Numbers stand to the right, and are not wrapped.


def show_column(rows: Sequence[Mapping[str, object]], column: Column) -> ColumnTexts:
    """Return the texts of a column: None as a dash, numbers in one form."""
    values, show = [row.get(column.key) for row in rows], column.show
    is_number = all(isinstance(value, int | float | None) and not isinstance(value, bool) for value in values)
    if show is None and is_number:
        show = _choose_number_format(column.key)
    if isinstance(show, NumberFormat):
        return ColumnTexts(column, show.show_column(values), is_number)
    show = show or _show_value
    return ColumnTexts(column, ["–" if value is None else show(value) for value in values], is_number)


def _choose_number_format(key: str) -> Callable[[object], str]:
    if key.endswith(("_bytes", "_error")):
        return mebibytes if key.endswith("_bytes") else percent
    return NumberFormat(4 if key.endswith(("_rps", "in_time_pct")) or key.startswith("cost_") else 3)


def _show_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_show_value, value))
    return NumberFormat(4)(value) if isinstance(value, float) else str(value)


def format_markdown(rows: Sequence[Mapping[str, object]], columns: Sequence[Column]) -> str:
    """Return a Markdown table."""
    texts = zip(*(show_column(rows, column).texts for column in columns), strict=True)
    lines = [f"| {' | '.join(column.heading for column in columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in texts]
    return "\n".join(lines) + "\n"
