"""A GPU recording by any tool: one table of kernels, one of copies, one of ranges.

All times are nanoseconds of one clock. A column that the tool does not record is missing as a whole: what reads a
timeline asks for a column by `column`, which gives nulls for one that is not there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from gpuprof.domain.gpu_description import GpuDescription

#: Name of the range that gpuprof puts around each run of a model that it measures.
RUN_RANGE = "gpuprof-run"
_STEP = re.compile(r"ProfilerStep#\d+")
#: Columns of `Timeline.kernels` that decide a launch; counters are joined on them.
LAUNCH = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
H2D, D2H = "h2d", "d2h"
#: Kinds of the host's memory: what a copy from or to it can achieve differs by a factor.
PINNED, PAGEABLE = "pinned", "pageable"
#: ``repeat`` of what lies outside of every run: warm-up, loading.
OUTSIDE = -1


@dataclass(frozen=True)
class Timeline:
    """A recording."""

    #: ``name``, ``start_ns``, ``duration_ns``, and what the tool has of ``process_id``, ``device_index``,
    #: ``stream_id``, ``correlation_id``, ``grid_x`` … ``block_z``, ``registers_per_thread``, ``static_shared_bytes``,
    #: ``dynamic_shared_bytes``, ``graph_node``, ``launch_start_ns``, ``thread_id``, ``range`` (innermost range around
    #: the launch, or None) and ``repeat`` (`OUTSIDE` outside of all runs); in order of start.
    kernels: pd.DataFrame
    #: ``start_ns``, ``duration_ns``, ``bytes``, ``direction`` (``"h2d"``, ``"d2h"``, or another word), ``memory`` (of
    #: the host: ``"pinned"``, ``"pageable"``, or None: not recorded), ``repeat``, and perhaps ``device_index``.
    copies: pd.DataFrame
    ranges: pd.DataFrame  #: ``name``, ``start_ns``, ``end_ns``, ``process_id``, ``thread_id``.
    #: ``tool``, ``version``: What recorded it.
    tool: str
    version: str
    gpus: dict[int, GpuDescription] = field(default_factory=dict)  #: Device index → what the report says of the GPU.
    notes: tuple[str, ...] = ()  #: What a reader must know.

    @property
    def repeats(self) -> int:
        """Runs of the model in the recording; 0 where no run is marked."""
        return int(self.kernels["repeat"].max()) + 1 if "repeat" in self.kernels and len(self.kernels) else 0

    def select_runs(self) -> Timeline:
        """Return the part inside of marked runs; all of it, as one run, where none is marked."""
        if self.repeats == 0:
            note = f"no {RUN_RANGE} range in the recording: all of it counts as one run"
            whole = replace(self, kernels=self.kernels.assign(repeat=0), copies=self.copies.assign(repeat=0))
            return replace(whole, notes=(*self.notes, note))
        kernels = self.kernels[self.kernels["repeat"] != OUTSIDE].reset_index(drop=True)
        copies = self.copies[self.copies["repeat"] != OUTSIDE].reset_index(drop=True)
        return replace(self, kernels=kernels, copies=copies)

    def by_gpu(self) -> dict[int, Timeline]:
        """Return the part of each GPU that kernels ran on, by its index; of one alone the whole, index or not."""
        index = pd.to_numeric(column(self.kernels, "device_index"), errors="coerce").fillna(0).astype(np.int64)
        used = sorted(index.unique().tolist()) or [0]
        if len(used) == 1:
            return {int(used[0]): self}
        copied = pd.to_numeric(column(self.copies, "device_index"), errors="coerce").fillna(-1).astype(np.int64)
        return {
            int(gpu): replace(
                self,
                kernels=self.kernels[(index == gpu).to_numpy()].reset_index(drop=True),
                copies=self.copies[(copied == gpu).to_numpy()].reset_index(drop=True),
                gpus={gpu: self.gpus[gpu]} if gpu in self.gpus else {},
                notes=(*self.notes, f"GPU {gpu} of {len(used)} in the report"),
            )
            for gpu in used
        }


def find_runs(ranges: pd.DataFrame) -> tuple[pd.DataFrame, bool]:
    """Return the ranges that are runs of the model, in order, and whether only their own thread's launches are in them.

    Those are gpuprof's own, else the steps that torch.profiler's schedule marks: a step is one for all threads of its
    process, as that which runs the backward pass.
    """
    own = ranges[ranges["name"] == RUN_RANGE]
    if len(own):
        return own.sort_values("start_ns").reset_index(drop=True), True
    is_step = np.array([_STEP.fullmatch(str(name)) is not None for name in ranges["name"]], dtype=bool)
    steps = ranges[is_step]
    return steps.sort_values("start_ns").reset_index(drop=True), False


def column(frame: pd.DataFrame, name: str) -> pd.Series[Any]:
    """Return a column of ``frame``, or one of nulls where it has none of that name."""
    if name in frame:
        return frame[name]
    return pd.Series([None] * len(frame), index=frame.index, dtype="object", name=name)


def empty_copies() -> pd.DataFrame:
    """Return a table of no copies."""
    return pd.DataFrame(
        {
            "start_ns": _no_integers(),
            "duration_ns": _no_integers(),
            "bytes": _no_integers(),
            "direction": [],
            "memory": [],
            "repeat": [],
        }
    )


def empty_ranges() -> pd.DataFrame:
    """Return a table of no ranges."""
    columns: dict[str, Any] = {name: _no_integers() for name in ("start_ns", "end_ns", "process_id", "thread_id")}
    return pd.DataFrame({"name": [], **columns})


def _no_integers() -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.zeros(0, dtype=np.int64)
