"""Timelines of a program that gpuprof recorded, without and with ranges around nodes, and their join with counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from gpuprof.errors import InputError, UnavailableError
from gpuprof.profiling.gpu.gpu_rows import Recording
from gpuprof.profiling.gpu.kineto_trace import read_kineto
from gpuprof.profiling.nsight.ncu_report import Counters
from gpuprof.profiling.timeline.kernel_join import join_kernels
from gpuprof.profiling.timeline.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Timelines:
    """The same program recorded without ranges around its nodes, and with them; one and the same where it has none."""

    plain: Timeline
    nodes: Timeline


class UnreadError(UnavailableError):
    """A profiler ran, but its output is incomplete."""


@contextmanager
def describe_recording_errors() -> Iterator[None]:
    """Turn errors in reading a local recording into an error that does not blame the model or the command line."""
    try:
        yield
    except InputError as error:
        raise UnreadError(f"cannot read what was recorded: {error.message}", error.fix) from error


def read_kineto_timelines(plain: Path, nodes: Path) -> Timelines:
    """Return what torch.profiler left: a trace without ranges around nodes and, if there is one, another with them."""
    without = read_kineto(plain).select_runs()
    return Timelines(without, read_kineto(nodes).select_runs() if nodes.exists() else without)


def join_recording(
    timelines: Timelines | None, counted: Counters | None, tools: Mapping[str, str], notes: tuple[str, ...]
) -> Recording:
    """Return what timelines and counters hold of a program; either may be missing."""
    if timelines is None:
        kernels = pd.DataFrame({"name": [], "repeat": []}) if counted is None else counted.kernels.assign(repeat=0)
        return Recording(kernels, None, (), tools, notes)
    nodes, plain = timelines.nodes, timelines.plain
    gpus = tuple(nodes.gpus.values())
    kernels, unmatched = (nodes.kernels, ()) if counted is None else join_kernels(nodes.kernels, counted.kernels)
    recording = Recording(kernels, nodes.copies, gpus, tools, (*nodes.notes, *notes, *unmatched))
    if plain is nodes:
        return recording
    plain_kernels = plain.kernels if counted is None else join_kernels(plain.kernels, counted.kernels)[0]
    return replace(recording, plain_kernels=plain_kernels, plain_copies=plain.copies)
