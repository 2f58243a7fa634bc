"""Joins a timeline's kernels with their counters from another run of the same program.

Kernels are matched by name, order and launch configuration (Elvinger 2024, §5.2.2). Counting replays kernels one by
one, so times and ids differ between the runs; only the kernels and their launch configurations agree. Tools
write one template's instances in several ways (``f<4>(float*)``, ``f<(int)4>(T1 *)``): if whole names do not agree, the
parts before the template arguments must.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pandas as pd

from gpuprof.profiling.timeline.timeline import LAUNCH, column, list_names

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
    """Cut the counted kernels into as many runs as in the timeline, if they repeat that often; else a single run."""
    if runs > 1 and labels and len(labels) % runs == 0:
        size = len(labels) // runs
        if all(labels[i] == labels[i % size] for i in range(len(labels))):
            return [list(range(turn * size, (turn + 1) * size)) for turn in range(runs)]
    return [list(range(len(labels)))]


def _match_launches(here: list[tuple[object, ...]], there: list[tuple[object, ...]]) -> list[int]:
    """Return for each launch the position of its counterpart, or -1: launches of a label match in their order."""
    spare: dict[tuple[object, ...], deque[int]] = defaultdict(deque)
    for row, label in enumerate(there):
        spare[label].append(row)
    return [spare[label].popleft() if spare.get(label) else -1 for label in here]


def _names(frame: pd.DataFrame, whole: bool) -> dict[object, str]:
    """Return each name without its parts that vary between demanglers: spaces, the result's type, or all arguments."""
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
