"""Verbs of fitted models: ``calibrate``, ``train`` and ``evaluate``."""

from __future__ import annotations

import gpuprof
from gpuprof.cli.options import ModelsArgument
from gpuprof.cli.output import Format, print_rows, say_note, show_progress
from gpuprof.domain.table import make_columns

_COEFFICIENTS = make_columns("of coefficient value unit")
_RANKED = make_columns(
    "interference left_out rows:latencies mean_pct:mean_error_% p95_pct:95th_percentile_% "
    "interval:measured_/_predicted,_90% coefficients",
    {"left_out": lambda value: f"each {value}"},
)


def calibrate(options: gpuprof.CalibrateOptions, models: ModelsArgument = None, chosen: Format = Format.TABLE) -> None:
    """Fit the interference of workloads on a device, for estimates with neighbours.

    First measures missing co-locations of MODELs: on a GPU iGniter's eleven configurations and several copies, on a
    CPU two to four models at the same time. On a GPU, fits iGniter's coefficients and keeps them in the database. On
    any device, fits the interference models to measured co-locations, and tests them on held-out victims.
    --quick only measures a few small networks without neighbours, which scale the estimates for all other models.
    """
    with show_progress() as show:
        result = gpuprof.calibrate(models or (), options, progress=show)
    say_note(*result.notes)
    if result.coefficients:
        print_rows(result.coefficients, _COEFFICIENTS, chosen)
    if not result.coefficients or (result.ranking and chosen is Format.TABLE):
        print_rows(result.ranking_rows(), _RANKED, chosen)


_TRAINED = make_columns(
    "device architectures ops points:models_×_batches latency_factor:latency_within_×/÷ "
    "memory_factor:memory_within_×/÷ creq_factor:Creq_within_×/÷"
)


def train(options: gpuprof.TrainOptions, chosen: Format = Format.TABLE) -> None:
    """Fit regressors to the measured ops and models of a device; estimate uses them from then on."""
    with show_progress() as show:
        result = gpuprof.train(options, progress=show)
    print_rows(result.rows(), _TRAINED, chosen)
    say_note(*result.notes)


_ERRORS = make_columns(
    "setting:left_out quantity predictor architecture count:figures mean_pct:mean_error_% median_pct p95_pct "
    "coverage_pct:inside_90%_interval,_%"
)


def evaluate(options: gpuprof.EvaluateOptions, chosen: Format = Format.TABLE) -> None:
    """Compare estimates with held-out measurements: of each architecture, or for any estimator with --estimator."""
    with show_progress() as show:
        result = gpuprof.evaluate(options, progress=show)
    print_rows(result.rows(), _ERRORS, chosen)
    say_note(*result.notes)
