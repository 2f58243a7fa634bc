"""Reads Microsoft's published traces of Azure Functions: counts per minute (2019) and single invocations (2021).

2019: ``HashOwner,HashApp,HashFunction,Trigger,1,…,1440``, a line per function and day, a column per minute
(Shahrad et al., ATC'20). 2021: ``app,func,end_timestamp,duration`` in seconds, a line per invocation
(Zhang et al., SOSP'21). Both are at github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.arrival_process import NS_PER_S, Times
from gpuprof.errors import InputError
from gpuprof.simulator.trace import MAX_REQUESTS, Trace, open_rows

_HEADER_2019 = ["HashOwner", "HashApp", "HashFunction", "Trigger"]
_HEADER_2021 = ["app", "func", "end_timestamp", "duration"]
_MINUTE_NS = 60 * NS_PER_S


def read_azure(path: Path, busiest: int, seed: int = 0) -> Trace:
    """Read either format, recognised by its header, and return the ``busiest`` functions, busiest first.

    The requests of a minute are spread uniformly at random, like a Poisson process of that count. In the 2021 format a
    request arrives at the begin of its invocation, ``end_timestamp - duration``; the earliest in the file is time 0.
    Raises `InputError` with the line for another header, missing minutes, or an invalid count or time.
    """
    _, header = next(open_rows(path), (1, []))
    if header == _HEADER_2021:
        return _keep_busiest(*_read_2021(path), busiest)
    if header[:4] == _HEADER_2019:
        return _read_2019(path, header, busiest, np.random.Generator(np.random.PCG64(seed)))
    raise InputError(
        f"{path} is in neither Azure Functions format: its header begins {','.join(header[:4])!r}",
        f"expected {','.join(_HEADER_2019)},1,… or {','.join(_HEADER_2021)}",
    )


def _read_2019(path: Path, header: Sequence[str], busiest: int, random: np.random.Generator) -> Trace:
    minutes = header[4:]
    for position, name in enumerate(minutes, start=1):
        if name != str(position):
            raise InputError(f"{path}:1: minute {position} is missing: column {position + 4} is {name!r}")
    heap: list[tuple[int, int, str, NDArray[np.int64]]] = []
    rows = open_rows(path)
    next(rows)
    for line, row in rows:
        counts = _read_counts(row, len(minutes), f"{path}:{line}")
        entry = (int(counts.sum()), -line, "/".join(row[:3]), counts)  # of equal counts the first in the file is kept
        (heapq.heappush if len(heap) < busiest else heapq.heappushpop)(heap, entry)
    if not any(total for total, *_ in heap):
        raise InputError(f"{path} holds no invocations", "give a day that has some")
    if (total := sum(entry[0] for entry in heap)) > MAX_REQUESTS:
        raise InputError(f"{path}: {total:.3g} invocations are too many to hold", "ask for fewer functions")
    times = {name: _spread_in_minutes(counts, random) for total, _, name, counts in sorted(heap, reverse=True) if total}
    return Trace(times, 60.0 * len(minutes))


def _read_counts(row: Sequence[str], minutes: int, where: str) -> NDArray[np.int64]:
    if len(row) != minutes + 4:
        raise InputError(f"{where}: expected {minutes + 4} fields but got {len(row)}")
    try:
        counts = np.array(row[4:], dtype=np.int64)
    except (ValueError, OverflowError):
        invalid_cell = next((cell for cell in row[4:] if not cell.strip().isdigit()), max(row[4:], key=len))
        raise InputError(f"{where}: a count must be a whole number but got {invalid_cell!r}") from None
    if len(counts) and counts.min() < 0:
        raise InputError(f"{where}: a count must be at least 0 but got {counts.min()}")
    return counts


def _spread_in_minutes(counts: NDArray[np.int64], random: np.random.Generator) -> Times:
    minute = np.repeat(np.arange(len(counts)), counts)
    return np.sort(((minute + random.random(len(minute))) * _MINUTE_NS).astype(np.int64))


def _read_2021(path: Path) -> tuple[NDArray[np.float64], list[str]]:
    starts: list[float] = []
    functions: list[str] = []
    rows = open_rows(path)
    next(rows)
    for line, row in rows:
        if len(row) != 4:
            raise InputError(f"{path}:{line}: expected 4 fields but got {len(row)}")
        try:
            end, duration = float(row[2]), float(row[3])
        except ValueError:
            raise InputError(f"{path}:{line}: end_timestamp and duration must be numbers but got {row[2:]}") from None
        if not math.isfinite(end) or not math.isfinite(duration) or duration < 0:
            raise InputError(f"{path}:{line}: end_timestamp and duration must be finite, the duration at least 0")
        starts.append(end - duration)
        functions.append(f"{row[0]}/{row[1]}")
    if not starts:
        raise InputError(f"{path} holds no invocations", "give a day that has some")
    return np.array(starts), functions


def _keep_busiest(starts: NDArray[np.float64], functions: Sequence[str], busiest: int) -> Trace:
    order = np.argsort(starts, kind="stable")
    times = np.rint((starts[order] - starts[order[0]]) * NS_PER_S).astype(np.int64)
    names, index, totals = np.unique(np.array(functions)[order], return_inverse=True, return_counts=True)
    # The last key of lexsort is the primary key: falling totals, then names.
    busiest_rows = np.lexsort((names, -totals))[:busiest]
    kept_times = {str(names[i]): times[index == i] for i in busiest_rows}
    # A single request would have duration 0, by which rates cannot be divided.
    return Trace(kept_times, max(float(times[-1] / NS_PER_S), 1.0 / NS_PER_S))
