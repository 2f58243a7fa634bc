"""GPUs planned for the queue that replicas share and for streams of their own, and the fewest that suffice.

The sections `random` and `papers` of `bench.placement`. A random demand asks for one model that takes
``start + n each`` ms for a batch of n on a whole device, at an SLO of 2 to 8 times the time of one request. The
least is found by simulation alone: of every batch size as many whole or divided devices as keep the SLO, by bisection.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from bench import igniter_profiles, parvagpu_profiles
from bench.kept_rows import KeptRows, Row
from bench.published_measurements import thesis_estimator, v100
from gpuprof.domain.arrival_process import GammaArrivals
from gpuprof.domain.catalogue import device
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.estimate import Estimate
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import ExponentialQueue, LinearEstimator, evidence, plain_device
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import ModelFile, Options, Problem
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate

_REQUESTS, _GLIMPSE = 150_000, 15_000
_RUNS = 5  # of a plan, with random numbers of their own
#: The part of the capacity that must be left for `_REQUESTS` to be enough; with less, up to so many times as many.
_LEFT, _MOST_TIMES = 0.05, 20.0
_MOST_DEVICES = 100
_FAR = 1.3  # of the SLO: so late after a glimpse, too late after all
_ERRORS = 2.0  # standard errors of the simulated p99, within which an SLO is not known to be missed


@dataclass(frozen=True, slots=True)
class Plans:
    """What was planned for one problem: devices, the bound, and whether both maps passed the check."""

    split: int
    pooled: int
    bound: int
    sound: bool
    seconds: float
    deployment: DeploymentMap


def plan_both(given: Problem) -> Plans:
    """Plan for streams of the replicas' own, and for the queue that they share."""
    split = Optimal(pooled=False).place(given)
    started = time.perf_counter()
    pooled = Optimal().place(given)
    seconds = time.perf_counter() - started
    deployment = to_map(given, pooled)
    alone = replace(split, lower_bound_gpus=None, lower_bound_cost_per_hour=None)  # no bound of maps for one queue
    sound = not check(deployment, evidence(given)) and not check(to_map(given, alone), evidence(given))
    sound = sound and not pooled.unplaced and not split.unplaced
    return Plans(len(split.gpus), len(pooled.gpus), pooled.lower_bound_gpus or 0, sound, seconds, deployment)


def random_problems(count: int, seed: int) -> Iterator[Problem]:
    """Yield problems of one model each."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        estimator = LinearEstimator(random.uniform(0.5, 4.0), random.uniform(0.2, 1.5))
        slo_ms = random.uniform(2.0, 8.0) * (estimator.start_ms + estimator.each_ms)
        full_rps = 8000.0 / (estimator.start_ms + 8 * estimator.each_ms)
        demand = Demand("m", random.uniform(0.5, 12.0) * full_rps, Slo(slo_ms))
        yield Problem((demand,), Fleet((FleetEntry(plain_device()),)), estimator, BatchQueue())


def is_accepted(deployment: DeploymentMap, seed: int = 1) -> bool:
    """Whether the simulator finds every model of a map within its SLO; nothing is refused."""
    return all(late <= 1.0 for _, late in simulated_tails(deployment, seed).values())


def simulated_tails(
    deployment: DeploymentMap, seed: int = 1, requests: int = _REQUESTS
) -> dict[str, tuple[float, float]]:
    """Return each model's simulated p99 in ms, and over its SLO."""
    slowest = min(model.rate_rps for model in deployment.models.values())
    options = SimulationOptions(
        duration_s=requests / slowest, warmup_s=0.05 * requests / slowest, seed=seed, refuse_hopeless=False
    )
    arrivals = {name: GammaArrivals(model.rate_rps) for name, model in deployment.models.items()}
    outcome = simulate(deployment, arrivals, options)
    return {one.model: (one.p99_ms or math.inf, (one.p99_ms or math.inf) / one.slo_ms) for one in outcome.models}


def count_requests(deployment: DeploymentMap) -> int:
    """Return how many requests tell the p99 of a map of one model.

    Queues come to rest, and forget, in a time that grows with the square of one over what is left of the capacity.
    """
    parts = [part for node in deployment.nodes for gpu in node.gpus for part in gpu.partitions]
    predicted = [one.predicted for part in parts for one in part.replicas]
    capacity = math.fsum(one.throughput_rps for one in predicted if one is not None)
    left = max(1e-6, 1.0 - math.fsum(model.rate_rps for model in deployment.models.values()) / capacity)
    return round(_REQUESTS * min(_MOST_TIMES, max(1.0, (_LEFT / left) ** 2)))


def least_accepted(given: Problem) -> int:
    """Return the fewest devices on which equal replicas of one model keep its SLO, found by simulation alone."""
    demand, best = given.demands[0], _MOST_DEVICES
    for estimate in _estimates_in_time(given):
        batch, share = estimate.workload.batch, estimate.workload.share
        each = round(100.0 / share.sm_pct)
        low = max(1, math.ceil(demand.rate_rps / estimate.throughput_rps.value))
        high = best * each
        if low >= high or not _suffices(given, batch, share, high - 1):
            continue
        high -= 1
        while low < high:
            middle = (low + high) // 2
            if _suffices(given, batch, share, middle):
                high = middle
            else:
                low = middle + 1
        best = min(best, math.ceil(high / each))
    return best


def _estimates_in_time(given: Problem) -> list[Estimate]:
    """Return all batches of all shares that are within the SLO, by falling requests/s of a whole device."""
    demand, kind = given.demands[0], given.fleet.entries[0].device
    every = [
        given.estimator.estimate(demand.model, kind, batch, share)
        for share in given.estimator.shares(demand.model, kind)
        for batch in given.estimator.batches(demand.model, kind, share)
    ]
    in_time = [one for one in every if one.latency_ms.value <= demand.slo.latency_ms]
    return sorted(in_time, key=lambda one: -one.throughput_rps.value * round(100.0 / one.workload.share.sm_pct))


def _suffices(given: Problem, batch: int, share: Share, count: int) -> bool:
    """Whether the simulator accepts so many replicas; few requests are enough where it is far from that."""
    deployment = _equal_map(given, batch, share, count)
    glimpse = simulated_tails(deployment, requests=_GLIMPSE).values()
    return all(late <= _FAR for _, late in glimpse) and is_accepted(deployment)


def _equal_map(given: Problem, batch: int, share: Share, count: int) -> DeploymentMap:
    """Return a map of equal replicas, as they stand on their devices without disturbing one another.

    Its predictions are of a queue that is quick to ask: the simulator looks at none of them.
    """
    given = replace(given, queueing=ExponentialQueue())
    demand, kind = given.demands[0], given.fleet.entries[0].device
    each = round(100.0 / share.sm_pct)
    replica = PlacedReplica(demand.model, batch, 1, share, demand.rate_rps / count)
    gpus = tuple(
        PlacedGpu(kind.name, (PlacedPartition((replica,) * min(each, count - start)),))
        for start in range(0, count, each)
    )
    return to_map(given, Placement("equal", gpus))


@dataclass(frozen=True, slots=True)
class RandomDemand:
    """A random demand: devices planned, the bound, the least that the simulator accepts, and how the plan does there.

    ``slo_ms`` over ``single_ms`` is the SLO in times of one request; ``p99_error`` is the planned p99 over the
    simulated, less 1; ``late`` the simulated p99 over the SLO, its mean over several runs, and ``uncertainty`` the
    standard error of that; ``ordered`` whether both maps passed the check and no figure contradicts another.
    """

    slo_ms: float
    single_ms: float
    rate_rps: float
    split: int
    pooled: int
    bound: int
    least: int
    p99_error: float
    late: float
    uncertainty: float
    seconds: float
    ordered: bool

    def is_missed(self) -> bool:
        """Whether more than one device too many is planned, or the simulator finds the SLO missed for sure."""
        return self.pooled > self.least + 1 or self.is_late()

    def is_late(self) -> bool:
        """Whether the simulated p99 is above the SLO by more than two of its standard errors."""
        return self.late > 1.0 + _ERRORS * self.uncertainty

    def __str__(self) -> str:
        counts = " ".join(f"{one:5}" for one in (self.split, self.pooled, self.bound, self.least))
        ratio = self.slo_ms / self.single_ms
        return f"  {ratio:10.2f} {self.rate_rps:5.0f} {counts} {100 * self.p99_error:+9.1f}% {self.seconds:6.1f} s"


def judge_demand(given: Problem) -> RandomDemand:
    """Plan one demand and look for the least devices that the simulator accepts."""
    plans, least = plan_both(given), least_accepted(given)
    asked, said = given.demands[0], plans.deployment.models["m"].predicted
    requests = count_requests(plans.deployment)
    tails = np.array([simulated_tails(plans.deployment, seed, requests)["m"] for seed in range(2, 2 + _RUNS)])
    tail, late = (float(one) for one in tails.mean(axis=0))
    return RandomDemand(
        asked.slo.latency_ms,
        given.estimator.estimate("m", given.fleet.entries[0].device, 1, Share(100.0)).latency_ms.value,
        asked.rate_rps,
        plans.split,
        plans.pooled,
        plans.bound,
        least,
        ((said.p99_ms or math.inf) if said else math.inf) / tail - 1.0,
        late,
        float(tails[:, 1].std(ddof=1)) / _RUNS**0.5,
        plans.seconds,
        plans.sound and plans.bound <= plans.pooled <= plans.split,
    )


def print_random(count: int, seed: int, keep: Path | None = None, minutes: float = math.inf) -> bool:
    """Print what is planned for random demands beside the fewest devices that the simulator accepts.

    With ``keep`` a run that is cut off goes on where it was; none is begun after so many minutes.
    """
    print(
        f"\n{count} random demands (seed {seed}), SLOs of 2 to 8 single latencies: devices, and p99 against simulation"
    )
    print("  SLO/single  rate  split pooled bound least   p99 error  time")
    kept, until = KeptRows(keep), time.monotonic() + 60.0 * minutes
    found: list[RandomDemand] = []
    for number, given in enumerate(random_problems(count, seed)):
        if time.monotonic() > until and f"{seed} {number}" not in kept:
            break
        found.append(RandomDemand(**kept.get_or_make(f"{seed} {number}", partial(_judge_row, given))))
        print(found[-1], flush=True)
    totals = (sum(values) for values in zip(*((d.split, d.pooled, d.bound, d.least) for d in found), strict=True))
    errors = sorted(abs(one.p99_error) for one in found)
    print(
        f"  all {len(found):4} together   " + " ".join(f"{one:5}" for one in totals) + f"; p99 error median "
        f"{errors[len(errors) // 2]:.1%}, largest {errors[-1]:.1%}; within one of the least "
        f"{sum(one.pooled <= one.least + 1 for one in found)}, the least itself "
        f"{sum(one.pooled <= one.least for one in found)}, SLO kept {sum(one.late <= 1.0 for one in found)}, not "
        f"missed for sure {sum(not one.is_late() for one in found)}; p99 over SLO at most "
        f"{max(one.late for one in found):.3f}, known to {max(one.uncertainty for one in found):.1%}"
    )
    for one in found:
        if one.is_missed():
            planned = (
                f"{one.pooled} planned, {one.least} suffice, p99 x{one.late:.3f} ± {_ERRORS * one.uncertainty:.3f}"
            )
            print(f"  MISSED: SLO {one.slo_ms:.1f} ms, {one.rate_rps:.0f} requests/s: {planned}")
    return all(one.ordered for one in found)


def _judge_row(given: Problem) -> Row:
    return asdict(judge_demand(given))


def print_papers(reference: Path) -> bool:
    """Print what is planned by queues for the papers' workloads, with whether the simulator accepts it."""
    print("\nThe papers' workloads by queues (p99 within the SLO): devices")
    print(f"  {'':39} split pooled bound  simulated p99 over SLO, worst    time")
    sound = True
    for name, given in _papers(reference):
        plans = plan_both(given)
        worst = max(late for _, late in simulated_tails(plans.deployment).values())
        sound = sound and plans.sound and plans.pooled <= plans.split
        print(
            f"  {name:39} {plans.split:5} {plans.pooled:6} {plans.bound:5}  {worst:6.3f} {plans.seconds:31.1f} s",
            flush=True,
        )
    return sound


def _papers(reference: Path) -> Iterator[tuple[str, Problem]]:
    directory, profile = reference / "parvagpu_a100", reference / "igniter_v100" / "config.jsonl"
    for number in range(1, 7) if directory.is_dir() else ():
        yield (
            f"ParvaGPU, scenario {number}, A100-80",
            Problem(
                parvagpu_profiles.scenario(directory, number),
                Fleet((FleetEntry(device("a100-80")),)),
                parvagpu_profiles.read_profiles(directory),
                BatchQueue(),
                Options(max_processes=5),
            ),
        )
    if profile.is_file():
        models, demands = igniter_profiles.table_3()
        yield (
            "iGniter, W1 to W12, V100",
            Problem(
                demands,
                Fleet((FleetEntry(device("v100")),)),
                igniter_profiles.read_estimator(profile, models),
                BatchQueue(),
                files={name: ModelFile(None, model) for name, model in models.items()},
            ),
        )
    yield from _thesis_problems()


def _thesis_problems() -> Iterator[tuple[str, Problem]]:
    """Yield the examples of Elvinger's thesis, on as many V100s as they take, and the last at four times the rate."""
    vision = "alexnet densenet121 efficientnet_b7 resnet50 vgg19"
    examples = (
        ("Elvinger's thesis, 5.4.1 within a group", "alexnet gpt2 resnet50 t5", 400.0),
        ("Elvinger's thesis, 5.4.1 across groups", "resnet50 vgg19 mobilenet_v2 gpt2 bert", 400.0),
        ("Elvinger's thesis, 5.4.2 multiplier", "resnet50 alexnet mobilenet_v2 bert", 500.0),
        ("Elvinger's thesis, 6.2.1 vision", vision, 500.0),
        ("USHER's profiles, four times the rate", vision, 2_000.0),
    )
    for name, models, rate_rps in examples:
        slo = Slo(300.0 if "across" in name else 200.0)
        demands = tuple(Demand(model, rate_rps, slo) for model in models.split())
        yield name, Problem(demands, Fleet((FleetEntry(v100()),)), thesis_estimator(), BatchQueue())
