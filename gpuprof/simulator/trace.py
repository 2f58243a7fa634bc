"""Traces, the arrival times of each model's requests, with their CSV file; the requests of a simulation.

The file has the header ``time_s,model``: seconds from the start, ascending, a line per request. Without the column
``model`` all requests are for the same model.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.arrival_process import (
    NS_PER_S,
    ArrivalProcess,
    ArrivalStream,
    RecordedArrivals,
    Times,
    parse_arrivals,
)
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.file_access import refuse_pipe
from gpuprof.domain.number_format import GIB, ROUNDING
from gpuprof.domain.validation import LARGEST
from gpuprof.errors import InputError, refuse_unwritable, unknown_name

if TYPE_CHECKING:
    import pandas as pd

MAX_FILE_BYTES = 16 * GIB
MAX_REQUESTS = int(LARGEST)
#: Number of requests drawn together.
PIECE = 65_536
_COLUMNS = ("time_s", "model")


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by model."""

    #: Mapping of str to ndarray of shape (requests,). Model → nanoseconds from the start, ascending. A trace without
    #: model names has the single name ``""``.
    times: Mapping[str, Times]
    duration_s: float  #: Length of the recording, at least to the last request.

    @property
    def requests(self) -> int:
        """Number of requests."""
        return sum(len(times) for times in self.times.values())

    @property
    def span_s(self) -> float:
        """Length of the trace in seconds, its last request included."""
        return self.duration_s + ROUNDING

    def arrivals(self) -> dict[str, ArrivalProcess]:
        """Return each model's requests as an arrival process."""
        return {model: RecordedArrivals(times, self.duration_s) for model, times in self.times.items() if len(times)}

    def join(self, names: Mapping[str, str]) -> Trace:
        """Return the trace with models renamed by ``names``; models with the same new name are joined."""
        times_by_name: dict[str, list[Times]] = {}
        for model, times in self.times.items():
            times_by_name.setdefault(names.get(model, model), []).append(times)
        return Trace({name: np.sort(np.concatenate(parts)) for name, parts in times_by_name.items()}, self.duration_s)

    def counts(self, bins: int) -> dict[str, NDArray[np.int64]]:
        """Return the requests in each of ``bins`` equal parts of the trace, by model."""
        edges = np.linspace(0.0, self.duration_s * NS_PER_S, bins + 1)
        edges[-1] = np.inf  # a request at the very end belongs to the last part
        return {model: np.histogram(times, edges)[0].astype(np.int64) for model, times in self.times.items()}

    def statistics(self, width_s: float) -> list[dict[str, object]]:
        """Return a row per model: requests, mean rate, peak rate over ``width_s``, burstiness and longest gap."""
        peaks = {m: counts.max() for m, counts in self.counts(max(1, round(self.duration_s / width_s))).items()}
        return [
            {
                "model": model or "all",
                "requests": len(times),
                "rate_rps": len(times) / self.duration_s,
                "peak_rps": float(peaks[model]) / width_s,
                "gap_scv": _scv(np.diff(times)),
                "longest_gap_s": float(np.diff(times).max() / NS_PER_S) if len(times) > 1 else None,
            }
            for model, times in self.times.items()
        ]

    def longest_gap_s(self) -> float:
        """Return the longest time without any request, in seconds."""
        times = np.sort(np.concatenate([np.zeros(1, np.int64), *self.times.values()]))
        ends = np.append(times, int(self.duration_s * NS_PER_S))
        return float(np.diff(ends).max() / NS_PER_S)


def _scv(gaps: Times) -> float | None:
    mean = float(gaps.mean()) if len(gaps) else 0.0
    return float(gaps.var()) / mean**2 if mean > 0 else None


def record_arrivals(processes: Mapping[str, ArrivalProcess], duration_s: float, seed: int) -> Trace:
    """Return a trace of the processes' arrivals in ``duration_s`` seconds; the same for the same seed.

    Raises `InputError` for more than a billion expected requests, which would not fit into memory.
    """
    if (expected := duration_s * sum(process.rate_rps for process in processes.values())) > MAX_REQUESTS:
        raise InputError(f"a trace of about {expected:.2g} requests is too long to hold", "ask for at most 1e9")
    end = int(duration_s * NS_PER_S)
    seeds = np.random.SeedSequence(seed).spawn(len(processes))
    times = {
        model: _times_until(process, end, np.random.Generator(np.random.PCG64(child)))
        for (model, process), child in zip(processes.items(), seeds, strict=True)
    }
    return Trace(times, duration_s)


def _times_until(process: ArrivalProcess, end: int, random: np.random.Generator) -> Times:
    stream, pieces = process.stream(random), [np.zeros(0, np.int64)]
    expected = process.rate_rps * end / NS_PER_S
    # The piece is four standard deviations above the mean of a Poisson count, so that mostly a single piece suffices.
    while len(piece := stream.take(min(PIECE, int(expected + 4.0 * math.sqrt(expected)) + 16))):
        pieces.append(piece[piece < end])
        if len(pieces[-1]) < len(piece):
            break
    return np.concatenate(pieces)


def write_trace(trace: Trace, path: Path) -> None:
    """Write the trace as CSV. Raises `InputError` when the file cannot be written."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    names = list(trace.times)
    times = np.concatenate([np.zeros(0, np.int64), *trace.times.values()])
    model = np.repeat(np.arange(len(names)), [len(t) for t in trace.times.values()])
    order = np.lexsort((model, times))
    columns = {"time_s": times[order] / NS_PER_S, "model": np.array(names, dtype=object)[model[order]]}
    if names == [""]:
        del columns["model"]
    with refuse_unwritable(path):
        arrow_csv.write_csv(
            pa.table(columns), path, write_options=arrow_csv.WriteOptions(quoting_style="needed", quoting_header="none")
        )


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises `InputError` with the line for a header without ``time_s``, a line of another length, and a time that is no
    number, negative, earlier than the previous time or beyond thirty years; also for a file without requests.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    header = _header(path)
    types = {"time_s": pa.float64(), "model": pa.string()}
    try:
        table = arrow_csv.read_csv(path, convert_options=arrow_csv.ConvertOptions(column_types=types))
        seconds = table["time_s"].to_numpy()
    except (pa.ArrowInvalid, KeyError):
        raise _find_first_error(path) from None
    is_valid = len(seconds) > 0 and seconds.min() >= 0 and seconds.max() <= LARGEST and (np.diff(seconds) >= 0).all()
    names, index = [""], np.zeros(len(seconds), np.int64)
    if is_valid and "model" in header:
        models = table["model"].combine_chunks().dictionary_encode()
        names, index = models.dictionary.to_pylist(), models.indices.to_numpy(zero_copy_only=False)
        # A line break in a name means an unclosed quotation.
        is_valid = not models.null_count and all(name and "\n" not in name for name in names)
    if not is_valid:
        raise _find_first_error(path)
    times = np.rint(seconds * NS_PER_S).astype(np.int64)
    duration_s = max(float(seconds[-1]), 1.0 / NS_PER_S)
    return Trace({name: times[index == i] for i, name in enumerate(names)}, duration_s)


def open_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, fields) of a CSV file, blank lines left out.

    Raises `InputError` when the file cannot be read, is not UTF-8, or is larger than any trace.
    """
    try:
        if refuse_pipe(path).stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: larger than {MAX_FILE_BYTES >> 30} GiB, which no trace is")
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            yield from ((reader.line_num, row) for row in reader if row)
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file in UTF-8", "save it as UTF-8") from None
    except csv.Error as error:
        raise InputError(f"{path} is not CSV: {error}", "close each quotation mark") from None
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}", "gpuprof trace make writes a trace"
        ) from None


def _header(path: Path) -> list[str]:
    line, header = next(open_rows(path), (1, []))
    if "time_s" not in header:
        raise InputError(
            f"{path}:{line}: the header must name time_s but is {','.join(header)[:80]!r}", "write time_s,model"
        )
    if unknown := [name for name in header if name not in _COLUMNS]:
        raise InputError(f"{path}:{line}: unknown column {unknown[0]!r}", "a trace has time_s and model")
    if len(set(header)) < len(header):
        raise InputError(f"{path}:{line}: a column stands twice in the header")
    return header


def _find_first_error(path: Path) -> InputError:
    """Return the error of the first wrong line; slow, so only called after a failure."""
    rows = open_rows(path)
    first, header = next(rows)
    line, before = first, 0.0
    for line, row in rows:
        location, fields = f"{path}:{line}", dict(zip(header, row, strict=False))
        if len(row) != len(header):
            return InputError(f"{location}: expected {len(header)} fields but got {len(row)}")
        try:
            seconds = float(fields["time_s"])
        except ValueError:
            return InputError(f"{location}: time_s must be a number but got {fields['time_s']!r}")
        if not 0.0 <= seconds <= LARGEST:
            return InputError(f"{location}: time_s must be at least 0 and at most 30 years but got {fields['time_s']}")
        if seconds < before:
            message = f"{location}: time_s {seconds:g} is earlier than {before:g} before it"
            return InputError(message, "sort the trace by time")
        if fields.get("model") == "":
            return InputError(f"{location}: model is empty")
        before = seconds
    if line == first:
        return InputError(f"{path} holds no requests", "add lines such as 0.25,resnet50")
    return InputError(f"{path} cannot be read as a trace", "write time_s,model and a line for each request")


_HEADER_2019 = ["HashOwner", "HashApp", "HashFunction", "Trigger"]
_HEADER_2021 = ["app", "func", "end_timestamp", "duration"]


def read_azure(path: Path, busiest: int, seed: int = 0) -> Trace:
    """Return the ``busiest`` functions of a trace of Azure Functions, busiest first.

    Two formats are recognised by their headers (github.com/Azure/AzurePublicDataset). 2019 (Shahrad et al., ATC'20):
    ``HashOwner,HashApp,HashFunction,Trigger,1,…,1440``, a line per function and day, a column per minute; the requests
    of a minute are spread uniformly at random, like a Poisson process of that count. 2021 (Zhang et al., SOSP'21):
    ``app,func,end_timestamp,duration`` in seconds, a line per invocation; a request arrives at the begin of its
    invocation, and the earliest in the file is time 0.

    Raises `InputError` for another header, missing minutes, or an invalid count or time.
    """
    import pandas as pd

    try:
        table = pd.read_csv(refuse_pipe(path))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {str(error).splitlines()[0].strip()}") from None
    header = [str(name) for name in table.columns]
    if header == _HEADER_2021:
        return _read_2021(path, table, busiest)
    if header[:4] == _HEADER_2019:
        return _read_2019(path, table, busiest, np.random.Generator(np.random.PCG64(seed)))
    raise InputError(
        f"{path} is in neither Azure Functions format: its header begins {','.join(header[:4])!r}",
        f"expected {','.join(_HEADER_2019)},1,… or {','.join(_HEADER_2021)}",
    )


def _read_2019(path: Path, table: pd.DataFrame, busiest: int, random: np.random.Generator) -> Trace:
    minutes = len(table.columns) - 4
    for position, name in enumerate(table.columns[4:], start=1):
        if name != str(position):
            raise InputError(f"{path}: minute {position} is missing: column {position + 4} is {name!r}")
    counts = table.iloc[:, 4:].to_numpy()
    if counts.dtype != np.int64 or counts.min(initial=0) < 0:
        raise InputError(f"{path}: every count of invocations must be a whole number of at least 0")
    totals = counts.sum(axis=1)
    rows = np.argsort(-totals, kind="stable")[:busiest]
    _check_invocations(path, int(totals[rows].sum()))
    times = {}
    for row in rows[totals[rows] > 0]:
        minute = np.repeat(np.arange(minutes), counts[row])
        spread = np.sort(((minute + random.random(len(minute))) * 60 * NS_PER_S).astype(np.int64))
        times["/".join(map(str, table.iloc[row, :3]))] = spread
    return Trace(times, 60.0 * minutes)


def _read_2021(path: Path, table: pd.DataFrame, busiest: int) -> Trace:
    _check_invocations(path, len(table))
    if not all(table[name].dtype.kind in "if" for name in _HEADER_2021[2:]):
        raise InputError(f"{path}: end_timestamp and duration must be numbers")
    if not np.isfinite(table[_HEADER_2021[2:]]).all(axis=None) or (table["duration"] < 0).any():
        raise InputError(f"{path}: end_timestamp and duration must be finite, the duration at least 0")
    starts = table["end_timestamp"] - table["duration"]
    times = np.rint((starts - starts.min()) * NS_PER_S).astype(np.int64)
    by_function = times.sort_values(kind="stable").groupby(table["app"].astype(str) + "/" + table["func"].astype(str))
    names = by_function.size().sort_values(ascending=False, kind="stable").index[:busiest]
    # A single request would have duration 0, by which rates cannot be divided.
    duration_s = max(float(times.max() / NS_PER_S), 1.0 / NS_PER_S)
    return Trace({str(name): by_function.get_group(name).to_numpy() for name in names}, duration_s)


def _check_invocations(path: Path, total: int) -> None:
    if not total:
        raise InputError(f"{path} holds no invocations", "give a day that has some")
    if total > MAX_REQUESTS:
        raise InputError(f"{path}: {total:.3g} invocations are too many to hold", "ask for fewer functions")


def client_rates(deployment: DeploymentMap, rates: Mapping[str, float], scale: float = 1.0) -> dict[str, float]:
    """Return requests per second by the map's names for clients: the map's or those of ``rates``, times ``scale``.

    The rate of ``""`` is that of all models together, in proportion to their rates. Raises `InputError` for a model
    that the map lacks.
    """
    traffic = deployment.traffic
    for model in rates:
        if model and model not in traffic:
            raise unknown_name("model", model, list(traffic))
    by_client = {client: rates.get(client, requested.rate_rps) for client, requested in traffic.items()}
    if "" in rates:
        scale *= rates[""] / sum(by_client.values())
    return {client: scale * rate for client, rate in by_client.items()}


def arrivals_of_rates(
    deployment: DeploymentMap, rates: Mapping[str, float], scale: float, form: str
) -> dict[str, ArrivalProcess]:
    """Return an arrival process for each model of the map at the rates of `client_rates`.

    Raises `InputError` for a model that the map lacks, or a ``form`` that `parse_arrivals` cannot read.
    """
    entries = deployment.entries
    demanded = dict.fromkeys(entries.values(), 0.0)
    for client, rate in client_rates(deployment, rates, scale).items():
        demanded[entries[client]] += rate
    return {name: parse_arrivals(form, rate) for name, rate in demanded.items()}


def arrivals_of_trace(deployment: DeploymentMap, trace: Trace) -> dict[str, ArrivalProcess]:
    """Return the requests of a trace; a trace without model names is for the map's only model.

    Raises `InputError` when the trace names a model that the map lacks, or no model and the map has several.
    """
    return name_requests(deployment, trace).join(deployment.entries).arrivals()


def name_requests(deployment: DeploymentMap, trace: Trace) -> Trace:
    """Return the requests of a trace by the map's names for clients; see `arrivals_of_trace`."""
    clients = list(deployment.traffic)
    names = [name for name, times in trace.times.items() if len(times)]
    if names == [""]:
        if len(clients) != 1:
            raise InputError(f"the trace names no model and the map has {len(clients)}", "add a column model to it")
        return Trace({clients[0]: trace.times[""]}, trace.duration_s)
    for model in names:
        if model not in clients:
            raise unknown_name("model", model, clients)
    return trace


def arrival_streams(
    deployment: DeploymentMap, arrivals: Mapping[str, ArrivalProcess], seed: int
) -> list[ArrivalStream | None]:
    """Return a stream for each model of the map, in its order; None for a model without arrivals."""
    # The second child draws the service times (`gpuprof.simulator.engine`).
    first, _ = np.random.SeedSequence(seed).spawn(2)
    return [
        arrivals[model].stream(np.random.Generator(np.random.PCG64(child))) if model in arrivals else None
        for model, child in zip(deployment.models, first.spawn(len(deployment.models)), strict=True)
    ]


def expected_requests(arrivals: Mapping[str, ArrivalProcess], duration_s: float) -> float:
    """Return the expected number of requests."""
    return duration_s * sum(process.rate_rps for process in arrivals.values())


def thesis_network_ms(payload_bytes: float) -> float:
    """Return the transmission time of a message between the two machines of Elvinger's thesis (section 4.6.2).

    Its measured round trip, and the single fitted value that it prints: 8.7 ms for 9,633,792 bytes, 9.2 Gbit/s.
    """
    return 0.322 + (8.7 - 0.322) * payload_bytes / 9_633_792
