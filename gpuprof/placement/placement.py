"""What a policy decides: replicas in partitions on devices, and what found no place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuprof.domain.deployment import Unplaced
from gpuprof.domain.estimate import Figure, Workload
from gpuprof.domain.share import Share


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """One server of a model.

    Attributes
    ----------
    model : str
    batch, processes : int
    share : Share
        Of all its processes together; its ``mig`` is that of the partition.
    rate_rps : float
        The part of the demand that it is planned to serve.
    max_wait_ms : float
        How long a request waits for its batch to fill.
    memory_bytes : int or None
        Of all its processes together; None where nothing is known of it.
    creq : Figure or None
        What it was taken to require of the device in percent, by ``creq_metric``; None where no policy asked for it.
    creq_metric : str or None
    """

    model: str
    batch: int
    processes: int
    share: Share
    rate_rps: float
    max_wait_ms: float = 0.0
    memory_bytes: int | None = None
    creq: Figure | None = None
    creq_metric: str | None = None

    @property
    def workload(self) -> Workload:
        """What runs, in the words of an estimator."""
        return Workload(self.model, self.batch, self.share, self.processes)


@dataclass(frozen=True, slots=True)
class PlacedPartition:
    """A MIG instance (``mig`` and the memory slice it starts at) or, with both None, the whole device.

    Where it is ``unshared`` nobody is held to a share: every replica's is the whole partition.
    """

    replicas: tuple[PlacedReplica, ...]
    mig: str | None = None
    start: int | None = None
    unshared: bool = False

    def beside(self, replica: PlacedReplica) -> tuple[Workload, ...]:
        """Return what runs in this partition besides ``replica``; instances do not disturb one another."""
        return tuple(other.workload for other in self.replicas if other is not replica)


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
    """The answer of a policy.

    Attributes
    ----------
    policy : str
    gpus : tuple of PlacedGpu
        Only devices that hold something.
    unplaced : tuple of Unplaced
        Every demand, or part of one, that is not served, with the reason.
    lower_bound_gpus : int or None
        No placement that meets as much of the demands has fewer devices; None where the policy proves nothing.
    lower_bound_cost_per_hour : float or None
        Likewise for the cost.
    upper_bound_goodput_rps : float or None
        No placement on a fixed fleet serves more requests per second within the SLOs; None where nothing is proven.
    found_by : str or None
        How a policy that tries several ways came to this placement.
    stopped : bool
        Whether a time limit ended the search.
    """

    policy: str
    gpus: tuple[PlacedGpu, ...]
    unplaced: tuple[Unplaced, ...] = ()
    lower_bound_gpus: int | None = None
    lower_bound_cost_per_hour: float | None = None
    upper_bound_goodput_rps: float | None = None
    found_by: str | None = None
    stopped: bool = False

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
