"""Results of a load test: for each model requests, goodput, latency and the time by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gpuprof.load.client import Schedule, SentRequests

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

#: Probability with which an interval holds the percentile.
CONFIDENCE = 0.95
#: The client is the limit when its own delay at the 99th percentile is more than this part of the median latency…
LAG_FRACTION = 0.1
#: …and more than this.
LAG_MS = 1.0
#: Relative error of the predicted p99 above which its cause is reported.
FAR_OFF = 0.15
_STAGES = {"queue": "queue", "compute_input": "gather", "compute_infer": "infer", "compute_output": "scatter"}


@dataclass(frozen=True, slots=True)
class Percentile:
    """A percentile of a sample."""

    value: float
    #: ``low``, ``high``: Ends of the 95% interval, which are values of the sample: the interval assumes independent
    #: values, but no distribution. None: the sample is too small for this end.
    low: float | None
    high: float | None


def find_percentile(ordered: Sequence[float], percent: float) -> Percentile | None:
    """Return a percentile of a sorted sample; None if the sample is too small to have a value beyond it.

    The interval is based on order statistics (David and Nagaraja, Order Statistics, 3rd ed., §7.1). ``ordered``:
    ascending; ``percent``: from 50 to below 100.
    """
    import numpy as np
    from scipy.stats import binom

    count, part = len(ordered), percent / 100.0
    if not count or (part > 0.5 and count * (1.0 - part) < 1.0 - 1e-9):
        return None
    doubt = (1.0 - CONFIDENCE) / 2.0
    below = int(binom.ppf(doubt, count, part))
    above = int(binom.ppf(1.0 - doubt, count, part)) + 1
    return Percentile(
        float(np.quantile(ordered, part)),
        float(ordered[below - 1]) if below >= 1 else None,
        float(ordered[above - 1]) if above <= count else None,
    )


@dataclass(frozen=True, slots=True)
class ModelResult:
    """Measured figures of a model; latencies in milliseconds, counted from the time at which a request was due."""

    model: str
    slo_ms: float
    #: ``sent``, ``answered``, ``in_slo``, ``refused``, ``failed``, ``lost``: Requests after the warm-up: all, with
    #: status 200, of these within the SLO, with 503, with another status, without any answer.
    sent: int
    answered: int
    in_slo: int
    refused: int
    failed: int
    lost: int
    #: ``rate_rps``, ``goodput_rps``: Sent, and answered within the SLO, per second.
    rate_rps: float
    goodput_rps: float
    #: ``p50_ms``, ``p95_ms``, ``p99_ms``, ``mean_ms``: Of the answered requests; a percentile is None without enough
    #: requests to have a value beyond it: 20 for p95, 100 for p99.
    mean_ms: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    lag_p99_ms: float  #: 99th percentile of the client's sending delay.
    #: ``p50_low_ms``, ``p50_high_ms``, ``p95_low_ms``, ``p95_high_ms``, ``p99_low_ms``, ``p99_high_ms``: Their 95%
    #: intervals; None: too few answers for this end.
    p50_low_ms: float | None = None
    p50_high_ms: float | None = None
    p95_low_ms: float | None = None
    p95_high_ms: float | None = None
    p99_low_ms: float | None = None
    p99_high_ms: float | None = None
    #: Time from arrival to answer in the server as it reports it (Server-Timing), mean over the answered requests; None
    #: where it does not. The rest of the latency is client and network.
    server_mean_ms: float | None = None
    #: ``slowest_ms``, ``slowest_late_ms``, ``slowest_network_ms``, ``slowest_router_ms``, ``slowest_queue_ms``,
    #: ``slowest_infer_ms``: Mean latency of the slowest hundredth of the answered requests, and its parts: late
    #: sending, client and network, router and copies, queueing, the model. None without a p99, or where the server does
    #: not report its times for every answer.
    slowest_ms: float | None = None
    slowest_late_ms: float | None = None
    slowest_network_ms: float | None = None
    slowest_router_ms: float | None = None
    slowest_queue_ms: float | None = None
    slowest_infer_ms: float | None = None

    @property
    def client_is_limit(self) -> bool:
        """Return whether the client itself was too slow, so that its delays are part of the latencies."""
        return self.lag_p99_ms > max(LAG_MS, LAG_FRACTION * (self.p50_ms or 0.0))


@dataclass(frozen=True, slots=True)
class LoadPrediction:
    """Predicted figures of a model at a rate; None where no request is answered.

    ``refused``: requests refused after the warm-up because they could not meet their SLO; ``infer_ms``: batch time,
    mean over requests.
    """

    goodput_rps: float | None = None
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    refused: float | None = None
    infer_ms: float | None = None


def explain_result(
    result: ModelResult,
    is_kept: bool | None,
    percentile: float,
    row: Mapping[str, object],
    stages: Mapping[str, object],
    is_closed: bool = False,
) -> str:
    """Return a sentence on why a model missed its SLO or why its p99 is far from the prediction; else an empty text.

    ``row`` and ``stages``: its `compare_figures` and stages, from which the errors of the predictions are read.
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


def compare_figures(result: ModelResult, predicted: LoadPrediction | None) -> dict[str, object]:
    """Return measured and predicted figures side by side, with the errors relative to the prediction."""
    row: dict[str, object] = {**asdict(result), "client_is_limit": result.client_is_limit}
    row["predicted_refused"] = None if predicted is None else predicted.refused
    for key in ("goodput_rps", "p50_ms", "p95_ms", "p99_ms"):
        expected = None if predicted is None else getattr(predicted, key)
        measured = getattr(result, key)
        row[f"predicted_{key}"] = expected
        is_comparable = expected is not None and 0.0 < expected < float("inf") and measured is not None
        row[f"{key}_error"] = (measured - expected) / expected if is_comparable else None
    return row


def summarize(
    schedules: Sequence[Schedule],
    results: Sequence[SentRequests],
    model: int,
    name: str,
    slo_ms: float,
    span: tuple[float, float],
) -> ModelResult:
    """Return the figures of a model; ``span`` is the measured part of the schedule, in seconds."""
    import numpy as np

    due, sent_s, done_s, status, server_ms = _select_columns(schedules, results, model, span)
    latency = 1000.0 * (done_s - due)
    is_answer = status == 200
    answered = latency[is_answer]
    seconds = span[1] - span[0]
    in_slo = int((answered <= slo_ms).sum())
    percentiles: dict[str, Any] = {}
    for percent in (50, 95, 99):
        percentile = find_percentile(np.sort(answered).tolist(), percent)
        for end, value in (("", "value"), ("_low", "low"), ("_high", "high")):
            percentiles[f"p{percent}{end}_ms"] = None if percentile is None else getattr(percentile, value)
    told_ms = server_ms[0, is_answer]
    return ModelResult(
        model=name,
        slo_ms=slo_ms,
        sent=len(due),
        answered=len(answered),
        in_slo=in_slo,
        refused=int((status == 503).sum()),
        failed=int(((status != 200) & (status != 503) & (status != 0)).sum()),
        lost=int((status == 0).sum()),
        rate_rps=len(due) / seconds,
        goodput_rps=in_slo / seconds,
        mean_ms=float(answered.mean()) if len(answered) else None,
        **percentiles,
        lag_p99_ms=float(1000.0 * np.quantile(sent_s - due, 0.99)) if len(due) else 0.0,
        server_mean_ms=float(told_ms.mean()) if len(told_ms) and not np.isnan(told_ms).any() else None,
        **_divide_slowest(answered, 1000.0 * (sent_s - due)[is_answer], server_ms[:, is_answer], percentiles["p99_ms"]),
    )


def _select_columns(
    schedules: Sequence[Schedule], results: Sequence[SentRequests], model: int, span: tuple[float, float]
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return arrays over requests: due, send and answer times, status, and the server's times (three rows)."""
    import numpy as np

    due = np.concatenate([np.asarray(schedule.times, float) for schedule in schedules])
    models = np.concatenate([np.asarray(schedule.models) for schedule in schedules])
    sent_s = np.concatenate([np.asarray(result.sent_s) for result in results])
    done_s = np.concatenate([np.asarray(result.done_s) for result in results])
    status = np.concatenate([np.asarray(result.status, float) for result in results])
    server_times = [
        [times or [np.nan] * len(result.sent_s) for times in (result.server_ms, result.queue_ms, result.infer_ms)]
        for result in results
    ]
    server_ms = np.concatenate([np.asarray(times, float) for times in server_times], axis=1)
    selection = (models == model) & (due >= span[0]) & (due < span[1])
    return due[selection], sent_s[selection], done_s[selection], status[selection], server_ms[:, selection]


def _divide_slowest(latency_ms: Floats, late_ms: Floats, times_ms: Floats, p99_ms: float | None) -> dict[str, Any]:
    """Return the mean time by stage of answers from the 99th percentile on, if the server reports all times."""
    import numpy as np

    if p99_ms is None or np.isnan(times_ms).any():
        return {}
    slowest = latency_ms >= p99_ms
    server_ms, queue_ms, infer_ms = times_ms[:, slowest]
    parts = {
        "": latency_ms[slowest],
        "late_": late_ms[slowest],
        "network_": latency_ms[slowest] - late_ms[slowest] - server_ms,
        "router_": server_ms - queue_ms - infer_ms,
        "queue_": queue_ms,
        "infer_": infer_ms,
    }
    return {f"slowest_{name}ms": float(values.mean()) for name, values in parts.items()}


def stage_rows(
    schedules: Sequence[Schedule],
    results: Sequence[SentRequests],
    names: Sequence[str],
    before: Mapping[str, Mapping[str, Any] | None],
    after: Mapping[str, Mapping[str, Any] | None],
) -> list[dict[str, object]]:
    """Return a `stage_row` for each model, over all its requests: the server's counts include the warm-up."""
    always = (0.0, float("inf"))
    return [
        stage_row(summarize(schedules, results, position, name, 0.0, always), before[name], after[name])
        for position, name in enumerate(names)
    ]


def stage_row(
    result: ModelResult, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> dict[str, object]:
    """Return the stages of a request's time, mean milliseconds, and the mean batch size.

    ``router_ms`` is the client's time beyond the queue and worker times of the server: network, reading, writing; its
    part ``network_ms`` is the client's time beyond the total that the server reports, where it does.
    """
    row: dict[str, object] = {"model": result.model}
    if before is None or after is None:
        return row
    total = 0.0
    for key, name in _STAGES.items():
        first, last = before["inference_stats"][key], after["inference_stats"][key]
        count, nanoseconds = int(last["count"]) - int(first["count"]), int(last["ns"]) - int(first["ns"])
        if not count:
            return row
        row[f"{name}_ms"] = nanoseconds / count / 1e6
        total += nanoseconds / count / 1e6
    row["router_ms"] = None if result.mean_ms is None else result.mean_ms - total
    mean_ms, server_ms = result.mean_ms, result.server_mean_ms
    row["network_ms"] = None if mean_ms is None or server_ms is None else mean_ms - server_ms
    row["batches"] = _batches(before, after)
    return row


def _batches(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[int, int]:
    counts = {}
    earlier = {entry["batch_size"]: entry["compute_infer"]["count"] for entry in before["batch_stats"]}
    for entry in after["batch_stats"]:
        count = int(entry["compute_infer"]["count"]) - int(earlier.get(entry["batch_size"], 0))
        if count:
            counts[int(entry["batch_size"])] = count
    return counts
