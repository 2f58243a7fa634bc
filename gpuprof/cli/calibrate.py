"""``gpuprof calibrate``: fit the interference on a device, including iGniter's coefficients of a GPU."""

from __future__ import annotations

from gpuprof.cli.options import ModelsArgument
from gpuprof.cli.output import Format, make_columns, print_rows, say_note, show_progress
from gpuprof.pipeline.calibrate import CalibrateOptions

_COLUMNS = make_columns("of coefficient value unit")
_RANKED = make_columns(
    "interference left_out rows:latencies mean_pct:mean_error_% p95_pct:95th_percentile_% "
    "interval:measured_/_predicted,_90% coefficients",
    {"left_out": lambda value: f"each {value}"},
)


def calibrate(
    options: CalibrateOptions,
    models: ModelsArgument = None,
    chosen: Format = Format.TABLE,
) -> None:
    """Fit the interference of workloads on a device, for estimates with neighbours.

    First measures missing co-locations of MODELs: on a GPU iGniter's eleven configurations and several copies, on a
    CPU two to four models at the same time. On a GPU, fits iGniter's coefficients and keeps them in the database. On
    any device, fits the interference models to measured co-locations, and tests them on held-out victims.
    --quick only measures a few small networks without neighbours, which scale the estimates for all other models.
    """
    from gpuprof.pipeline.calibrate import calibrate as fit

    with show_progress() as show:
        result = fit(models or (), options, progress=show)
    say_note(*result.notes)
    if result.igniter or result.ratios:
        print_rows(result.rows(), _COLUMNS, chosen)
    if not (result.igniter or result.ratios) or (result.ranking and chosen is Format.TABLE):
        print_rows(result.ranking_rows(), _RANKED, chosen)
