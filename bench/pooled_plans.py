"""GPUs planned for the queue that replicas share and for streams of their own, and the fewest that suffice.

The sections `random` and `papers` of `bench.placement`. A random demand asks for one model that takes
``start + n each`` ms for a batch of n on a whole device, at an SLO of 2 to 8 times the time of one request. The
least is found by simulation alone: of every batch size as many whole or divided devices as keep the SLO, by bisection.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench import igniter_profiles, parvagpu_profiles
from bench.published_measurements import thesis_estimator, v100
from gpuprof.domain.arrival_process import Gamma
from gpuprof.domain.catalogue import device
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.share import Share
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement.contract import LinearEstimator, evidence, plain_device
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import ModelFile, Options, Problem
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate

_REQUESTS = 150_000
_MOST_DEVICES = 400


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
    sound = not check(deployment, evidence(given)) and not check(to_map(given, split), evidence(given))
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


def simulated_tails(deployment: DeploymentMap, seed: int = 1) -> dict[str, tuple[float, float]]:
    """Return each model's simulated p99 in ms, and over its SLO."""
    slowest = min(model.rate_rps for model in deployment.models.values())
    options = SimulationOptions(
        duration_s=_REQUESTS / slowest, warmup_s=0.05 * _REQUESTS / slowest, seed=seed, refuse_hopeless=False
    )
    arrivals = {name: Gamma(model.rate_rps) for name, model in deployment.models.items()}
    outcome = simulate(deployment, arrivals, options)
    return {one.model: (one.p99_ms or math.inf, (one.p99_ms or math.inf) / one.slo_ms) for one in outcome.models}


def least_accepted(given: Problem) -> int:
    """Return the fewest devices on which equal replicas of one model keep its SLO, found by simulation alone."""
    demand, best = given.demands[0], _MOST_DEVICES
    kind = given.fleet.entries[0].device
    for batch in given.estimator.batches(demand.model, kind, Share(100.0)):
        for share in given.estimator.shares(demand.model, kind):
            each = round(100.0 / share.sm_pct)
            estimate = given.estimator.estimate(demand.model, kind, batch, share)
            if estimate.latency_ms.value > demand.slo.latency_ms:
                continue
            low = max(1, math.ceil(demand.rate_rps / estimate.throughput_rps.value))
            high = best * each
            if low >= high or not is_accepted(_equal_map(given, batch, share, high - 1)):
                continue
            high -= 1
            while low < high:
                middle = (low + high) // 2
                if is_accepted(_equal_map(given, batch, share, middle)):
                    high = middle
                else:
                    low = middle + 1
            best = min(best, math.ceil(high / each))
    return best


def _equal_map(given: Problem, batch: int, share: Share, count: int) -> DeploymentMap:
    """Return a map of equal replicas, as they stand on their devices without disturbing one another."""
    demand, kind = given.demands[0], given.fleet.entries[0].device
    each = round(100.0 / share.sm_pct)
    replica = PlacedReplica(demand.model, batch, 1, share, demand.rate_rps / count)
    gpus = tuple(
        PlacedGpu(kind.name, (PlacedPartition((replica,) * min(each, count - start)),))
        for start in range(0, count, each)
    )
    return to_map(given, Placement("equal", gpus))


def print_random(count: int, seed: int) -> bool:
    """Print what is planned for random demands beside the fewest devices that the simulator accepts."""
    print(
        f"\n{count} random demands (seed {seed}), SLOs of 2 to 8 single latencies: devices, and p99 against simulation"
    )
    print("  SLO/single  rate  split pooled bound least   p99 error  time")
    totals, errors, sound, missed = [0, 0, 0, 0], [], True, []
    for given in random_problems(count, seed):
        plans, least = plan_both(given), least_accepted(given)
        asked, said = given.demands[0], plans.deployment.models["m"].predicted
        tail, part = simulated_tails(plans.deployment, 2)["m"]
        error = ((said.p99_ms or math.inf) if said else math.inf) / tail - 1.0
        row = (plans.split, plans.pooled, plans.bound, least)
        totals = [total + one for total, one in zip(totals, row, strict=True)]
        errors.append(abs(error))
        if plans.pooled > least + 1 or part > 1.05:
            missed.append(
                f"SLO {asked.slo.latency_ms:.1f} ms: {plans.pooled} planned, {least} suffice, p99 x{part:.2f}"
            )
        single = given.estimator.estimate("m", given.fleet.entries[0].device, 1, Share(100.0)).latency_ms.value
        print(
            f"  {asked.slo.latency_ms / single:10.2f} {asked.rate_rps:5.0f} "
            + " ".join(f"{one:5}" for one in row)
            + f" {100 * error:+9.1f}% {plans.seconds:6.1f} s",
            flush=True,
        )
        sound = sound and plans.sound and plans.bound <= plans.pooled <= plans.split
    print(f"  all together {'':6}" + " ".join(f"{one:5}" for one in totals) + f", largest p99 error {max(errors):.1%}")
    for line in missed:
        print(f"  MISSED: {line}")
    return sound


def print_papers(reference: Path) -> bool:
    """Print what is planned by queues for the papers' workloads, with whether the simulator accepts it."""
    print("\nThe papers' workloads by queues (p99 within the SLO): devices")
    print(f"  {'':38} split pooled bound  simulated p99 over SLO, worst    time")
    sound = True
    for name, given in _papers(reference):
        plans = plan_both(given)
        worst = max(late for _, late in simulated_tails(plans.deployment).values())
        sound = sound and plans.sound and plans.pooled <= plans.split
        print(
            f"  {name:38} {plans.split:5} {plans.pooled:6} {plans.bound:5}  {worst:6.3f} {plans.seconds:31.1f} s",
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
    vision = ["alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19"]
    thesis = Problem(
        tuple(Demand(model, 500.0, Slo(200.0)) for model in vision),
        Fleet((FleetEntry(v100()),)),
        thesis_estimator(),
        BatchQueue(),
    )
    yield "Elvinger's thesis, 6.2.1 vision, V100", thesis
    demands = tuple(replace(one, rate_rps=2_000.0) for one in thesis.demands)
    yield "USHER's profiles, four times the rate", replace(thesis, demands=demands)
