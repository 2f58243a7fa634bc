"""Timelines of a program that gpuprof recorded, without and with the runtime's own profile, joined with counters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from gpuprof.errors import GpuprofError, InputError, UnavailableError
from gpuprof.graph.executed_graph import ExecutedNode, read_executed
from gpuprof.profiling.gpu.gpu_rows import Recording
from gpuprof.profiling.gpu.node_join import join_nodes
from gpuprof.profiling.nsight.ncu_report import Counters
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.profiling.timeline.kernel_join import join_kernels
from gpuprof.profiling.timeline.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Timelines:
    """Recordings of a program without the runtime's own profiler and, if possible, with it."""

    plain: Timeline
    nodes: Timeline
    executed: tuple[ExecutedNode, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """Files that a recorded run leaves of the runtime's nodes."""

    directory: Path

    @property
    def prefix(self) -> Path:
        """Beginning of the name of ONNX Runtime's profile."""
        return self.directory / "nodes"

    @property
    def executed(self) -> Path:
        """Graph executed by ONNX Runtime."""
        return self.directory / "executed.onnx"

    @property
    def index(self) -> Path:
        """JSON with ``profile``, its path, and ``epoch_ns``, Unix time at its clock's zero; or ``error``."""
        return self.directory / "nodes.json"

    def join(self, plain: Timeline, record: Callable[[], Timeline]) -> Timelines:
        """Return the plain timeline and the timeline of ``record`` with kernels tied to nodes.

        If that fails, the plain timeline replaces the second, with a note.
        """
        try:
            recorded = record()
            index = json.loads(self.index.read_text(encoding="utf-8"))
            if "error" in index:
                raise UnavailableError(index["error"])
            profile = replace(read_json_trace(Path(index["profile"])), epoch_ns=index["epoch_ns"])
            return Timelines(plain, join_nodes(recorded, profile), read_executed(self.executed))
        except (GpuprofError, OSError, ValueError) as error:
            return Timelines(plain, replace(plain, notes=(*plain.notes, f"kernels are not tied to nodes: {error}")))


class UnreadError(UnavailableError):
    """A profiler ran, but its output is incomplete."""


@contextmanager
def describe_recording_errors() -> Iterator[None]:
    """Turn errors in reading a local recording into an error that does not blame the model or the command line."""
    try:
        yield
    except InputError as error:
        raise UnreadError(f"cannot read what was recorded: {error.message}", error.fix) from error


def join_recording(
    timelines: Timelines | None,
    counted: Counters | None,
    tools: Mapping[str, str],
    notes: tuple[str, ...],
    lost: tuple[str, ...] = (),
) -> Recording:
    """Return the recording of a program from timelines and counters; either may be missing."""
    notes = (*notes, *lost, *(counted.notes if counted else ()))
    if timelines is None:
        kernels = pd.DataFrame({"name": [], "repeat": []}) if counted is None else counted.kernels.assign(repeat=0)
        return Recording(kernels, (), tools, notes, lost=lost)
    nodes, plain = timelines.nodes, timelines.plain
    kernels, unmatched = (
        (nodes.kernels, ()) if counted is None else join_kernels(nodes.kernels, counted.kernels, counted.distinct)
    )
    plain_kernels = (
        plain.kernels if counted is None else join_kernels(plain.kernels, counted.kernels, counted.distinct)[0]
    )
    return Recording(
        kernels,
        tuple(nodes.gpus.values()),
        tools,
        (*nodes.notes, *notes, *unmatched),
        nodes,
        plain,
        plain_kernels,
        executed=timelines.executed,
        lost=lost,
    )
