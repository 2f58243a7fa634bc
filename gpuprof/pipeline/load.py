"""``load``: send traffic to a server and compare its answers with the predictions."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread

from gpuprof.domain.demand import Slo
from gpuprof.domain.file_access import write_atomically
from gpuprof.errors import InputError, refuse_unwritable
from gpuprof.load.load import LoadOutcome, RequestStream, plan_load, read_stream_data, run_load
from gpuprof.load.report import ModelResult
from gpuprof.load.target import describe_assumed
from gpuprof.machine.core_sharing import allowed_cores, avoiding_cores
from gpuprof.pipeline.arguments import MapArgument, PathArgument, map_folder, optional_path, resolve_map
from gpuprof.pipeline.load_prediction import LoadPredictions, beside_prediction, predict_load, report_row
from gpuprof.pipeline.load_traffic import LoadTraffic, ServerAccess
from gpuprof.pipeline.machine_check import check_machine, describe_stolen, is_local, worker_cores
from gpuprof.pipeline.model_files import locate_files, require_planned_files
from gpuprof.pipeline.recorded_problem import time_map_by
from gpuprof.pipeline.result import NoteCallback, NoteList, Progress, ProgressCallback, Result, say_nothing
from gpuprof.pipeline.verdicts import VERDICT_SUFFIXES, SloVerdict, keeps_objective, require_kept, write_verdicts

#: Default address of a server.
DEFAULT_URL = "http://127.0.0.1:8000"
#: Relative error of the predicted p99 above which its cause is reported.
FAR_OFF = 0.15


@dataclass(frozen=True, kw_only=True)
class LoadResult(Result):
    """The clients' measurements, with the predictions.

    Attributes
    ----------
    outcome : LoadOutcome
    predictions : LoadPredictions or None
        None without a map.
    warnings : tuple of str
        Unanswered requests, and causes of differences between measured and predicted figures; also part of the notes.
    inputs : mapping of str to str
        File of a model's inputs, with its hash; models with random inputs are absent.
    percentiles : mapping of str to float
        Percent of a model's requests that must be answered within its SLO; 99 where absent.
    is_closed : bool
        Whether answers released the next requests: the map's objectives, which are planned for rates, do not apply.
    """

    outcome: LoadOutcome
    predictions: LoadPredictions | None = None
    warnings: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    percentiles: Mapping[str, float] = field(default_factory=dict)
    is_closed: bool = False

    def verdicts(self) -> tuple[SloVerdict, ...]:
        """Return whether each model kept its SLO, and why not."""
        stages = {str(row["model"]): row for row in self.stage_rows()}
        return tuple(
            self._judge(result, row, stages.get(result.model, {}))
            for result, row in zip(self.outcome.results, _rows(self.outcome, self.predictions), strict=True)
        )

    def _judge(self, result: ModelResult, row: Mapping[str, object], stages: Mapping[str, object]) -> SloVerdict:
        percentile = self.percentiles.get(result.model, Slo(result.slo_ms).percentile)
        is_kept = keeps_objective(result.in_slo, result.sent, result.slo_ms, percentile)
        if self.is_closed:
            is_kept = None
        predicted = None if self.predictions is None else self.predictions.predicted.get(result.model)
        return SloVerdict(
            result.model,
            is_kept,
            result.slo_ms,
            percentile,
            100.0 * result.in_slo / result.sent if result.sent else None,
            result.p99_ms,
            None if predicted is None else predicted.p99_ms,
            result.rate_rps,
            result.goodput_rps,
            explain_result(result, is_kept, percentile, row, stages, self.is_closed),
        )

    def require_kept(self) -> None:
        """Check that every model with an SLO met this SLO.

        Raises
        ------
        SloMissedError
            When a model missed its SLO.
        """
        require_kept(self.verdicts())

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each model: rates, goodput, latency, predictions, errors, and which inputs were sent."""
        rows = _rows(self.outcome, self.predictions)
        slo = {verdict.model: {"slo_kept": verdict.kept, "reason": verdict.reason} for verdict in self.verdicts()}
        return [row | {"input_data": self.inputs.get(str(row["model"]))} | slo[str(row["model"])] for row in rows]

    def stage_rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each model: mean milliseconds of each stage, measured and predicted."""
        return _stage_rows(self.outcome, self.predictions)

    def rows_with_stages(self) -> list[dict[str, object]]:
        """Return `rows`, each with its stages."""
        return [{**row, "stages": stages} for row, stages in zip(self.rows(), self.stage_rows(), strict=True)]

    def write(self, path: PathArgument) -> None:
        """Write the results as .json, .csv or .parquet, or the verdicts as .md or JUnit's .xml.

        Raises
        ------
        InputError
            When the name says no format, or the file cannot be written.
        """
        check_output(Path(path))
        if write_verdicts(self.verdicts(), Path(path), "load"):
            return
        write_results(self.rows_with_stages(), Path(path))


def load(
    server: str = DEFAULT_URL,
    deployment: MapArgument | None = None,
    *,
    traffic: LoadTraffic = LoadTraffic(),  # noqa: B008 - frozen
    access: ServerAccess = ServerAccess(),  # noqa: B008 - frozen
    db: PathArgument | None = None,
    estimator: str | None = None,
    progress: ProgressCallback = say_nothing,
    note: NoteCallback = say_nothing,
) -> LoadResult:
    """Send traffic to a server, open-loop by default; return measured and predicted goodput and latency.

    Parameters
    ----------
    server : str
        Its address, ``http://HOST:PORT``.
    deployment : path or DeploymentMap, optional
        The server's map: rates, SLOs, predictions.
    traffic : LoadTraffic
        The map's rates for 20 s unless given.
    access : ServerAccess
    db : path, optional
        Kernel database, for another estimator.
    estimator : str, optional
        Name of the estimator of the predicted times; by default the times of the map.
    progress : callable, optional
        Called by a background thread with the seconds of traffic so far, at most once a second.
    note : callable, optional
        Called with each remark immediately, except the warnings.

    Raises
    ------
    InputError
        When no traffic is specified, or a model, a trace or the address is wrong.
    UnavailableError
        When no server answers.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", Path(tempfile.mkdtemp()) / "mlp.onnx")
    >>> demand = gpuprof.Demand(str(file), rate_rps=200.0, slo=gpuprof.Slo(200.0))
    >>> plan = gpuprof.place([demand], fleet="a100-40")
    >>> with gpuprof.serve(plan.deployment, gpuprof.ServeSettings(port=0, simulate=True)) as server:
    ...     seen = gpuprof.load(server.url, server.map, traffic=gpuprof.LoadTraffic(duration_s=1.0, warmup_s=0.1))
    >>> frame = seen.to_frame()
    >>> bool((frame["answered"] == frame["sent"]).all()), frame["predicted_by"].tolist()
    (True, ['replay'])
    """
    notes = NoteList(note)
    resolved = None if deployment is None else resolve_map(deployment)
    base = Path.cwd() if deployment is None else map_folder(deployment)
    if resolved is not None and not traffic.allow_changed:
        require_planned_files(locate_files(resolved, base))
    streams, settings = traffic.make_streams(resolved, base)
    target = access.reach(server)
    # A server that executes the chain itself, as Triton does with an ensemble, gets whole requests.
    streams = [replace(s, steps=()) if s.steps and target.has_model(s.model) else s for s in streams]
    data_by_model = {s.model: read_stream_data(target, s.first) for s in streams if s.data is not None}
    inputs = {model: str(data) for model, data in data_by_model.items()}
    for stream in streams:
        if stream.model in inputs:
            notes.add(f"{stream.model}: inputs from {inputs[stream.model]}")
        else:
            steps = stream.steps or (stream,)
            notes.add(*filter(None, (describe_assumed(target, s.model, s.path, s.dims) for s in steps)))
    predictions = None
    if resolved is not None and traffic.concurrency:
        notes.add("closed loop: nothing is predicted of it, since the map is planned for rates")
    elif resolved is not None:
        timed = time_map_by(resolved, estimator, optional_path(db), base, notes.add)
        predictions = predict_load(timed, streams, settings, note=notes.add)
    time_s = f"{settings.warmup_s:g} + {settings.duration_s:g} s"
    notes.add(f"sending {_describe(streams)} to {server} for {time_s}")
    # Cores of the workers, which the client must avoid; empty unless server and client run on the same machine.
    cores = worker_cores(resolved) if resolved is not None and is_local(target.host) else frozenset()
    schedules = plan_load(target, streams, settings)
    enough = len(schedules) <= len(allowed_cores() - cores)
    with avoiding_cores(cores if enough else ()):
        if resolved is not None and cores and resolved.planned_with.host.host_cores:
            notes.add(*check_machine().notes())
        with report_elapsed(progress, "sending requests", settings.warmup_s + settings.duration_s):
            outcome = run_load(target, streams, settings, schedules)
    warnings = tuple(_warnings(outcome, predictions))
    return LoadResult(
        notes=(*notes.all(), *warnings),
        outcome=outcome,
        predictions=predictions,
        warnings=warnings,
        inputs=inputs,
        percentiles={} if resolved is None else {name: d.percentile for name, d in resolved.traffic.items()},
        is_closed=bool(traffic.concurrency),
    )


def explain_result(
    result: ModelResult,
    is_kept: bool | None,
    percentile: float,
    row: Mapping[str, object],
    stages: Mapping[str, object],
    is_closed: bool = False,
) -> str:
    """Return a sentence on why a model missed its SLO or why its p99 is far from the prediction; else an empty text.

    ``row`` and ``stages``: its `report_row` and stages, from which the errors of the predictions are read.
    """
    if is_closed:
        return "closed loop: the map's SLO, which is planned for rates, does not apply"
    unanswered = result.refused + result.failed + result.lost
    if is_kept is False and 100.0 * unanswered > (100.0 - percentile) * result.sent:
        parts = {"refused (503)": result.refused, "failed": result.failed, "without an answer": result.lost}
        counts = ", ".join(f"{count:,} {word}" for word, count in parts.items() if count)
        return f"of {result.sent:,} requests {counts}"
    error, slower = row["p99_ms_error"], stages.get("infer_ms_error")
    is_far = isinstance(error, float) and abs(error) > FAR_OFF
    if is_kept is not False and not is_far:
        return ""
    if result.client_is_limit:
        return f"the client itself sent late (p99 {result.lag_p99_ms:.1f} ms)"
    if isinstance(slower, float) and slower > FAR_OFF:
        return f"the model takes {100.0 * slower:.0f}% longer than predicted, and waiting grows with it"
    if result.slowest_ms is not None:
        parts_ms = {
            "sending late": result.slowest_late_ms,
            "the network": result.slowest_network_ms,
            "the router": result.slowest_router_ms,
            "waiting for a worker": result.slowest_queue_ms,
            "the model": result.slowest_infer_ms,
        }
        part, spent_ms = max(parts_ms.items(), key=lambda item: item[1] or 0.0)
        off = f"p99 is {100.0 * error:+.0f}% off the prediction: " if is_far and isinstance(error, float) else ""
        return f"{off}of the slowest 1% ({result.slowest_ms:.1f} ms) {spent_ms or 0.0:.1f} ms went into {part}"
    if is_far and isinstance(error, float):
        return f"p99 is {100.0 * error:+.0f}% off the prediction"
    return f"{result.answered - result.in_slo:,} of {result.sent:,} answers came after {result.slo_ms:g} ms"


def _rows(outcome: LoadOutcome, predictions: LoadPredictions | None) -> list[dict[str, object]]:
    if predictions is None:
        return [report_row(result, None) for result in outcome.results]
    return [
        report_row(
            result,
            predictions.predicted.get(result.model),
            predictions.planned.get(result.model),
        )
        for result in outcome.results
    ]


def _stage_rows(outcome: LoadOutcome, predictions: LoadPredictions | None) -> list[dict[str, object]]:
    predicted = {} if predictions is None else predictions.predicted
    return [beside_prediction(row, predicted.get(str(row["model"]))) for row in outcome.stages]


def _warnings(outcome: LoadOutcome, predictions: LoadPredictions | None) -> Iterator[str]:
    for result in outcome.results:
        if result.refused or result.failed or result.lost:
            counts = f"{result.refused} refused (503), {result.failed} failed, {result.lost} without an answer"
            yield f"{result.model}: of {result.sent} requests {counts}"
        if result.client_is_limit:
            lag_ms = result.lag_p99_ms
            yield f"{result.model}: the client sent late (p99 {lag_ms:.1f} ms): it is part of these latencies"
    if (remark := describe_stolen(outcome.stolen)) is not None:
        yield f"while requests were sent, {remark}"
    for row in _rows(outcome, predictions):
        error = row["p99_ms_error"]
        if isinstance(error, float) and abs(error) > FAR_OFF:
            yield f"{row['model']}: p99 is {100.0 * error:+.0f}% off the prediction"
    for row in _stage_rows(outcome, predictions):
        error = row["infer_ms_error"]
        if isinstance(error, float) and error > FAR_OFF:
            why = "the machine is slower than when it was profiled, or not alone, and waiting grows with it"
            yield f"{row['model']}: the model takes {100.0 * error:.0f}% longer than predicted: {why}"


def _describe(streams: Sequence[RequestStream]) -> str:
    return ", ".join(
        f"{stream.model} {stream.concurrency} at a time"
        if stream.concurrency
        else f"{stream.model} {stream.rate_rps:.4g}/s"
        for stream in streams
    )


@contextmanager
def report_elapsed(progress: ProgressCallback, step: str, total_s: float) -> Iterator[None]:
    """Call ``progress`` from a background thread with the seconds since the block began, at most once a second.

    Parameters
    ----------
    step : str
        Description of the step.
    total_s : float
        Expected duration; reports of longer steps stay at this value.
    """
    # No thread without a listener: its wake-ups would disturb the measurement.
    if progress is say_nothing:
        yield
        return
    began, ended, total = time.monotonic(), Event(), max(1, round(total_s))

    def report() -> None:
        while not ended.wait(1.0):
            progress(Progress(step, min(total, round(time.monotonic() - began)), total))

    progress(Progress(step, 0, total))
    thread = Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    progress(Progress(step, total, total))


Row = Mapping[str, object]


def check_output(path: Path) -> None:
    """Refuse a file name without a known format, before the measurement. Raises `InputError`."""
    endings = sorted([*_WRITERS, *VERDICT_SUFFIXES])
    if path.suffix not in endings:
        raise InputError(f"cannot tell the format of {path}", f"let its name end in one of {', '.join(endings)}")


def write_results(rows: Sequence[Row], path: Path) -> None:
    """Write one row for each model; in CSV and Parquet the stages are separate columns.

    Raises `InputError` when the file cannot be written.
    """
    with refuse_unwritable(path):
        _WRITERS[path.suffix]([_drop_infinities(row) for row in rows], path)


def _write_json(rows: Sequence[Row], path: Path) -> None:
    write_atomically(path, f"{json.dumps(rows, indent=1)}\n".encode())


def _write_csv(rows: Sequence[Row], path: Path) -> None:
    flat = [_flatten(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n")
    writer.writeheader()
    for row in flat:
        writer.writerow({name: json.dumps(v) if isinstance(v, list) else v for name, v in row.items()})
    write_atomically(path, text.getvalue().encode())


def _write_parquet(rows: Sequence[Row], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([_flatten(row) for row in rows]), path)


_WRITERS: dict[str, Callable[[Sequence[Row], Path], None]] = {
    ".json": _write_json,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
}


def _drop_infinities(row: Row) -> Row:
    """Return the row without infinities, which JSON lacks: a model without an SLO has none."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def _flatten(row: Row) -> dict[str, object]:
    """Return the row with its stages as columns and the batches as a list of sizes and counts."""
    stages = row["stages"]
    assert isinstance(stages, Mapping)
    flat = {name: value for name, value in row.items() if name != "stages"}
    flat |= {f"stage_{name}": value for name, value in stages.items() if name not in ("model", "batches")}
    sizes = stages.get("batches") or {}
    flat["batches"] = [{"size": int(size), "count": count} for size, count in sizes.items()]
    return flat
