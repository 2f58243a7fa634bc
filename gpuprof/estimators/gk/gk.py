"""USHER's GK-Estimator: a model's requirement from its kernels and their concurrency (OSDI'24, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.domain.model import ModelGraph
from gpuprof.domain.occupancy import cap_occupancy
from gpuprof.estimators.gk.kernel_table import Kernel, KernelTable
from gpuprof.estimators.learned.op_facts import facts_of_op
from gpuprof.estimators.memory.allocation import workspace_bytes
from gpuprof.estimators.memory.liveness import peak_activation_bytes

#: τ of the paper, 0.001 ms.
TAU_NS = 1000.0


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel of a model with its start."""

    op: int  #: Position in the graph.
    kernel: Kernel
    start_ns: float  #: Since the model's first kernel.

    @property
    def end_ns(self) -> float:
        """Time at which the kernel ends."""
        return self.start_ns + self.kernel.duration_ns


@dataclass(frozen=True, slots=True)
class ModelRequirement:
    """Latency, compute and memory requirement of a model."""

    latency_ms: float  #: All kernels in sequence, as runtimes launch them on one stream.
    parallel_ms: float  #: The longest chain, where branches run at once.
    #: ``max_occupancy_pct``, ``wavg_occupancy_pct``, ``wavg_sm_util_pct``: Creq by metric, as in `profile`: the largest
    #: sum over a set of concurrent kernels, at most 100; its average over the batch, gaps between kernels included
    #: where the host launches more slowly than the device runs; the same average of the SMs that their launches need.
    #: None where the kernels' counters or launches were not measured.
    max_occupancy_pct: float | None
    wavg_occupancy_pct: float | None
    wavg_sm_util_pct: float | None
    memory_bytes: int  #: Mreq: weights, the activations alive at once, and the largest workspace.
    unknown_ops: tuple[str, ...]  #: Op types without any kernel in the table, counted with no time.


def require(graph: ModelGraph, table: KernelTable, *, host_ms: float = 0.0) -> ModelRequirement:
    """Return the requirement of ``graph`` on the device of ``table``; ``host_ms``: launch time of all kernels."""
    launches, unknown = launch_times(graph, table)
    sets = concurrent_sets(launches)
    return ModelRequirement(
        latency_ms=sum(launch.kernel.duration_ns for launch in launches) / 1e6,
        parallel_ms=max((launch.end_ns for launch in launches), default=0.0) / 1e6,
        max_occupancy_pct=max((value for value, _ in _sums(sets, "occupancy_pct")), default=None),
        wavg_occupancy_pct=_average(_sums(sets, "occupancy_pct"), 1e6 * host_ms),
        wavg_sm_util_pct=_average(_sums(sets, "sm_util_pct"), 1e6 * host_ms),
        memory_bytes=memory_bytes(graph),
        unknown_ops=unknown,
    )


def launch_times(graph: ModelGraph, table: KernelTable) -> tuple[list[Launch], tuple[str, ...]]:
    """Return every kernel with its start, and the op types without kernels.

    The kernels of an op run one after another, the first from the end of the last kernel of all its producers.
    """
    before: dict[int, list[int]] = {}
    for producer, consumer in graph.edges():
        before.setdefault(consumer, []).append(producer)
    end = [0.0] * len(graph.ops)
    launches: list[Launch] = []
    unknown: set[str] = set()
    for position, op in enumerate(graph.ops):
        now = max((end[producer] for producer in before.get(position, ())), default=0.0)
        kernels = table.kernels_of(op.signature, facts_of_op(op, graph.batch))
        if kernels is None:
            unknown.add(op.op_type)
        for kernel in kernels or ():
            launches.append(Launch(position, kernel, now))
            now += kernel.duration_ns
        end[position] = now
    return launches, tuple(sorted(unknown))


def concurrent_sets(launches: Sequence[Launch], tau_ns: float = TAU_NS) -> list[tuple[Launch, ...]]:
    """Return the sets of kernels that may run at once: kernels that start at most τ after the first of their set.

    Kernels of an op depend on each other and are never in the same set.
    """
    sets: list[list[Launch]] = []
    for launch in sorted(launches, key=lambda event: (event.start_ns, event.op)):
        last = sets[-1] if sets else []
        if last and launch.start_ns - last[0].start_ns <= tau_ns and all(previous.op != launch.op for previous in last):
            last.append(launch)
        else:
            sets.append([launch])
    return [tuple(members) for members in sets]


def memory_bytes(graph: ModelGraph) -> int:
    """Return Mreq: weights, the largest size of live activations and the largest unfolded convolution input."""
    workspace = max((workspace_bytes(op) for op in graph.ops), default=0)
    return graph.weight_bytes + peak_activation_bytes(graph) + workspace


def _sums(sets: Sequence[Sequence[Launch]], metric: str) -> list[tuple[float, float]]:
    """Return for each set the sum of the metric, at most 100, and the set's duration; nothing with unknown values."""
    sums = []
    for members in sets:
        values = [getattr(launch.kernel, metric) for launch in members]
        if any(value is None for value in values):
            return []
        length = max(launch.end_ns for launch in members) - members[0].start_ns
        sums.append((float(cap_occupancy(sum(values))), length))
    return sums


def _average(sums: Sequence[tuple[float, float]], least_ns: float) -> float | None:
    total = max(sum(length for _, length in sums), least_ns if sums else 0.0)
    return sum(value * length for value, length in sums) / total if total > 0.0 else None
