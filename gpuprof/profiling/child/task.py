"""Tasks of child processes, and their encoding as a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuprof.profiling.child.job import TimingLimits
from gpuprof.rules.cpu_slices import CpuSlice

_WARM_UP_S = 0.3  # unless the task says more: a GPU's clocks take a second to rise


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Duration of repeated runs: ``time_s`` seconds, within these limits on the number of runs."""

    time_s: float
    min_repeats: int
    max_repeats: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildTask:
    """Fields common to all tasks."""

    provider: str  #: Execution provider.
    threads: int = 1  #: Intra-op threads of its session.
    part: CpuSlice | None = None  #: Share enforced on the process; None: bound by other means, or unlimited.
    group: str = ""  #: Control group of all processes of that share.


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTask(ChildTask):
    """Load a model; with ``batches`` test whether batch items are computed independently."""

    model: Path
    batches: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTask(ChildTask):
    """Time batches of the arrays in ``inputs``, back to back."""

    model: Path
    inputs: Path
    limits: TimingLimits
    leads: bool  #: The process ends by ``limits``; otherwise it runs until a stop message.
    beside_others: bool  #: Other processes run at the same time.
    warm_up_s: float = _WARM_UP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesTask(ChildTask):
    """Run under the runtime's own profiler, and write the executed graph.

    With ``compare``, report differences between the outputs with and without the share.
    """

    model: Path
    inputs: Path
    profile_prefix: str
    optimized: Path
    compare: bool
    effort: Effort


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsTask(ChildTask):
    """Run each `OpFiles` that follows, under the runtime's own profiler."""

    effort: Effort


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsTask(ChildTask):
    """Run each `OpFiles` that follows, under torch.profiler, each time in a range of the name ``range``."""

    effort: Effort
    range: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFiles:
    """A single-op model, and its inputs."""

    model: Path
    inputs: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTask(ChildTask):
    """Time a model whose inputs and outputs are bound once: for ceilings, not for latencies.

    ``cases`` holds lists of input shapes; the first shape of each list is also the output's.
    """

    model: Path
    cases: Sequence[Sequence[Sequence[int]]]
    effort: Effort


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTask(ChildTask):
    """Run a model a few times for a profiler; see `gpuprof.profiling.gpu.recorded_run`."""

    model: Path
    inputs: Path
    warm_up: int
    repeats: int
    #: ``kineto``, ``kineto_nodes``: Trace files of torch.profiler, for the plain runs and for the runs with ``nodes``;
    #: None: another program records.
    kineto: Path | None = None
    kineto_nodes: Path | None = None
    nodes: Path | None = None  #: Directory for ONNX Runtime's own profile; None: no profile.
    only_nodes: bool = False  #: Leave out the plain runs.
    outputs: Path | None = None  #: File for the outputs, unless they differ from run to run.


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTasks:
    """Tasks for timing and recording a batch size; ``recorded`` None: no recording."""

    timed: LatencyTask
    recorded: RecordedTask | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesTask(ChildTask):
    """Time all batch sizes, then record all; see `gpuprof.profiling.gpu.batch_process`."""

    rows: Sequence[BatchTasks]


def write_task(task: ChildTask | OpFiles) -> str:
    """Return a task as a line of JSON."""
    return json.dumps({"kind": type(task).__name__, **asdict(task)}, default=str)


def read_task(line: str | bytes) -> Any:
    """Return the task that `write_task` wrote."""
    content = json.loads(line)
    return _build(_KINDS[content.pop("kind")], content)


_KINDS: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (CheckTask, LatencyTask, NodesTask, OpsTask, KernelsTask, OpFiles, PeakTask, RecordedTask, BatchesTask)
}


def _build(kind: type, content: Mapping[str, Any]) -> Any:
    return kind(
        **{name: _READERS[name](value) if name in _READERS and value else value for name, value in content.items()}
    )


_READERS: Mapping[str, Callable[[Any], object]] = {
    **dict.fromkeys(("model", "inputs", "optimized", "kineto", "kineto_nodes", "nodes", "outputs"), Path),
    "part": lambda part: CpuSlice(tuple(part["cores"]), part["quota_cores"]),
    "limits": lambda limits: TimingLimits(**limits),
    "effort": lambda effort: Effort(**effort),
    "timed": lambda timed: _build(LatencyTask, timed),
    "recorded": lambda recorded: _build(RecordedTask, recorded),
    "rows": lambda rows: tuple(_build(BatchTasks, row) for row in rows),
}
