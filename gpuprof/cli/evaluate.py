"""``gpuprof evaluate``: errors of estimates on left-out measurements."""

from __future__ import annotations

from gpuprof.cli.output import Column, ColumnRole, Format, print_rows, say_note, show_progress
from gpuprof.pipeline.evaluate import EvaluateOptions

_COLUMNS = (
    Column("setting", "left out", right=False, role=ColumnRole.KEY),
    Column("quantity", "quantity", right=False, role=ColumnRole.KEY),
    Column("predictor", "predictor", right=False, role=ColumnRole.SUBJECT),
    Column("count", "figures"),
    Column("mean_pct", "mean error %", lambda value: _to_tenths(value)),
    Column("median_pct", "median %", lambda value: _to_tenths(value)),
    Column("p95_pct", "p95 %", lambda value: _to_tenths(value)),
    Column("coverage_pct", "inside 90% interval, %", lambda value: _to_tenths(value)),
)
_ARCHITECTURE = Column("architecture", "architecture", right=False)


def evaluate(options: EvaluateOptions, chosen: Format = Format.TABLE) -> None:
    """Compare estimates with held-out measurements: of each architecture, or for any estimator with --estimator."""
    from gpuprof.pipeline.evaluate import evaluate as compare

    with show_progress() as show:
        result = compare(options, progress=show)
    columns = (*_COLUMNS[:3], _ARCHITECTURE, *_COLUMNS[3:]) if options.by_architecture else _COLUMNS
    print_rows(result.rows(), columns, chosen)
    say_note(*result.notes)


def _to_tenths(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, int | float) else "–"
