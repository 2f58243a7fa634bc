"""``gpuprof load``: send traffic to a server and compare what comes back with what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.load_options import Admission, Traffic
from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import (
    Column,
    CsvOption,
    Format,
    JsonOption,
    chosen_format,
    number,
    percent,
    print_json,
    print_rows,
    say,
)
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.pipeline.load_prediction import LoadPredictions
    from gpuprof.serving.load.load import LoadOutcome, RequestStream

#: A model that takes so much longer than predicted, of its time, makes the other predictions wrong, too.
SLOWER = 0.05
DEFAULT_URL = "http://127.0.0.1:8000"
_COLUMNS = (
    Column("model", "model", right=False),
    Column("rate_rps", "sent/s", number()),
    Column("goodput_rps", "goodput/s", number()),
    Column("predicted_goodput_rps", "predicted", number()),
    Column("goodput_rps_error", "error", percent),
    Column("p50_ms", "p50 ms", number()),
    Column("predicted_p50_ms", "predicted", number()),
    Column("p50_ms_error", "error", percent),
    Column("p95_ms", "p95 ms", number()),
    Column("predicted_p95_ms", "predicted", number()),
    Column("p95_ms_error", "error", percent),
    Column("p99_ms", "p99 ms", number()),
    Column("predicted_p99_ms", "predicted", number()),
    Column("p99_ms_error", "error", percent),
    Column("slo_ms", "SLO ms", number()),
)
#: Columns that are shown where any row has one of these figures.
_TOLD = (
    (("planned_p99_ms",), (Column("planned_p99_ms", "planned p99 ms", number()),)),
    (
        ("refused", "predicted_refused"),
        (Column("refused", "refused"), Column("predicted_refused", "predicted", number())),
    ),
)
_PREDICTED_BY = {
    "replay": "the same requests, replayed through the simulator on this map",
    "map": "what the map was planned to do at these rates",
    "queueing": "the queueing model at these rates, which knows of no refusals",
}
_STAGE_COLUMNS = (
    Column("model", "model", right=False),
    Column("router_ms", "network and router ms", number(2)),
    Column("queue_ms", "queue ms", number(2)),
    Column("gather_ms", "gather ms", number(2)),
    Column("infer_ms", "model ms", number(2)),
    Column("predicted_infer_ms", "predicted", number(2)),
    Column("infer_ms_error", "error", percent),
    Column("scatter_ms", "scatter ms", number(2)),
    Column("batches", "batches by size", lambda value: _histogram(value)),
)


@with_groups
def load(
    traffic: Traffic,
    admission: Admission,
    target: Annotated[
        str, typer.Argument(help="Address of the server, or the map that it serves at the usual one.")
    ] = ("map.json"),
    map_file: Annotated[Path | None, typer.Option("--map", help="Deployment map: rates, SLOs, predictions.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write the results here: .json, .csv or .parquet.")
    ] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Send open-loop traffic at the map's rates; print goodput and latency beside what was predicted."""
    from gpuprof.pipeline.load_output import check_output, write_results
    from gpuprof.pipeline.load_prediction import predict_load
    from gpuprof.serving.load.load import run_load

    chosen = chosen_format(as_json, as_csv)
    map_path, address = _where(target, map_file)
    deployment = _read(map_path)
    if output is not None:
        check_output(output)
    streams, settings = traffic.load(deployment, map_path)
    server = admission.target(address)
    known = None if deployment is None else predict_load(deployment, streams, settings, note=say)
    say(f"sending {_named(streams)} to {address} for {settings.warmup_s:g} + {settings.duration_s:g} s")
    outcome = run_load(server, streams, settings)
    rows, stages = _rows(outcome, known), _stages(outcome, known)
    if output is not None:
        write_results(_with_stages(rows, stages), output)
    _show(rows, stages, chosen)
    _warn(outcome, stages)


def _with_stages(rows: list[dict[str, object]], stages: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{**row, "stages": own} for row, own in zip(rows, stages, strict=True)]


def _where(target: str, map_file: Path | None) -> tuple[Path | None, str]:
    """Return the map and the address of the server."""
    if target.endswith(".json") or Path(target).is_file():
        if map_file is not None:
            raise InputError(f"two maps are given: {target} and {map_file}")
        return Path(target), DEFAULT_URL
    return map_file, target


def _read(path: Path | None) -> DeploymentMap | None:
    from gpuprof.domain.deployment import read_map

    return None if path is None else read_map(path)


def _rows(outcome: LoadOutcome, known: LoadPredictions | None) -> list[dict[str, object]]:
    from gpuprof.serving.load.report import report_row

    if known is None:
        return [report_row(result, None) for result in outcome.results]
    return [
        report_row(result, known.predicted.get(result.model), known.planned.get(result.model))
        for result in outcome.results
    ]


def _stages(outcome: LoadOutcome, known: LoadPredictions | None) -> list[dict[str, object]]:
    from gpuprof.serving.load.report import beside_prediction

    predicted = {} if known is None else known.predicted
    return [beside_prediction(row, predicted.get(str(row["model"]))) for row in outcome.stages]


def _show(rows: list[dict[str, object]], stages: list[dict[str, object]], chosen: Format) -> None:
    if chosen is Format.JSON:
        print_json(_with_stages(rows, stages))
    elif chosen is Format.CSV:
        print_rows(rows, _COLUMNS, chosen)
    else:
        told = [column for keys, more in _TOLD for column in more if any(row.get(key) for row in rows for key in keys)]
        print_rows(rows, [*_COLUMNS, *told], chosen)
        print_rows(stages, _STAGE_COLUMNS, chosen)
        for by in sorted({str(row["predicted_by"]) for row in rows if row["predicted_by"]}):
            say(f"predicted: {_PREDICTED_BY[by]}")


def _warn(outcome: LoadOutcome, stages: list[dict[str, object]]) -> None:
    """Say what was not answered, and what makes the measured figures others than the predicted ones."""
    for result in outcome.results:
        if result.refused or result.failed or result.lost:
            said = f"{result.refused} refused (503), {result.failed} failed, {result.lost} without an answer"
            say(f"{result.model}: of {result.sent} requests {said}")
        if result.client_is_limit:
            say(f"{result.model}: the client sent late (p99 {result.lag_p99_ms:.1f} ms): it is part of these latencies")
    for row in stages:
        error = row["infer_ms_error"]
        if isinstance(error, float) and error > SLOWER:
            why = "the machine is slower than when it was profiled, or not alone, and waiting grows with it"
            say(f"{row['model']}: the model takes {100.0 * error:.0f}% longer than predicted: {why}")


def _named(streams: list[RequestStream]) -> str:
    return ", ".join(f"{stream.model} {stream.rate_rps:.4g}/s" for stream in streams)


def _histogram(value: object) -> str:
    if not isinstance(value, dict):
        return str(value)
    total = sum(value.values())
    return " ".join(f"{size}:{100 * count / total:.0f}%" for size, count in sorted(value.items()))
