"""The result of a policy: replicas in partitions on devices, and unplaced demands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.deployment import Unplaced
from gpuprof.domain.estimate import Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.rules.turns import held_shares

#: Relative tolerance of sums of shares and rates, and of HiGHS: thirds add up to a whole plus a rounding error.
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """A server of a model."""

    model: str
    batch: int
    processes: int
    share: Share  #: Share of all its processes together; its ``mig`` is the partition's.
    rate_rps: float  #: Planned part of the demand.
    max_wait_ms: float = 0.0  #: Maximum wait of a request for its batch to fill.
    memory_bytes: int | None = None  #: Memory of all its processes together; None where unknown.
    #: Assumed requirement in percent of the device, by ``creq_metric``; None for policies without requirements.
    creq: Figure | None = None
    creq_metric: str | None = None
    #: Replicas of a partition with equal numbers above 0 share one share and take turns in it.
    turns: int = 0

    @property
    def workload(self) -> Workload:
        """The replica as an estimator's workload."""
        return Workload(self.model, self.batch, self.share, self.processes, self.turns)


@dataclass(frozen=True, slots=True)
class PlacedPartition:
    """A MIG instance (``mig`` and its first memory slice) or, with both None, the whole device.

    An ``unshared`` partition enforces no shares: every replica has the whole partition. In an ``oversubscribed`` one
    the shares, ceilings by MPS, may add up to more than 100%.
    """

    replicas: tuple[PlacedReplica, ...]
    mig: str | None = None
    start: int | None = None
    unshared: bool = False
    oversubscribed: bool = False

    def beside(self, replica: PlacedReplica) -> tuple[Workload, ...]:
        """Return the other workloads in the partition; different instances do not disturb each other."""
        # A policy may place one object several times: the others of it are neighbours.
        position = next((index for index, placed in enumerate(self.replicas) if placed is replica), None)
        return tuple(placed.workload for index, placed in enumerate(self.replicas) if index != position)

    @property
    def taken_pct(self) -> float:
        """Percent of the partition assigned to shares; a share used in turns is counted once."""
        return math.fsum(held_shares((replica.share.sm_pct, replica.turns) for replica in self.replicas))


@dataclass(frozen=True, slots=True)
class PlacedGpu:
    """A device and its partitions."""

    device: str
    partitions: tuple[PlacedPartition, ...]

    def replicas(self) -> Iterator[PlacedReplica]:
        """Yield the replicas on this device."""
        for partition in self.partitions:
            yield from partition.replicas


@dataclass(frozen=True, slots=True)
class Placement:
    """The result of a policy."""

    policy: str
    gpus: tuple[PlacedGpu, ...]  #: Nonempty devices only.
    unplaced: tuple[Unplaced, ...] = ()  #: Every unserved demand, or part of a demand, with the reason.
    #: Lower bound on the devices of every placement that meets as much of the demands; None without a proof.
    lower_bound_gpus: int | None = None
    lower_bound_cost_per_hour: float | None = None  #: The same for the cost.
    #: Upper bound on the requests per second within the SLOs of every placement on a fixed fleet; None without a proof.
    upper_bound_goodput_rps: float | None = None
    found_by: str | None = None  #: Method that found this placement, for policies with several.
    stopped: bool = False  #: True if a time limit ended the search.

    def rate_rps(self, model: str) -> float:
        """Return the total planned rate of the replicas of ``model``."""
        return self.rates_rps().get(model, 0.0)

    def rates_rps(self) -> dict[str, float]:
        """Return the planned rate of each model with a replica."""
        rates: dict[str, float] = {}
        for gpu in self.gpus:
            for replica in gpu.replicas():
                rates[replica.model] = rates.get(replica.model, 0.0) + replica.rate_rps
        return rates


def map_replicas(
    gpus: Sequence[PlacedGpu], change: Callable[[PlacedGpu, PlacedPartition, PlacedReplica], PlacedReplica]
) -> tuple[PlacedGpu, ...]:
    """Return the devices with each replica changed; replicas without a rate and empty devices are dropped."""
    changed = []
    for gpu in gpus:
        partitions = []
        for partition in gpu.partitions:
            replicas = [change(gpu, partition, replica) for replica in partition.replicas]
            used = tuple(replica for replica in replicas if replica.rate_rps > 0.0)
            partitions += [replace(partition, replicas=used)] if used else []
        if partitions:
            changed.append(replace(gpu, partitions=tuple(partitions)))
    return tuple(changed)
