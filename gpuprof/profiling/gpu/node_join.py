"""Joins ONNX Runtime's profile of its nodes with the kernels that CUPTI recorded of the same session.

ONNX Runtime runs the nodes of a session one after another on the calling thread, and its own profile has begin and end
of each node; CUPTI has begin and end of each launch call. A launch belongs to the node on its thread in which it began.
The offset between both clocks is found by trial: the difference of the Unix times of their zeros, if known, and all
offsets within the limits set by the runs. The best puts most launch calls completely into nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd

from gpuprof.errors import InputError
from gpuprof.profiling.timeline.timeline import (
    NO_RANGE,
    OUTSIDE,
    Integers,
    Timeline,
    find_innermost_ranges,
    find_runs,
    integer_column,
    list_names,
)

_TIMES = ("start_ns", "end_ns")
_IDS = ["process_id", "thread_id"]
_TICK_NS = 1000  # ONNX Runtime's profile is in whole microseconds
_STEP_NS = _TICK_NS // 2  # between tried offsets
_MOST_OFFSETS = 20_000  # tried in a window
_MOST_LAUNCHES = 500  # that decide the offset: the last ones
#: Part of the launches within the session's runs that agree with its nodes: no other offset is tried from the first on,
#: and below the second the profile is of another session.
_ENOUGH, _LEAST_AGREEING = 0.98, 0.9


def join_nodes(timeline: Timeline, profile: Timeline) -> Timeline:
    """Return the timeline with ONNX Runtime's ``nodes``, and for each kernel the row of its ``node``, or -1.

    ``timeline``: the selected runs (`Timeline.select_runs`), or a recording without marked runs: these are then the
    profile's; ``profile``: of the same session. Raises `InputError` when it is of another one.
    """
    profile = _translate_threads(profile, timeline.kernels)
    profile = _shift(profile, _find_offset(timeline, profile))
    timeline, turns = _match_runs(timeline, profile)
    nodes = profile.nodes.assign(repeat=turns[profile.nodes["repeat"].to_numpy(dtype=np.int64)])
    nodes = nodes[nodes["repeat"] != OUTSIDE].reset_index(drop=True)
    owners = _find_around(_with_ends(nodes), _list_calls(timeline.kernels))
    names = np.array([*nodes["name"].tolist(), None], dtype=object)
    kernels = timeline.kernels.assign(node=owners, range=pd.Series(names[owners], dtype="object"))
    total, outside = float(kernels["duration_ns"].sum()), kernels[kernels["node"] == NO_RANGE]
    notes = timeline.notes
    if len(outside):
        part = 100.0 * float(outside["duration_ns"].sum()) / max(total, 1.0)
        notes += (f"{part:.2g}% of the kernels' time is outside of any node: {list_names(outside['name'])}",)
    return replace(timeline, kernels=kernels, nodes=nodes, notes=notes)


def _with_ends(nodes: pd.DataFrame) -> pd.DataFrame:
    return nodes.assign(end_ns=nodes["start_ns"] + nodes["duration_ns"] + _TICK_NS)


def _list_calls(kernels: pd.DataFrame) -> pd.DataFrame:
    """Return begin, end, process, thread and run of each kernel's launch call."""
    columns = {name: integer_column(kernels, name) for name in (*_IDS, "repeat")}
    begins, ends = (integer_column(kernels, f"launch_{name}") for name in _TIMES)
    return pd.DataFrame({**columns, "start_ns": begins, "end_ns": np.maximum(begins, ends)})


def _translate_threads(profile: Timeline, kernels: pd.DataFrame) -> Timeline:
    """Return the profile with the timeline's ids of processes and threads.

    If both have no thread in common, they identify threads differently: the threads with the most nodes are those with
    the most launches.
    """
    launching, running = Counter(_threads(kernels)), Counter(_threads(profile.nodes))
    if not launching or launching.keys() & running.keys():
        return profile
    pairs = zip(running.most_common(), launching.most_common(), strict=False)
    ids = {there: here for (there, _), (here, _) in pairs}

    def translate(table: pd.DataFrame) -> pd.DataFrame:
        threads = [ids.get(thread, (NO_RANGE, NO_RANGE)) for thread in _threads(table)]
        return table.assign(**{name: [thread[place] for thread in threads] for place, name in enumerate(_IDS)})

    return replace(profile, nodes=translate(profile.nodes), ranges=translate(profile.ranges))


def _threads(table: pd.DataFrame) -> list[tuple[int, int]]:
    return list(zip(*(integer_column(table, name).tolist() for name in _IDS), strict=True))


def _shift(profile: Timeline, offset: int) -> Timeline:
    nodes, ranges = profile.nodes, profile.ranges
    return replace(
        profile,
        nodes=nodes.assign(start_ns=nodes["start_ns"] + offset),
        ranges=ranges.assign(start_ns=ranges["start_ns"] + offset, end_ns=ranges["end_ns"] + offset),
    )


def _match_runs(timeline: Timeline, profile: Timeline) -> tuple[Timeline, Integers]:
    """Return the timeline with marked runs, and the number of each profile run in it; the last number is `OUTSIDE`."""
    sessions, _ = find_runs(profile.ranges)
    marks, by_thread = find_runs(timeline.ranges)
    if not len(marks):
        launching = np.unique(_find_around(sessions, _list_calls(timeline.kernels)))
        timeline = timeline.mark_runs(sessions.iloc[launching[launching != NO_RANGE]]).select_runs()
        marks, by_thread = find_runs(timeline.ranges)
    middles = sessions.assign(start_ns=sessions["start_ns"] // 2 + sessions["end_ns"] // 2)
    if not by_thread:
        marks, middles = (table.assign(thread_id=0) for table in (marks, middles))
    numbers = np.append(marks.groupby("process_id").cumcount().to_numpy(dtype=np.int64), OUTSIDE)
    return timeline, np.append(numbers[_find_around(marks, middles)], OUTSIDE)


def _find_around(ranges: pd.DataFrame, events: pd.DataFrame) -> Integers:
    """Return the row of the innermost range on its thread in which each event begins."""
    process_id, thread_id, moment_ns = (events[name].to_numpy(dtype=np.int64) for name in (*_IDS, "start_ns"))
    return find_innermost_ranges(ranges, process_id, thread_id, moment_ns)


def _find_offset(timeline: Timeline, profile: Timeline) -> int:
    """Return the nanoseconds to add to the profile's times."""
    calls = _list_calls(timeline.kernels)
    if len(calls) and calls["start_ns"].max() < 0:
        raise InputError(
            "the report has no launch calls, which tie kernels to ONNX Runtime's nodes",
            "give a trace of torch.profiler, or the SQLite file of nsys",
        )
    threads = set(_threads(profile.nodes))
    of_session = np.array([thread in threads for thread in _threads(calls)], dtype=bool)
    calls = calls[of_session & (calls["start_ns"] >= 0).to_numpy()].sort_values("start_ns")
    last_calls = calls.tail(_MOST_LAUNCHES)
    trial = _Trial(last_calls, profile)
    epochs = (timeline.epoch_ns, profile.epoch_ns)
    offsets = [] if epochs[0] is None or epochs[1] is None else [epochs[1] - epochs[0]]
    is_of_session = bool(offsets)  # gpuprof recorded both
    for low, high in _list_windows(timeline, profile, calls):
        offsets.append(trial.find_best(low, high))
        agreeing, within = trial.count(offsets[-1])
        if agreeing >= _ENOUGH * within and 2 * agreeing >= len(last_calls):
            break
    offset = max(offsets, key=lambda offset: trial.count(offset)[0], default=0)
    agreeing, within = trial.count(offset)
    if len(calls) and not is_of_session and (not agreeing or agreeing < _LEAST_AGREEING * within):
        raise InputError(
            f"ONNX Runtime's profile is not of the recorded runs: {agreeing} of {within} launches fit its nodes",
            "give the profile of the same session",
        )
    return offset


def _list_windows(timeline: Timeline, profile: Timeline, calls: pd.DataFrame) -> Iterator[tuple[int, int]]:
    """Yield the smallest and largest offset for each way in which runs of both recordings may correspond.

    A marked run contains a run of the profile, and a run of the profile contains the first, the last or the middle
    launch. The profile's last runs are the first to be considered.
    """
    sessions, _ = find_runs(profile.ranges)
    marks, by_thread = find_runs(timeline.ranges)
    if not len(sessions) or not len(calls):
        return
    last_run = calls[calls["repeat"] == calls["repeat"].max()]
    anchors = [last_run.iloc[place] for place in (-1, 0, len(last_run) // 2)]
    keys = _IDS if by_thread else _IDS[:1]
    pairs = [(part, sessions[(sessions[keys] == part[keys].iloc[0]).all(axis=1)]) for _, part in marks.groupby(keys)]
    pairs = [(here, there) for here, there in pairs if len(there) >= len(here)]  # not of another session's threads
    for skipped in range(1 + min((len(there) - len(here) for here, there in pairs), default=len(sessions) - 1)):
        low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        for here, there in pairs:
            runs = there.iloc[len(there) - len(here) - skipped : len(there) - skipped]
            low = max(low, int((here["start_ns"].to_numpy() - runs["start_ns"].to_numpy()).max()))
            high = min(high, int((here["end_ns"].to_numpy() - runs["end_ns"].to_numpy()).min()) + _TICK_NS)
        run = sessions.iloc[len(sessions) - 1 - skipped]
        for anchor in anchors:
            begin, end = int(anchor["end_ns"] - run["end_ns"]) - _TICK_NS, int(anchor["start_ns"] - run["start_ns"])
            if max(low, begin) <= min(high, end) + _TICK_NS:
                yield max(low, begin), max(low, begin, min(high, end))


class _Trial:
    """Launches and the executions of nodes, by thread, at trial offsets of the profile's clock."""

    def __init__(self, calls: pd.DataFrame, profile: Timeline) -> None:
        nodes = _with_ends(profile.nodes).sort_values("start_ns")
        nodes = nodes.assign(number=pd.factorize(nodes["name"])[0])
        nodes = nodes.assign(run_end_ns=nodes.groupby("repeat")["end_ns"].transform("max"))
        of_thread = dict(iter(nodes.groupby(_IDS)))
        names = (*_TIMES, "run_end_ns", "repeat", "number")
        self._threads = [
            (_columns(part, *_TIMES), _columns(of_thread[thread], *names)) for thread, part in calls.groupby(_IDS)
        ]

    def count(self, offset: int) -> tuple[int, int]:
        """Return the number of launches that agree with the nodes, and of all launches during the session's runs.

        A launch agrees if its call is completely within a node, that of most launches at the same place in a run.
        """
        agreeing = within = 0
        for (begins, ends), (starts, stops, run_ends, runs, numbers) in self._threads:
            rows = np.searchsorted(starts, begins - offset, side="right") - 1
            inside = (rows >= 0) & (begins - offset <= run_ends[rows])
            within += int(inside.sum())
            places = np.arange(len(rows)) - np.searchsorted(runs[rows], runs[rows])
            inside &= ends - offset <= stops[rows]
            width = int(numbers.max()) + 1
            pairs, counts = np.unique(places[inside] * width + numbers[rows[inside]], return_counts=True)
            most = np.zeros(len(rows), dtype=np.int64)
            np.maximum.at(most, pairs // width, counts)
            agreeing += int(most.sum())
        return agreeing, within

    def find_best(self, low: int, high: int) -> int:
        """Return the offset from ``low`` to ``high`` at which most launches agree."""
        offsets = np.linspace(low, high, min(_MOST_OFFSETS, 2 + (high - low) // _STEP_NS)).astype(np.int64)
        counts = np.array([self.count(offset)[0] for offset in offsets.tolist()])
        # The middle of the longest sequence of best offsets: launches near borders of nodes stay in theirs.
        borders = np.flatnonzero(np.diff(counts == counts.max(), prepend=False, append=False))
        longest = 2 * int((borders[1::2] - borders[::2]).argmax())
        return int(offsets[(borders[longest] + borders[longest + 1] - 1) // 2])


def _columns(table: pd.DataFrame, *names: str) -> list[Integers]:
    return [table[name].to_numpy(dtype=np.int64) for name in names]
