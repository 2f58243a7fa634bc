"""The result of a policy: replicas in partitions on devices, and unplaced demands."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gpuprof.domain.deployment import Unplaced
from gpuprof.domain.estimate import Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.rules.turns import held_shares


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """One server of a model."""

    model: str
    batch: int
    processes: int
    share: Share  #: Of all its processes together; its ``mig`` is that of the partition.
    rate_rps: float  #: The part of the demand that it is planned to serve.
    max_wait_ms: float = 0.0  #: How long a request waits for its batch to fill.
    memory_bytes: int | None = None  #: Of all its processes together; None where nothing is known of it.
    #: What it was taken to require of the device in percent, by ``creq_metric``; None where no policy asked for it.
    creq: Figure | None = None
    creq_metric: str | None = None
    #: Replicas of a partition with one number above 0 have one share together and take turns in it.
    turns: int = 0

    @property
    def workload(self) -> Workload:
        """What runs, in the words of an estimator."""
        return Workload(self.model, self.batch, self.share, self.processes, self.turns)


@dataclass(frozen=True, slots=True)
class PlacedPartition:
    """A MIG instance (``mig`` and the memory slice it starts at) or, with both None, the whole device.

    Where it is ``unshared`` no share is enforced: every replica's is the whole partition.
    """

    replicas: tuple[PlacedReplica, ...]
    mig: str | None = None
    start: int | None = None
    unshared: bool = False

    def beside(self, replica: PlacedReplica) -> tuple[Workload, ...]:
        """Return what runs in this partition besides ``replica``; instances do not disturb one another."""
        return tuple(other.workload for other in self.replicas if other is not replica)

    @property
    def taken_pct(self) -> float:
        """Percent of the partition that belongs to some share; those who take turns in one have it together."""
        return math.fsum(held_shares((one.share.sm_pct, one.turns) for one in self.replicas))


@dataclass(frozen=True, slots=True)
class PlacedGpu:
    """One device and what stands on it."""

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
    gpus: tuple[PlacedGpu, ...]  #: Only devices that hold something.
    unplaced: tuple[Unplaced, ...] = ()  #: Every demand, or part of one, that is not served, with the reason.
    #: No placement that meets as much of the demands has fewer devices; None where the policy proves nothing.
    lower_bound_gpus: int | None = None
    lower_bound_cost_per_hour: float | None = None  #: Likewise for the cost.
    #: No placement on a fixed fleet serves more requests per second within the SLOs; None where nothing is proven.
    upper_bound_goodput_rps: float | None = None
    found_by: str | None = None  #: How a policy that tries several ways came to this placement.
    stopped: bool = False  #: Whether a time limit ended the search.
    unfinished: tuple[str, ...] = ()  #: Quick policies that it ended, whose maps may be better.

    def rate_rps(self, model: str) -> float:
        """Return the rate that the replicas of ``model`` are planned for together."""
        return self.rates_rps().get(model, 0.0)

    def rates_rps(self) -> dict[str, float]:
        """Return the rate that is planned for each model that has a replica."""
        rates: dict[str, float] = {}
        for gpu in self.gpus:
            for replica in gpu.replicas():
                rates[replica.model] = rates.get(replica.model, 0.0) + replica.rate_rps
        return rates
