"""Verbs of predictions: ``estimate``, ``calibrate``, ``train`` and ``evaluate``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.options import ModelsArgument, complete_models
from gpuprof.cli.output import Format, make_columns, print_rows, say_note, show_progress
from gpuprof.domain.number_format import number_formatter
from gpuprof.pipeline.calibrate import CalibrateOptions
from gpuprof.pipeline.estimate import EstimateOptions
from gpuprof.pipeline.evaluate import EvaluateOptions
from gpuprof.pipeline.train import TrainOptions


def _short(model: object) -> str:
    return Path(str(model)).stem if str(model).endswith(".onnx") else str(model)


_ESTIMATED = make_columns(
    "model dims device share batch beside latency_ms latency_interval:90%_interval latency_source throughput_rps "
    "memory_bytes memory_source",
    {"model": _short, "latency_ms": number_formatter(4)},
)


def estimate(
    options: EstimateOptions,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            autocompletion=complete_models,
            help="Models by name in the database, or ONNX files; default: all of the database.",
        ),
    ] = None,
    chosen: Format = Format.TABLE,
) -> None:
    """Estimate latency, throughput and memory: measured, interpolated between measurements, or predicted."""
    from gpuprof.pipeline.estimate import estimate as predict

    result = predict(models or (), options)
    say_note(*result.notes)
    rows = [{**row, "latency_interval": _show_interval(row)} for row in result.rows()]
    print_rows(rows, _ESTIMATED, chosen)


def _show_interval(row: Mapping[str, object]) -> str | None:
    low, high = row["latency_low_ms"], row["latency_high_ms"]
    show = number_formatter(3)
    return None if low is None or high is None else f"{show(low)} … {show(high)}"


_COEFFICIENTS = make_columns("of coefficient value unit")
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
        print_rows(result.rows(), _COEFFICIENTS, chosen)
    if not (result.igniter or result.ratios) or (result.ranking and chosen is Format.TABLE):
        print_rows(result.ranking_rows(), _RANKED, chosen)


_TRAINED = make_columns(
    "device architectures ops points:models_×_batches latency_factor:latency_within_×/÷ "
    "memory_factor:memory_within_×/÷ creq_factor:Creq_within_×/÷",
)


def train(options: TrainOptions, chosen: Format = Format.TABLE) -> None:
    """Fit regressors to the measured ops and models of a device; estimate uses them from then on."""
    from gpuprof.pipeline.train import train as fit

    with show_progress() as show:
        result = fit(options, progress=show)
    print_rows(result.rows(), _TRAINED, chosen)
    say_note(*result.notes)


_ERRORS = make_columns(
    "setting:left_out quantity predictor architecture count:figures mean_pct:mean_error_% median_pct p95_pct "
    "coverage_pct:inside_90%_interval,_%",
)


def evaluate(options: EvaluateOptions, chosen: Format = Format.TABLE) -> None:
    """Compare estimates with held-out measurements: of each architecture, or for any estimator with --estimator."""
    from gpuprof.pipeline.evaluate import evaluate as compare

    with show_progress() as show:
        result = compare(options, progress=show)
    print_rows(result.rows(), _ERRORS, chosen)
    say_note(*result.notes)
