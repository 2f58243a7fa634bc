"""The placement problem: demands, devices, estimator and queueing model, with the cached estimates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuprof.domain.demand import Demand
from gpuprof.domain.deployment import Chain, DeploymentMap, ModelFile, PlannedWith
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import NOTHING_TRIED, Estimate, Estimator, TriedRuns
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.host_work import NO_HOST_WORK, HostWork
from gpuprof.domain.sojourn import QueueModel
from gpuprof.errors import InputError
from gpuprof.placement.evidence import Evidence
from gpuprof.placement.rate_limit import RateLimits

if TYPE_CHECKING:
    from gpuprof.placement.placement import Placement

#: Confidence of a plan on the means of all estimates.
MEANS = 0.0
#: A query: the device's name, the workload and its neighbours, in order.
Question = tuple[object, ...]
#: Device, model, share, processes, neighbours and planning confidence.
Series = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """Options that every policy obeys."""

    #: Plan on the upper end of the interval holding the true time with this probability, 0: on the mean. None: on
    #: the mean of measured and interpolated figures, at the upper ends of all other estimates.
    confidence: float | None = None
    #: None: the demand's percentile of the whole time in the replica (batch building, queueing, service) must keep its
    #: SLO. A fraction: the papers' rule, where a batch must take less than this fraction of the SLO and the replicas'
    #: throughput must cover the rate (ParvaGPU, iGniter and USHER use one half).
    latency_budget: float | None = None
    max_batch: int = 256  #: Largest batch of a replica.
    #: Maximum processes of a replica; None: three within a MIG instance (as in ParvaGPU), one elsewhere.
    max_processes: int | None = None
    overhead_ms: float = 0.0  #: Time of every request outside the replica.
    host: HostWork = NO_HOST_WORK  #: Work of the host for serving, beside the batches.
    gpus_per_node: int = 8  #: Devices per machine of an elastic fleet.
    isolate: bool = False  #: True if every replica has a process and a share of its own: no shared workers.
    no_mig: bool = False  #: True if GPUs cannot be divided into MIG instances.
    no_mps: bool = False  #: True if GPUs and MIG instances cannot be divided by MPS.
    #: Time slice with which models that share a worker run at once; None: they run by turns.
    time_slice_ms: float | None = None
    time_limit_s: float | None = None  #: Time limit of searching policies, which then return the incumbent.
    seed: int = 0
    #: True if a policy explains unplaced demands, which may take longer than the map: where a map is chosen among
    #: several, only its reasons are needed.
    explains: bool = True

    def __post_init__(self) -> None:
        if self.confidence is not None and not 0.0 <= self.confidence < 1.0:
            raise InputError(f"confidence must be at least 0 and below 1 but got {self.confidence:g}")
        if self.latency_budget is not None and not 0.0 < self.latency_budget <= 1.0:
            raise InputError(f"latency budget must be above 0 and at most 1 but got {self.latency_budget:g}")
        _require("time limit", self.time_limit_s, 0.0, 1e9)
        _require("time slice", self.time_slice_ms, 0.01, 1e9)
        for name, value in (("max batch", self.max_batch), ("max processes", self.max_processes)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1 but got {value}")
        if not 0.0 <= self.overhead_ms < 1e9:
            raise InputError(f"overhead must be at least 0 ms but got {self.overhead_ms:g}")


@dataclass(slots=True)
class AnswersOfOne:
    """Cached answers of one estimator."""

    estimator: Estimator  #: Kept, so that its id stays unique.
    estimates: dict[Question, Estimate] = field(default_factory=dict)  #: Estimates by query.
    #: Refusals by query.
    refusals: dict[Question, InputError] = field(default_factory=dict)
    #: Planned times of 1, 2, … requests, as far as computed.
    times_ms: dict[Series, list[float]] = field(default_factory=dict)
    #: Reasons why a kind of device serves none of a demand (None where it does), by the demand, the device's name and
    #: the planning settings; the queueing model is kept beside the reason.
    reasons: dict[tuple[object, ...], tuple[object, str | None]] = field(default_factory=dict)


@dataclass(slots=True)
class KnownAnswers:
    """Answers by estimator; a single object serves every policy on the same problem."""

    _of: dict[int, AnswersOfOne] = field(default_factory=dict)

    def of(self, estimator: Estimator) -> AnswersOfOne:
        """Return the cached answers of this estimator object, to be extended."""
        return self._of.setdefault(id(estimator), AnswersOfOne(estimator))


@dataclass(frozen=True, slots=True)
class Problem:
    """Demands to be placed on a fleet."""

    demands: tuple[Demand, ...]  #: Each model once.
    fleet: Fleet
    estimator: Estimator  #: Time of a batch; its ``beside`` gives the interference.
    queueing: QueueModel  #: Time in a replica beyond that.
    options: Options = field(default_factory=Options)
    files: Mapping[str, ModelFile] = field(default_factory=dict)  #: File entries of the map, by model.
    #: Chains of models, whose steps are demands with their parts of the chain's SLO.
    chains: Mapping[str, Chain] = field(default_factory=dict)
    planned_with: PlannedWith = field(default_factory=PlannedWith)  #: Hashes and settings the map records.
    #: The running map: among equally good maps, the map with the fewest moved replicas is preferred.
    previous: DeploymentMap | None = None
    #: Recorded failures of the database; estimators refuse them, and the feasibility check verifies this.
    tried: TriedRuns = NOTHING_TRIED
    #: Cached results of queues; problems derived from this one share it.
    limits: RateLimits = field(default_factory=RateLimits, repr=False, compare=False)
    #: Cached estimates, shared by every policy on this problem or a derived one.
    answers: KnownAnswers = field(default_factory=KnownAnswers, repr=False, compare=False)
    #: Equivalent demands (`gpuprof.placement.planned_workloads.find_alike`), by the demands and their estimator and
    #: queueing model, which are kept beside the result; shared in the same way.
    alike: dict[object, tuple[object, Mapping[str, str]]] = field(default_factory=dict, repr=False, compare=False)
    #: Called with each better map of a search and with each better bound.
    on_progress: Callable[[Placement], None] | None = field(default=None, repr=False, compare=False)
    _by_model: dict[str, Demand] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.demands:
            raise InputError("there are no demands to place", "name at least one model with its rate and SLO")
        if not self.fleet.entries:
            raise InputError("there are no devices to place on", "name at least one")
        object.__setattr__(self, "_by_model", {demand.model: demand for demand in self.demands})
        if len(self._by_model) < len(self.demands):
            duplicate = Counter(demand.model for demand in self.demands).most_common(1)[0][0]
            raise InputError(f"{duplicate!r} is asked for twice", "add the rates up, or name the models apart")

    def device(self, name: str) -> Device:
        """Return the device of the fleet called ``name``."""
        return self.entry(name).device

    def entry(self, name: str) -> FleetEntry:
        """Return the fleet's entry for the device called ``name``.

        Raises `InputError` when the fleet has no such device.
        """
        for entry in self.fleet.entries:
            if entry.device.name == name:
                return entry
        raise InputError(f"the fleet has no {name}", f"it has {', '.join(e.device.name for e in self.fleet.entries)}")

    def demand(self, model: str) -> Demand:
        """Return the demand for ``model``."""
        return self._by_model[model]

    def mig_entry(self, policy: str) -> FleetEntry:
        """Return the fleet's first entry with MIG, the only kind of device that ``policy`` uses.

        Raises `InputError` when no device of the fleet has MIG.
        """
        for entry in self.fleet.entries:
            if entry.device.mig_profiles:
                return entry
        names = ", ".join(entry.device.name for entry in self.fleet.entries)
        raise InputError(
            f"{policy} needs a device with MIG but the fleet has {names}", "name one, as in --gpus a100-80"
        )

    def by_priority(self) -> Sequence[Demand]:
        """Return the demands, highest priority first, else in the order given."""
        return sorted(self.demands, key=lambda demand: -demand.priority)


def collect_evidence(problem: Problem) -> Evidence:
    """Return the evidence for checking a map of ``problem``."""
    return Evidence(
        devices={entry.device.name: entry.device for entry in problem.fleet.entries},
        queueing=problem.queueing,
        estimator=problem.estimator,
        confidence=problem.options.confidence,
        latency_budget=problem.options.latency_budget,
        overhead_ms=problem.options.overhead_ms,
        host=problem.options.host,
        counts={entry.device.name: entry.count for entry in problem.fleet.entries},
        tried=problem.tried,
    )


def _require(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low < value < high:
        raise InputError(f"{name} must be above {low:g} and below {high:g} but got {value:g}")
