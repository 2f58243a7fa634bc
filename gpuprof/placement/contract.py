"""The contract of policies, as tests a plug-in's test suite subclasses.

    class TestMyPolicy(PolicyContract):
        def policy(self) -> Policy:
            return MyPolicy()

The models of latency in here are simple enough to be worked out by hand; nothing in them is measured.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.device import Device, MigProfile
from gpuprof.domain.estimate import MEASURED, Estimate, Figure, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.number_format import GIB
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer, PoolSojourn, Sojourn, balance_stream, split_stream
from gpuprof.errors import InputError
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import Evidence, check
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Options, Problem, collect_evidence


@dataclass(frozen=True, slots=True)
class LinearEstimator:
    """A batch of n under a fraction f of the device takes (start + n · each) / f milliseconds."""

    start_ms: float = 2.0
    each_ms: float = 1.0
    memory_bytes: int = GIB  #: Memory of a process, at any batch.
    slowdown: float = 0.0  #: Factor added for every neighbour.
    models: tuple[str, ...] = ()  #: Empty: all models are known.
    #: ``sizes``, ``percents``: known batch sizes and shares; on a device with MIG also every profile.
    sizes: tuple[int, ...] = (1, 2, 4, 8)
    percents: tuple[float, ...] = (25.0, 50.0, 100.0)
    interval: float = 0.1  #: Half width of the 90% interval, relative.
    source: str = MEASURED  #: Source of times and memory.

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time of the formula; several processes take turns."""
        if self.models and model not in self.models:
            raise InputError(f"unknown model {model!r}")
        isolated_ms = (self.start_ms + batch * self.each_ms) / device.fraction(share) * processes
        time = isolated_ms * (1.0 + self.slowdown * len(beside))
        return Estimate(
            workload=Workload(model, batch, share, processes),
            device=device.name,
            latency_ms=Figure(time, self.source, time * (1 - self.interval), time * (1 + self.interval)),
            memory_bytes=Figure(float(self.memory_bytes), self.source),
            creq_pct=(("max_occupancy", Figure(min(100.0, 12.0 * batch), MEASURED)),),
        )

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the known batch sizes."""
        return self.sizes

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the percentages, and the MIG profiles of the device."""
        mig = [Share(100.0, profile.name) for profile in device.mig_profiles]
        return tuple(sorted([*mig, *map(Share, self.percents)], key=lambda share: (device.fraction(share), str(share))))


@dataclass(frozen=True, slots=True)
class ExponentialQueue:
    """A request takes the time of a batch, and waits for an exponential time that grows as M/M/1's does."""

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        """Return mean wait = utilization / (1 − utilization) × time of a batch."""
        load = arrivals.rate_rps / server.capacity_rps
        service = server.latency_ms[0] + (server.latency_ms[-1] - server.latency_ms[0]) * min(1.0, load)
        service += server.max_wait_ms + server.overhead_ms
        if load >= 1.0:
            return Sojourn(load, float(server.batch), math.inf, ((0.0, math.inf), (0.9999, math.inf)))
        mean_wait = service * load / (1.0 - load)
        at = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9999, 0.99999)
        quantiles = tuple((p, service - mean_wait * math.log(1.0 - p)) for p in at)
        return Sojourn(load, 1.0 + (server.batch - 1) * load, service + mean_wait, quantiles)

    def pool(self, arrivals: Arrivals, servers: Sequence[BatchServer], *, coarse: bool = False) -> PoolSojourn:
        """Return the times in separate streams that are equally late; routing brings no further gain in this model."""
        capacity = sum(server.capacity_rps for server in servers)
        if len(set(servers)) == 1 or arrivals.rate_rps >= capacity:
            return split_stream(self, arrivals, servers)
        return balance_stream(self, arrivals, servers, _exponential_rps)


@lru_cache(maxsize=100_000)
def _exponential_rps(server: BatchServer, limit_ms: float) -> float:
    """Return the rate at which the 99th percentile of an `ExponentialQueue` reaches a time."""
    least, growth = server.latency_ms[0], server.latency_ms[-1] - server.latency_ms[0]
    fixed_ms, low, high = server.max_wait_ms + server.overhead_ms, 0.0, 1.0
    for _ in range(40):
        load = (low + high) / 2.0
        tail = (least + growth * load + fixed_ms) * (1.0 + load / (1.0 - load) * math.log(100.0))
        low, high = (load, high) if tail <= limit_ms else (low, load)
    return low * server.capacity_rps


def plain_device(name: str = "plain", price: float | None = 1.0) -> Device:
    """Return a device of 100 compute units and 16 GiB without MIG."""
    return Device(name, "gpu", 100, 1000.0, {"float32": 1e12}, 16 * GIB, 1e11, 2**20, price_per_hour=price)


def sliced_device(name: str = "sliced", price: float | None = 4.0) -> Device:
    """Return a device with the MIG geometry of an A100 (NVIDIA's MIG user guide)."""
    geometry = [
        ("1g.10gb", 14, 10, 1, 1, (0, 1, 2, 3, 4, 5, 6), 7),
        ("2g.20gb", 28, 20, 2, 2, (0, 2, 4), 3),
        ("3g.40gb", 42, 40, 4, 3, (0, 4), 2),
        ("4g.40gb", 56, 40, 4, 4, (0,), 1),
        ("7g.80gb", 98, 80, 8, 7, (0,), 1),
    ]
    profiles = tuple(
        MigProfile(label, sms, gib * GIB, memory, compute, starts, most)
        for label, sms, gib, memory, compute, starts, most in geometry
    )
    return replace(
        plain_device(name, price), compute_units=108, dram_bytes=80 * GIB, mig_slices=8, mig_profiles=profiles
    )


def demand(model: str = "m", rate_rps: float = 50.0, slo_ms: float = 100.0) -> Demand:
    """Return a demand at percentile 99."""
    return Demand(model, rate_rps, Slo(slo_ms))


def problem(
    demands: Sequence[Demand],
    fleet: Sequence[tuple[Device, int | None]] | None = None,
    estimator: LinearEstimator | None = None,
    options: Options | None = None,
) -> Problem:
    """Return a problem; without a fleet, plain devices, as many as needed."""
    entries = [(plain_device(), None)] if fleet is None else fleet
    return Problem(
        demands=tuple(demands),
        fleet=Fleet(tuple(FleetEntry(device, count) for device, count in entries)),
        estimator=estimator or LinearEstimator(),
        queueing=ExponentialQueue(),
        options=options or Options(),
    )


def evidence(problem: Problem) -> Evidence:
    """Return the evidence for checking a map of this problem."""
    return collect_evidence(problem)


def solve_and_check(policy: Policy, problem: Problem) -> tuple[Placement, DeploymentMap]:
    """Return the policy's placement and its map; the map must be sound and name all unplaced demands."""
    placement = policy.place(problem)
    deployment = to_map(problem, placement)
    assert check(deployment, evidence(problem)) == ()
    for demand in problem.demands:
        missing = sum(shortfall.rate_rps for shortfall in placement.unplaced if shortfall.model == demand.model)
        assert math.isclose(placement.rate_rps(demand.model) + missing, demand.rate_rps, rel_tol=1e-6), demand.model
    assert all(shortfall.reason and shortfall.rate_rps > 0 for shortfall in placement.unplaced)
    return placement, deployment


class PolicyContract(ABC):
    """Tests a policy passes; subclass it, return the policy, and set the fleet and options it is meant for.

    Attributes
    ----------
    options : Options
    many : int
        Number of demands to place at once.
    """

    #: Devices the policy plans for, with their counts where it plans for fixed fleets only.
    fleet: tuple[tuple[Device, int | None], ...] = ((plain_device(), None),)
    options = Options()
    many = 100

    @abstractmethod
    def policy(self) -> Policy:
        """Return a new policy."""

    def make_problem(self, demands: Sequence[Demand], count: int | None = None, **estimator: object) -> Problem:
        """Return a problem on the contract's fleet; ``count`` makes it fixed."""
        fleet = [(device, owned if count is None else count) for device, owned in self.fleet]
        return problem(demands, fleet, LinearEstimator(**estimator), self.options)  # type: ignore[arg-type]

    def test_demands_that_can_be_met_are_met(self) -> None:
        """All of three demands that fit onto the fleet are placed."""
        problem = self.make_problem([demand("a", 40.0), demand("b", 10.0, 60.0), demand("c", 5.0, 200.0)])
        placement, _ = solve_and_check(self.policy(), problem)
        assert placement.unplaced == ()

    def test_a_rate_beyond_one_device_is_split_over_several(self) -> None:
        """A rate above the capacity of any device is divided among replicas on several devices."""
        placement, _ = solve_and_check(self.policy(), self.make_problem([demand("a", 3000.0)]))
        assert placement.unplaced == ()
        assert len(placement.gpus) >= 3

    def test_an_slo_below_the_models_own_time_is_named_and_the_rest_is_placed(self) -> None:
        """An infeasible demand does not prevent the placement of others."""
        placement, _ = solve_and_check(
            self.policy(), self.make_problem([demand("fast", 10.0, 1.0), demand("easy", 10.0)])
        )
        assert [shortfall.model for shortfall in placement.unplaced] == ["fast"]
        assert placement.rate_rps("easy") > 0

    def test_a_model_larger_than_every_memory_is_named(self) -> None:
        """A model that fits into no memory is unplaced, and takes no device."""
        placement, _ = solve_and_check(self.policy(), self.make_problem([demand("big")], memory_bytes=500 * GIB))
        assert [shortfall.model for shortfall in placement.unplaced] == ["big"]
        assert placement.gpus == ()

    def test_a_fixed_fleet_is_never_overfilled(self) -> None:
        """The remainder of demands is unplaced on a fleet of counted devices."""
        placement, _ = solve_and_check(
            self.policy(), self.make_problem([demand("a", 5000.0), demand("b", 5000.0)], count=2)
        )
        assert len(placement.gpus) <= 2 * len(self.fleet)
        assert placement.unplaced

    def test_many_equal_demands_are_all_placed(self) -> None:
        """All of many equal demands are placed; a class sets their number, and slow policies fail."""
        problem = self.make_problem([demand(f"m{i}", 5.0) for i in range(self.many)])
        placement, _ = solve_and_check(self.policy(), problem)
        assert placement.unplaced == ()

    def test_the_same_problem_gives_the_same_bytes(self) -> None:
        """Maps must contain nothing random, because they are compared as files."""
        problem = self.make_problem([demand("a", 70.0), demand("b", 20.0), demand("c", 300.0)])
        first, second = (solve_and_check(self.policy(), problem)[1].to_json() for _ in range(2))
        assert first == second

    def test_neighbours_that_slow_each_other_down_still_keep_their_slos(self) -> None:
        """Replicas are planned at their times beside their neighbours."""
        solve_and_check(self.policy(), self.make_problem([demand(f"m{i}", 8.0, 60.0) for i in range(6)], slowdown=0.3))
