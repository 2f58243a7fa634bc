"""``gpuprof evaluate``: errors of estimates on left-out measurements."""

from __future__ import annotations

from gpuprof.cli.output import Format, make_columns, print_rows, say_note, show_progress
from gpuprof.pipeline.evaluate import EvaluateOptions

_COLUMNS = make_columns(
    "setting:left_out quantity predictor architecture count:figures mean_pct:mean_error_% median_pct p95_pct "
    "coverage_pct:inside_90%_interval,_%",
)


def evaluate(options: EvaluateOptions, chosen: Format = Format.TABLE) -> None:
    """Compare estimates with held-out measurements: of each architecture, or for any estimator with --estimator."""
    from gpuprof.pipeline.evaluate import evaluate as compare

    with show_progress() as show:
        result = compare(options, progress=show)
    print_rows(result.rows(), _COLUMNS, chosen)
    say_note(*result.notes)
