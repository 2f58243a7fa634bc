"""The common evidence format: kernels, copies, memsets, graphs, nodes and ranges of a recording by any tool.

All times are nanoseconds of the same clock. A column not recorded by the tool is missing entirely; `column` then
returns nulls. Kernels are joined with their counters from another run of the same program by name, order and launch
configuration (Elvinger 2024, §5.2.2). Counting replays kernels one by one, so times and ids differ between the runs;
only the kernels and their launch configurations agree. Tools write one template's instances in several ways
(``f<4>(float*)``, ``f<(int)4>(T1 *)``): if whole names do not agree, the parts before the template arguments must.
"""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gpuprof.domain.catalogue import GpuDescription
from gpuprof.errors import InputError

Integers = NDArray[np.int64]
NO_RANGE = -1
_FOREVER = np.iinfo(np.int64).max
#: Name of gpuprof's range around each measured run of a model.
RUN_RANGE = "gpuprof-run"
_STEP = re.compile(r"ProfilerStep#\d+")
#: Columns of `Timeline.kernels` that decide a launch; counters are joined on them.
LAUNCH = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
H2D, D2H = "h2d", "d2h"
#: Direction of a copy whose kind is not reported.
UNKNOWN = "unknown"
#: Words in the names of copies, once "Host-to-Device" and "HostToDevice" are written alike.
_DIRECTIONS = {
    **{"HtoH": "h2h", "HtoD": H2D, "DtoH": D2H, "DtoD": "d2d", "PtoP": "p2p"},
    **{"HostToHost": "h2h", "HostToDevice": H2D, "ToHost": D2H, "PeerTo": "p2p", "To": "d2d"},
}
#: Kinds of the host's memory: the rate of a copy differs by a factor between them.
PINNED, PAGEABLE = "pinned", "pageable"
#: ``repeat`` of events outside of every run: warm-up, loading.
OUTSIDE = NO_RANGE
_TIMES = ("start_ns", "duration_ns")
BOTH, TIMELINE, COUNTERS = "both", "timeline", "counters"
_COUNTED = (
    "achieved_occupancy_pct",
    "theoretical_occupancy_pct",
    "waves_per_sm",
    "sm_throughput_pct",
    "sm_active_pct",
    "dram_throughput_pct",
    "l2_throughput_pct",
    "l2_hit_pct",
    "dram_read_bytes",
    "dram_write_bytes",
    "instruction_count",
)
_SPACES = re.compile(r"\s+")
_RETURN = re.compile(r"^(?:void|static void)\s+")
_UNNAMED = re.compile(r"\(anonymous namespace\)::|<unnamed>::|\(anonymous\)::")
_ARGUMENTS = re.compile(r"[<(].*", re.DOTALL)


def find_innermost_ranges(
    ranges: pd.DataFrame, process_id: Integers, thread_id: Integers, moment_ns: Integers
) -> Integers:
    """Return for each moment the row of the innermost range around it on its thread.

    A launch call runs on a single thread and returns before any enclosing range ends, so its start determines the range
    of the launched kernel, whenever the kernel ran.

    Parameters
    ----------
    ranges : DataFrame
        ``start_ns``, ``end_ns``, ``process_id``, ``thread_id``.
    process_id, thread_id, moment_ns : ndarray of int64, shape (n,)

    Returns
    -------
    ndarray of int64, shape (n,)
        Positions of rows; `NO_RANGE` without an enclosing range.
    """
    innermost = np.full(len(moment_ns), NO_RANGE, dtype=np.int64)
    if not len(ranges) or not len(innermost):
        return innermost
    starts, ends = (ranges[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns"))
    rows_of: dict[tuple[int, int], list[int]] = {}
    for row, owner in enumerate(zip(ranges["process_id"].tolist(), ranges["thread_id"].tolist(), strict=True)):
        rows_of.setdefault(owner, []).append(row)
    for (process, thread), rows in rows_of.items():
        here = np.flatnonzero((process_id == process) & (thread_id == thread))
        if len(here):
            chosen = np.array(rows, dtype=np.int64)
            borders, holders = _segments(starts[chosen], ends[chosen])
            segment = np.searchsorted(borders, moment_ns[here], side="right") - 1
            local = np.where(segment >= 0, holders[np.maximum(segment, 0)], NO_RANGE)
            innermost[here] = np.where(local == NO_RANGE, NO_RANGE, chosen[np.maximum(local, 0)])
    return innermost


def _segments(starts: Integers, ends: Integers) -> tuple[Integers, Integers]:
    """Cut a thread's time at every border of a range; return the borders and the innermost range after each."""
    n = len(starts)
    times = np.concatenate([starts, ends])
    opens = np.concatenate([np.ones(n, dtype=np.int64), np.zeros(n, dtype=np.int64)])
    # Among simultaneous events, ends come before begins; of ranges with the same begin the longest is the outer range.
    outer_first = np.concatenate([_FOREVER - ends, np.zeros(n, dtype=np.int64)])
    order = np.lexsort((outer_first, opens, times))
    holders = np.full(2 * n, NO_RANGE, dtype=np.int64)
    open_ranges: list[int] = []
    closed = bytearray(n)
    for position, event in enumerate(order.tolist()):
        if event < n:
            open_ranges.append(event)
        else:
            closed[event - n] = 1
        while open_ranges and closed[open_ranges[-1]]:
            open_ranges.pop()
        holders[position] = open_ranges[-1] if open_ranges else NO_RANGE
    return times[order], holders


def empty_frame(*names: str) -> pd.DataFrame:
    """Return a table without rows: ``name``-like columns of text, times and ids of integers."""
    texts = {"name", "direction", "memory", "op_type", "provider"}
    return pd.DataFrame({name: pd.Series(dtype="object" if name in texts else "int64") for name in names})


_no_copies = partial(empty_frame, *_TIMES, "bytes", "direction", "memory", "repeat")
_no_events = partial(empty_frame, *_TIMES, "repeat")
_no_ranges = partial(empty_frame, "name", "start_ns", "end_ns", "process_id", "thread_id")
_no_nodes = partial(empty_frame, "name", "op_type", "provider", *_TIMES, "process_id", "thread_id", "repeat")


@dataclass(frozen=True)
class Timeline:
    """A recording: a table for each kind of event, in order of start.

    Events on a device have ``start_ns`` and ``duration_ns``, and, if reported by the tool, ``process_id``,
    ``device_index``, ``stream_id``, ``correlation_id``, ``thread_id`` and ``launch_start_ns`` (of the call that caused
    them), ``range`` (innermost range around that call, or None) and ``repeat`` (run of the model, `OUTSIDE` in none).
    """

    #: Kernels: ``name``, ``grid_x`` … ``block_z``, ``registers_per_thread``, ``static_shared_bytes``,
    #: ``dynamic_shared_bytes``, ``graph_node``.
    kernels: pd.DataFrame
    #: ``tool``, ``version``: The recorder.
    tool: str
    version: str
    #: Copies: ``bytes``, ``direction`` (``"h2d"``, ``"d2h"``, `UNKNOWN` or another word), ``memory`` (of the host:
    #: ``"pinned"``, ``"pageable"``, ``"unified"`` or None: not recorded).
    copies: pd.DataFrame = field(default_factory=_no_copies)
    memsets: pd.DataFrame = field(default_factory=_no_events)
    graphs: pd.DataFrame = field(default_factory=_no_events)  #: CUDA graphs recorded without their kernels.
    #: Executions of a runtime's nodes on the host: ``name``, ``op_type``, ``provider``, without those within others.
    nodes: pd.DataFrame = field(default_factory=_no_nodes)
    ranges: pd.DataFrame = field(default_factory=_no_ranges)  #: ``name``, ``start_ns``, ``end_ns``, and ids.
    gpus: Mapping[int, GpuDescription] = field(default_factory=dict)  #: ``device_index`` → the report's description.
    notes: tuple[str, ...] = ()
    epoch_ns: int | None = None  #: Unix time at the clock's zero; None: not reported.

    @property
    def repeats(self) -> int:
        """Number of the model's runs in the recording; 0 without marked runs."""
        marked = [table["repeat"].max() for table in (self.kernels, self.nodes) if "repeat" in table and len(table)]
        return int(max(marked)) + 1 if marked else 0

    def select_runs(self, runs: str | None = None) -> Timeline:
        """Return the events within runs of the model, numbered from 0.

        ``runs``: a regular expression for the names of the runs' ranges, or the number of equal runs in the recording;
        None: gpuprof's own ranges or torch.profiler's steps, else the whole recording as a single run, with a note.
        Raises `InputError` when there are no such ranges, or the kernels do not repeat that often.
        """
        if runs is None and self.repeats == 0 and len(self.kernels):
            warning = f"no {RUN_RANGE} range in the recording: all of it counts as one run; name runs with --runs"
            whole = {name: table.assign(repeat=0) for name, table in self._events().items()}
            return replace(self, **whole, notes=(*self.notes, warning))  # type: ignore[arg-type]
        marked = self
        if runs is not None:
            marked = self._cut(int(runs)) if runs.isdecimal() else self._mark(runs)
        tables = {
            name: table[table["repeat"] != OUTSIDE].reset_index(drop=True)
            for name, table in marked._events().items()
            if name != "nodes"  # kernels name their node by its place
        }
        return replace(marked, **tables)  # type: ignore[arg-type]

    def mark_runs(self, ranges: pd.DataFrame) -> Timeline:
        """Return the timeline with the events within ``ranges`` marked as runs, and no others."""
        runs, rest = ranges.assign(name=RUN_RANGE), self.ranges[self.ranges["name"] != RUN_RANGE]
        tables = {name: mark_runs(table, runs) for name, table in self._events().items()}
        return replace(self, **tables, ranges=pd.concat([runs, rest], ignore_index=True))  # type: ignore[arg-type]

    def run_names(self, runs: str) -> tuple[str, ...]:
        """Return the different names of the ranges that match ``runs``, in order of their first start."""
        matches = [str(name) for name in self.ranges.sort_values("start_ns")["name"] if re.fullmatch(runs, str(name))]
        return tuple(dict.fromkeys(matches))

    def run_times_ns(self) -> tuple[list[int], str]:
        """Return the duration of each run, if shown by the recording, and a description of its source.

        A run in a range lasts as long as the range, provided the range waits for all its work; a run cut by number
        lasts from its first kernel to the first kernel of the next run. Otherwise the list is empty.
        """
        runs = find_runs(self.ranges)[0]
        ends = pd.concat([t["start_ns"] + t["duration_ns"] for t in self._events().values() if "start_ns" in t])
        repeats = pd.concat([table["repeat"] for table in self._events().values() if "start_ns" in table])
        last = ends.groupby(repeats).max()
        if len(runs) and len(runs) == self.repeats:
            starts, stops = runs["start_ns"].tolist(), runs["end_ns"].tolist()
            if all(last.get(turn, stop) <= stop for turn, stop in enumerate(stops)):
                return [stop - start for start, stop in zip(starts, stops, strict=True)], "ranges of the report"
            return [], "the report's ranges end before their kernels do"
        if len(self.nodes) == 0 and self.repeats > 1 and "start_ns" in self.kernels:
            firsts = self.kernels.groupby("repeat")["start_ns"].min().tolist()
            return np.diff(firsts).tolist(), "times from one run's first kernel to the next one's"
        return [], "the report does not mark runs"

    def by_gpu(self) -> dict[int, Timeline]:
        """Return the part of each GPU with kernels, by GPU index; a single GPU gets the whole."""
        gpus = sorted(set(_device_indices(self.kernels, 0).tolist())) or [0]
        parts = {}
        for gpu in gpus:
            missing = gpu if len(gpus) == 1 else -1  # events without a GPU are of the only one, or of none
            tables = {
                name: table[_device_indices(table, 0 if name == "kernels" else missing) == gpu].reset_index(drop=True)
                for name, table in self._events().items()
                if name != "nodes"
            }
            parts[gpu] = replace(self, **tables)
            if len(gpus) > 1:
                described = {gpu: self.gpus[gpu]} if gpu in self.gpus else {}
                parts[gpu] = replace(
                    parts[gpu], gpus=described, notes=(*self.notes, f"GPU {gpu} of {len(gpus)} in the report")
                )
        return parts

    def _events(self) -> dict[str, pd.DataFrame]:
        return {name: getattr(self, name) for name in ("kernels", "copies", "memsets", "graphs", "nodes")}

    def _mark(self, pattern: str) -> Timeline:
        try:
            matching = np.array(
                [re.fullmatch(pattern, str(name)) is not None for name in self.ranges["name"]], dtype=bool
            )
        except re.error as error:
            raise InputError(f"--runs {pattern!r} is no regular expression: {error}") from None
        if not matching.any():
            names = list(dict.fromkeys(str(name) for name in self.ranges["name"]))
            raise InputError(
                f"no range of the report matches --runs {pattern!r}",
                f"its ranges are {', '.join(names[:8])}" if names else "it has no ranges; say how many runs it has",
            )
        return self.mark_runs(self.ranges[matching])

    def _cut(self, runs: int) -> Timeline:
        """Return kernels cut into ``runs`` equal parts without the first surplus ones, and copies between."""
        ordered = self.kernels.sort_values("launch_start_ns" if "launch_start_ns" in self.kernels else "start_ns")
        size = len(ordered) // runs if runs else 0
        names = ordered["name"].tolist()[len(ordered) - size * runs :]
        if not size or any(names[turn * size : (turn + 1) * size] != names[:size] for turn in range(runs)):
            raise InputError(
                f"the {len(ordered)} kernels of the report are not {runs} times the same",
                "name ranges: --runs 'step.*'",
            )
        turns = np.full(len(ordered), OUTSIDE, dtype=np.int64)
        turns[len(ordered) - size * runs :] = np.repeat(np.arange(runs), size)
        kernels = self.kernels.assign(repeat=pd.Series(turns, index=ordered.index))
        within = kernels[kernels["repeat"] != OUTSIDE]
        starts = within.groupby("repeat")["start_ns"].min().to_numpy()
        ends = (within["start_ns"] + within["duration_ns"]).groupby(within["repeat"]).max().to_numpy()
        tables = {
            name: table.assign(repeat=_turns_between(table, starts, ends))
            for name, table in self._events().items()
            if name not in ("kernels", "nodes")
        }
        return replace(self, kernels=kernels, **tables, ranges=_no_ranges())  # type: ignore[arg-type]


def _turns_between(table: pd.DataFrame, starts: Integers, ends: Integers) -> Integers:
    """Return the run of each copy or memset.

    Inputs after a run's last kernel belong to the next run, other events to the last run begun.
    """
    moments = table["start_ns"].to_numpy(dtype=np.int64)
    turns = np.searchsorted(starts, moments, side="right") - 1
    inputs = (column(table, "direction") == H2D).to_numpy(dtype=bool)
    after = moments >= ends[np.maximum(turns, 0)]
    ahead = inputs & ((turns < 0) | (after & (turns + 1 < len(starts))))
    return np.where(ahead, turns + 1, turns).astype(np.int64)


def find_runs(ranges: pd.DataFrame) -> tuple[pd.DataFrame, bool]:
    """Return the ranges of the model's runs, in order, and whether they contain only launches of their own thread.

    These are gpuprof's own ranges, else the steps marked by torch.profiler's schedule: a step applies to all threads of
    its process, including the thread of the backward pass.
    """
    marked = ranges[ranges["name"] == RUN_RANGE]
    if len(marked):
        return marked.sort_values("start_ns").reset_index(drop=True), True
    is_step = np.array([_STEP.fullmatch(str(name)) is not None for name in ranges["name"]], dtype=bool)
    return ranges[is_step].sort_values("start_ns").reset_index(drop=True), False


def mark_runs(events: pd.DataFrame, ranges: pd.DataFrame) -> pd.DataFrame:
    """Return ``events`` with ``repeat``: the number of the run that caused each event, by process; else `OUTSIDE`.

    An event belongs to the run of its launch; an event without a launch, such as a migration of unified memory, to the
    run in which it began.
    """
    if not len(events) or "start_ns" not in events:
        return events.assign(repeat=np.full(len(events), OUTSIDE, dtype=np.int64))
    runs, by_thread = find_runs(ranges)
    process, thread = (integer_column(events, name) for name in ("process_id", "thread_id"))
    launched = integer_column(events, "launch_start_ns")
    moment = np.where(launched >= 0, launched, integer_column(events, "start_ns"))
    turns = np.append(runs.groupby("process_id").cumcount().to_numpy(dtype=np.int64), OUTSIDE)
    tied = turns[find_innermost_ranges(runs, process, thread, moment)]
    anywhere = runs.assign(thread_id=np.int64(0))
    loose = turns[find_innermost_ranges(anywhere, process, np.zeros_like(thread), moment)]
    return events.assign(repeat=np.where((launched >= 0) & by_thread, tied, loose))


def tie_to_launches(
    events: pd.DataFrame, calls: pd.DataFrame, ranges: pd.DataFrame, keys: tuple[str, ...] = ("correlation_id",)
) -> pd.DataFrame:
    """Add to events on a device their launch call, the innermost range around the call, and the run.

    ``calls``: ``correlation_id``, ``process_id``, ``thread_id``, ``launch_start_ns``; ``keys``: columns common to an
    event and its call.
    """
    if not len(events):
        return events.assign(repeat=np.zeros(0, dtype=np.int64))
    if set(keys) <= set(events.columns):
        # A call of the runtime and its inner driver call can share an id: the outer call began first.
        first = calls.sort_values("launch_start_ns", kind="stable").drop_duplicates(list(keys))
        # Events without a call would turn the times into floats, which are too coarse for times since the epoch.
        first = first.astype(dict.fromkeys(first.columns.difference(list(keys)), "Int64"))
        columns = [name for name in ("process_id",) if name not in keys and name in events]
        events = events.drop(columns=columns).merge(first, on=list(keys), how="left")
    for name in ("process_id", "thread_id", "launch_start_ns"):
        events[name] = integer_column(events, name)
    where = tuple(integer_column(events, name) for name in ("process_id", "thread_id", "launch_start_ns"))
    runs = (ranges["name"] == RUN_RANGE).to_numpy(dtype=bool)
    named_ranges = ranges[~runs].reset_index(drop=True)
    names = np.array([*named_ranges["name"].tolist(), None], dtype=object)
    inner = pd.Series(names[find_innermost_ranges(named_ranges, *where)], dtype="object", index=events.index)
    return mark_runs(events.assign(range=inner), ranges)


def read_direction(name: str) -> str:
    """Return the direction in the name of a copy, as in ``"Memcpy HtoD (Pageable -> Device)"``."""
    plain = name.replace("-to-", "To")
    return next((direction for word, direction in _DIRECTIONS.items() if word in plain), UNKNOWN)


def column(frame: pd.DataFrame, name: str) -> pd.Series[Any]:
    """Return a column of ``frame``, or a column of nulls if missing."""
    if name in frame:
        return frame[name]
    return pd.Series([None] * len(frame), index=frame.index, dtype="object", name=name)


def list_names(names: Iterable[object]) -> str:
    """Return the different names, for a note: as many as fit into some lines."""
    return textwrap.shorten(", ".join(dict.fromkeys(str(name) for name in names)), 240, placeholder=" …")


def integer_column(frame: pd.DataFrame, name: str) -> Integers:
    """Return a column of ids or times, with `NO_RANGE` for missing values; floats would lose nanoseconds."""
    values = column(frame, name)
    if values.dtype == np.int64:
        return values.to_numpy()
    return np.array([NO_RANGE if pd.isna(value) else int(value) for value in values.tolist()], dtype=np.int64)


def _device_indices(table: pd.DataFrame, missing: int) -> Integers:
    numbers = pd.to_numeric(column(table, "device_index"), errors="coerce")
    return numbers.fillna(missing).to_numpy(dtype=np.int64)


def join_kernels(
    kernels: pd.DataFrame, counters: pd.DataFrame, distinct: bool = False
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return the kernels of both, and notes on kernels without a match.

    ``kernels``: `Timeline.kernels` of the measured runs, in order of launch; ``counters``: `Counters.kernels` of a
    single run, or of as many runs; ``distinct``: counters of a single launch of each kernel and grid, valid for all its
    launches.

    Returns
    -------
    DataFrame
        The timeline's kernels with the counters' columns and ``joined``: ``"both"``, ``"timeline"``, and at the end
        ``"counters"`` for kernels only counted. Counters of a single run are repeated for each run of the timeline.
    tuple of str
    """
    parts, notes = [], list[str]()
    mask = np.zeros(len(counters), dtype=bool)
    # Whole names only if both tools write all of them alike: a few equal names would hide differences in the others.
    whole = set(_names(kernels, True).values()) == set(_names(counters, True).values())
    labels = _labels(counters, whole)
    runs = [part for _, part in kernels.groupby("repeat", sort=True)]
    per_run = _split_into_runs(labels, len(runs))
    for turn, part in enumerate(runs):
        offered = per_run[min(turn, len(per_run) - 1)]
        places = _match_launches(_labels(part, whole), [labels[row] for row in offered])
        matched = np.array([offered[place] if place >= 0 else -1 for place in places], dtype=np.int64)
        if distinct:
            first = {label: row for row, label in reversed(list(enumerate(labels)))}
            matched = np.array([first.get(label, -1) for label in _labels(part, whole)], dtype=np.int64)
        mask[matched[matched >= 0]] = True
        parts.append(_with_counters(part, counters, matched))
    rest = counters[~mask]
    if len(rest):
        parts.append(rest.assign(joined=COUNTERS, repeat=0))
    joined = pd.concat(parts, ignore_index=True)
    for kind, word in ((TIMELINE, "timeline has but no counter"), (COUNTERS, "counters have but not the timeline")):
        unmatched = joined[joined["joined"] == kind]
        if len(unmatched):
            notes.append(f"{len(unmatched)} kernels that the {word}: {list_names(unmatched['name'])}")
    return joined, tuple(notes)


def _split_into_runs(labels: list[tuple[object, ...]], runs: int) -> list[list[int]]:
    """Return the counted kernels cut into the timeline's number of runs if they repeat that often; else as one run."""
    if runs > 1 and labels and len(labels) % runs == 0:
        size = len(labels) // runs
        if all(labels[i] == labels[i % size] for i in range(len(labels))):
            return [list(range(turn * size, (turn + 1) * size)) for turn in range(runs)]
    return [list(range(len(labels)))]


def _match_launches(here: list[tuple[object, ...]], there: list[tuple[object, ...]]) -> list[int]:
    """Return for each launch the position of its counterpart, or -1; equal labels are matched in order."""
    spare: dict[tuple[object, ...], deque[int]] = defaultdict(deque)
    for row, label in enumerate(there):
        spare[label].append(row)
    return [spare[label].popleft() if spare.get(label) else -1 for label in here]


def _names(frame: pd.DataFrame, whole: bool) -> dict[object, str]:
    """Return each name without parts that differ between demanglers: spaces, the return type, or all arguments."""
    names = set(frame["name"])
    if whole:
        return {name: _SPACES.sub("", _RETURN.sub("", str(name))) for name in names}
    return {name: _SPACES.sub("", _ARGUMENTS.sub("", _RETURN.sub("", _UNNAMED.sub("", str(name))))) for name in names}


def _labels(frame: pd.DataFrame, whole: bool) -> list[tuple[object, ...]]:
    short = _names(frame, whole)
    launch: list[list[Any]] = [[_size(value) for value in column(frame, name)] for name in LAUNCH]
    return list(zip([short[name] for name in frame["name"]], *launch, strict=True))


def _size(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)


def _with_counters(part: pd.DataFrame, counters: pd.DataFrame, matched: np.ndarray[Any, Any]) -> pd.DataFrame:
    rows = counters.reindex(matched).reset_index(drop=True)  # -1 is no label: a row of nulls
    new = {name: rows[name].to_numpy() for name in _COUNTED if name in counters}
    for name in ("registers_per_thread", "static_shared_bytes", "dynamic_shared_bytes"):
        if name in counters and name not in part:
            new[name] = rows[name].to_numpy()
    return part.reset_index(drop=True).assign(**new, joined=np.where(matched >= 0, BOTH, TIMELINE))
