"""The mixed integer program of Elvinger's thesis (ETH 2024, §5.4.3), its heterogeneous extension, and requirements.

USHER's requirements of a model at a batch size are compute (Creq) and memory (Mreq).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gpuprof.domain.demand import Demand
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Figure, Workload
from gpuprof.domain.occupancy import cap_occupancy
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.bin import Bin
from gpuprof.placement.placement import TOLERANCE, PlacedReplica, Placement
from gpuprof.placement.problem import Problem
from gpuprof.placement.program import EXACT, Program, Solution
from gpuprof.placement.search_space import SHARE_STEP
from gpuprof.placement.segment import Segment, Segments
from gpuprof.placement.unplaced_reasons import with_unplaced

CreqMetric = Literal["max-occupancy", "wao", "wsm"]

_METRICS = {"max-occupancy": "max_occupancy", "wao": "wavg_occupancy", "wsm": "wavg_sm_util"}


@dataclass(frozen=True, slots=True)
class Milp:
    """Elvinger's MILP: maximises Σ min(rate, goodput) over placements of (model, batch) on the GPUs of a fixed fleet.

    Constraints: one batch size per model, at most one replica of a model on a GPU, ΣCreq and ΣMreq at most 100% on each
    GPU, at most ``max_replicas`` replicas. With several kinds of devices, goodput, Creq and Mreq have the device as a
    third index. The thesis leaves the choice among equally good solutions open: here the solution of least ΣCreq +
    ΣMreq. Also decided here: as for `usher`, goodput is the largest rate within the problem's latency rule, and a
    replica that would break an SLO beside the others goes, with its batch, to the first other GPU where no SLO breaks,
    if any.
    """

    creq: CreqMetric = "max-occupancy"  #: Metric behind Creq (thesis §5.3).
    #: True if replicas have no MPS shares, as in the thesis (§6.1.3), each free to use all SMs of its GPU. By default
    #: each gets a share of Creq, as in `usher`.
    unshared: bool = False

    def place(self, problem: Problem) -> Placement:
        """Return the placement.

        Raises `InputError` when the fleet is elastic, or no model has a compute requirement by the metric.
        """
        if self.unshared:
            require_gpus("milp", problem)
        if any(entry.count is None for entry in problem.fleet.entries):
            raise InputError("milp maximises the goodput of a fixed fleet", "say how many, as in --gpus v100:4")
        segments = Segments(problem, capped=False)
        requirements_by_model: dict[str, dict[str, Mapping[int, Requirement]]] = {}
        has_metric = False
        for demand in problem.by_priority():
            for entry in problem.fleet.entries:
                by_batch, mean = requirements(segments, demand, entry.device, self.creq, self.unshared)
                requirements_by_model.setdefault(demand.model, {})[entry.device.name] = by_batch
                has_metric = has_metric or mean is not None
        require_metric(has_metric, self.creq)
        program = _ThesisProgram(problem, requirements_by_model)
        bins = [Bin(problem.device(name), unshared=self.unshared) for name in program.gpus]
        return with_unplaced(problem, segments, _put_replicas(bins, segments, program.solve(), program))


@dataclass(slots=True)
class _ThesisProgram:
    """Builds the program: x[m,b,g] binary, y[m,b] binary, w[m] real."""

    problem: Problem
    known: _Known
    program: Program = field(default_factory=Program)
    gpus: list[str] = field(default_factory=list)
    # demand, requirement, GPU, column of x
    placed: list[tuple[Demand, Requirement, int, int]] = field(default_factory=list)
    _served: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gpus = [e.device.name for e in self.problem.fleet.entries for _ in range(e.count or 0)]
        compute = [self.program.row(high=100.0) for _ in self.gpus]
        memory = [self.program.row(high=100.0) for _ in self.gpus]
        for demand in self.problem.by_priority():
            self._add_model(demand, compute, memory)

    def _add_model(self, demand: Demand, compute: Sequence[int], memory: Sequence[int]) -> None:
        program = self.program
        goodput = program.row(low=0.0)  # w_m <= Σ goodput · x
        self._served.append(program.column(-1.0, {goodput: -1.0}, demand.rate_rps, integer=False))
        one_batch = program.row(high=1.0)
        gpu_rows = [program.row(high=1.0) for _ in self.gpus]
        replicas = program.row(high=demand.max_replicas or len(self.gpus))
        by_device = self.known[demand.model]
        for batch in sorted({batch for by_batch in by_device.values() for batch in by_batch}):
            column = program.column(0.0, {one_batch: 1.0}, 1.0)
            for gpu, device in enumerate(self.gpus):
                requirement = by_device[device].get(batch)
                if requirement is None:
                    continue
                active = program.row(high=0.0)  # x <= y
                program.add(column, active, -1.0)
                entries = {
                    goodput: requirement.segment.capacity_rps,
                    active: 1.0,
                    compute[gpu]: requirement.creq_pct,
                    memory[gpu]: requirement.mreq_pct,
                    gpu_rows[gpu]: 1.0,
                    replicas: 1.0,
                }
                self.placed.append((demand, requirement, gpu, program.column(0.0, entries, 1.0)))

    def solve(self) -> Solution | None:
        """Return the solution of most goodput, and among those the solution of least requirements."""
        options = self.problem.options
        best = self.program.solve(time_limit_s=options.time_limit_s, seed=options.seed)
        if best is None:
            return None
        # Lexicographic: the goodput is held, up to the solver's tolerance, while the requirements are minimised.
        row = self.program.row(low=-best.objective * (1.0 - EXACT))
        for column in self._served:
            self.program.add(column, row, 1.0)
        self.program.recost({column: requirement.total_pct for _, requirement, _, column in self.placed})
        return self.program.solve(time_limit_s=options.time_limit_s, seed=options.seed) or best


def _put_replicas(
    bins: Sequence[Bin], segments: Segments, solution: Solution | None, program: _ThesisProgram
) -> Placement:
    placed = [] if solution is None else [item for item in program.placed if solution.values[item[3]] > 0.5]
    capacity: dict[str, float] = {}
    for demand, requirement, _, _ in placed:
        capacity[demand.model] = capacity.get(demand.model, 0.0) + requirement.segment.capacity_rps
    rejections = []
    for demand, requirement, gpu, _ in placed:
        rate_rps = requirement.segment.capacity_rps * min(1.0, demand.rate_rps / capacity[demand.model])
        if not bins[gpu].add(requirement.replica(rate_rps), segments):
            rejections.append((demand.model, requirement.segment.batch, rate_rps))
    for model, batch, rate_rps in rejections:
        _put_elsewhere(bins, segments, program.known[model], model, batch, rate_rps)
    return Placement("milp", tuple(gpu_bin.to_gpu() for gpu_bin in bins if not gpu_bin.is_empty))


def _put_elsewhere(
    bins: Sequence[Bin],
    segments: Segments,
    requirements_by_model: Mapping[str, Mapping[int, Requirement]],
    model: str,
    batch: int,
    rate_rps: float,
) -> None:
    """Put a replica on the first GPU without its model where all SLOs hold, if any."""
    for gpu_bin in bins:
        requirement = requirements_by_model[gpu_bin.device.name].get(batch)
        if requirement is None or any(replica.model == model for replica in gpu_bin.to_gpu().replicas()):
            continue
        if gpu_bin.add(requirement.replica(min(rate_rps, requirement.segment.capacity_rps)), segments):
            return


@dataclass(frozen=True, slots=True)
class Requirement:
    """A replica by its requirements."""

    #: Under a share of Creq percent, as given by USHER (thesis §5.2.2), or without a share; its capacity is the
    #: goodput.
    segment: Segment
    #: ``creq_pct``, ``mreq_pct``: Percent of the device.
    creq_pct: float
    mreq_pct: float
    figure: Figure | None = None  #: Measured or predicted Creq, with its interval.
    metric: str | None = None  #: Metric of Creq, by its name in estimates.

    def replica(self, rate_rps: float) -> PlacedReplica:
        """Return the replica serving ``rate_rps``, with its assumed requirement."""
        return replace(self.segment.replica(rate_rps), creq=self.figure, creq_metric=self.metric)

    @property
    def total_pct(self) -> float:
        """Rreq = Creq + Mreq."""
        return self.creq_pct + self.mreq_pct


#: Requirements by model, device and batch.
_Known = Mapping[str, Mapping[str, Mapping[int, Requirement]]]


def requirements(
    segments: Segments, demand: Demand, device: Device, metric: CreqMetric, unshared: bool = False
) -> tuple[dict[int, Requirement], tuple[float, float] | None]:
    """Return the requirement at each batch meeting the SLO, and the mean (Creq, Mreq) over all batches.

    With ``unshared`` a replica may use the whole device, and is not limited to its requirement. Raises `InputError`
    when ``metric`` is known at no batch.
    """
    by_batch: dict[int, Requirement] = {}
    pairs: list[tuple[float, float]] = []
    full = Share()
    for batch in segments.search_space.listed_batches(demand.model, device, full):
        try:
            estimate = segments.estimate(device, Workload(demand.model, batch, full))
        except InputError:
            continue
        creq = estimate.creq(_METRICS[metric])
        if creq is None or creq.value <= 0.0:
            continue
        required = _required_pct(creq)
        mreq = 100.0 * (segments.memory_bytes(estimate) or 0) / device.dram_bytes
        if mreq > 100.0 and pairs:
            break  # USHER stops at the batch that exceeds the memory (§3.3.1)
        pairs.append((required, mreq))
        segment = segments.make(demand, device, Workload(demand.model, batch, full if unshared else Share(required)))
        if segment is not None:
            by_batch[batch] = Requirement(segment, required, mreq, creq, _METRICS[metric])
    if not pairs:
        return {}, None
    return by_batch, (sum(c for c, _ in pairs) / len(pairs), sum(m for _, m in pairs) / len(pairs))


def _required_pct(creq: Figure) -> float:
    """Return the percentage to plan with: profiled values unchanged, predicted values rounded up to steps of shares."""
    value = float(cap_occupancy(creq.value))
    if creq.is_observed:
        return value
    return min(100.0, SHARE_STEP * math.ceil(value / SHARE_STEP - TOLERANCE))


def require_gpus(policy: str, problem: Problem) -> None:
    """Raise when a device of the fleet cannot be left unshared: on a CPU, shares are cores.

    Raises `InputError` naming the device.
    """
    for entry in problem.fleet.entries:
        if entry.device.kind != "gpu":
            raise InputError(
                f"{policy} cannot leave {entry.device.name} unshared: its replicas are held to cores",
                "leave out -O unshared, or name a GPU",
            )


def require_metric(is_known: bool, metric: CreqMetric) -> None:
    """Raise when no model has a known compute requirement.

    Raises `InputError` naming the required profiling.
    """
    if not is_known:
        raise InputError(
            f"no model of the demands has a compute requirement by {metric}",
            "profile them with a collector that measures it, give their ONNX files, or choose another policy",
        )
