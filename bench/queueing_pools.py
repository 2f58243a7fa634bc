"""How far the model of replicas behind one router is from the simulator, over random groups and shapes of arrivals.

    python -m bench.queueing_pools [--groups N] [--shapes 'A;B'] [--first SEED] [--minutes M] [--keep FILE]

Groups of 1 to 64 replicas, equal or of up to three kinds, at 10% to 95% of their capacity together, each under one of
the shapes of arrivals in turn. Goodput is compared at an SLO between the median and 1.3 times p99. Each group is
simulated four times, longer and longer until the standard error of the mean p99 is below 1% or enough requests have
passed, and that error is told. Prints the median, the 95th percentile and the largest error of p99 and goodput for each
shape, how many are off by more than 5% (2%) and by more than twice the standard error besides, and the worst groups.
Where hardly any request takes about as long as the p99, the next to nothing decides it: what is off by more than 5% and
yet is met by 98.8% to 99.2% of the simulated requests is counted as such. Under bursts the p99 of high loads hangs on
the few longest of them, and the standard error of four simulations does not show it: what is far off there, and waits
for many batches, is judged by the exact law of a fluid instead. With ``--keep`` a run that is cut off goes on
where it was.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.kept_rows import KeptRows, Row
from gpuprof.domain.arrival_process import ArrivalProcess, MmppArrivals, scale_to_rate
from gpuprof.domain.arrival_text import parse_arrivals
from gpuprof.domain.deployment import (
    DeployedModel,
    DeploymentMap,
    Gpu,
    MapPrediction,
    Node,
    Partition,
    Replica,
    ReplicaPrediction,
)
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate

SHAPES = ("poisson", "constant", "gamma:4", "lognormal:4", "hyperexponential:4", "batch:5", "mmpp:2,0.5s")
_REQUESTS, _MOST_REQUESTS = 250_000, 4_000_000  # of one run
_CYCLES = 750  # of calm and burst at least, where the most requests allow it
_RUNS, _SURE = 4, 0.01
_SETTLING = 60.0  # of the longest batches, which begin all at once: not counted
_MUCH, _MUCH_GOODPUT, _NEARLY_THERE = 0.05, 0.02, 0.002
_WORST = 12
_MANY = 10.0  # batches that are waited for


@dataclass(frozen=True, slots=True)
class PoolComparison:
    """A group under a load, and how far the model is off at p99 (relative) and goodput (of all requests).

    ``met``: the part of the simulated requests that meet the model's p99, where it is far off; ``uncertainty``: the
    standard errors of the simulated p99 (relative) and of the simulated goodput; ``fluid``: how far the model's p99 is
    off what a fluid waits and up to a batch more, relative, where that decides; ``fluid_goodput``: the same of the part
    of the requests that are in time.
    """

    shape: str
    group: str
    load: float
    p99_error: float
    goodput_error: float
    met: float | None
    uncertainty: tuple[float, float]
    seconds: float
    fluid: float | None = None
    fluid_goodput: float | None = None

    def __str__(self) -> str:
        met = f" (met by {self.met:.2%})" if self.met is not None else ""
        if self.fluid is not None:
            met += f" (off a fluid's by {self.fluid:+.1%}, its goodput by {self.fluid_goodput or 0.0:+.2%})"
        p99_known, goodput_known = self.uncertainty
        return (
            f"p99 {self.p99_error:+.1%} ± {2.0 * p99_known:.1%}{met}, goodput {self.goodput_error:+.2%} ± "
            f"{2.0 * goodput_known:.2%}: {self.shape}, load {self.load:.2f}, {self.group}"
        )


def draw_group(seed: int) -> tuple[tuple[BatchServer, ...], float]:
    """Return replicas and the load of all together."""
    random = np.random.default_rng(seed)
    kinds = [_random_server(random) for _ in range(int(random.choice([1, 1, 2, 3])))]
    servers = tuple(kinds[int(random.integers(len(kinds)))] for _ in range(int(2 ** random.uniform(0.0, 6.01))))
    return servers, float(random.uniform(0.1, 0.95))


def _random_server(random: np.random.Generator) -> BatchServer:
    batch, fixed, full_ms = int(2 ** random.uniform(0.0, 5.01)), random.uniform(0.0, 0.9), random.uniform(5.0, 20.0)
    return BatchServer(
        tuple(full_ms * (fixed + (1.0 - fixed) * n / batch) for n in range(1, batch + 1)),
        batch,
        0.0,
        int(random.choice([1, 1, 1, 3])),
        float(random.choice([0.0, 0.05, 0.2])),
    )


def describe_group(servers: Sequence[BatchServer]) -> str:
    """Return the replicas in words."""
    return ", ".join(
        f"{servers.count(one)} of batch {one.batch}, {one.latency_ms[0]:.2f} to {one.latency_ms[-1]:.2f} ms, "
        f"cv {one.latency_cv:.2f}, {one.processes} process(es)"
        for one in dict.fromkeys(servers)
    )


def compare_group(servers: Sequence[BatchServer], load: float, shape: str, seed: int) -> PoolComparison:
    """Return how far the model is from simulations of a million requests in all, or of more until they agree."""
    rate = load * math.fsum(one.capacity_rps for one in servers)
    process = parse_arrivals(shape, rate)
    started = time.perf_counter()
    said = BatchQueue().pool(Arrivals.from_process(process, rate), servers).whole
    seconds = time.perf_counter() - started
    tail_ms = said.percentile(99.0)
    slo_ms = float(np.random.default_rng(seed).uniform(said.percentile(50.0), 1.3 * tail_ms))
    requests = _requests(process)
    while True:
        found = np.array([_simulate(servers, process, slo_ms, seed + 10_007 * run, requests) for run in range(_RUNS)])
        p99_ms, in_time = found.mean(axis=0)
        p99_error, goodput_error = (float(one) for one in found.std(axis=0, ddof=1) / _RUNS**0.5)
        if p99_error <= _SURE * p99_ms or 2 * requests > _MOST_REQUESTS:
            break
        requests *= 2
    error, fluid, goodput = float(tail_ms / p99_ms - 1.0), None, None
    if abs(error) > _MUCH and isinstance(process, MmppArrivals):
        fluid = compare_fluid(servers, process, tail_ms)
        goodput = (
            None if fluid is None else _compare_fluid_goodput(servers, process, slo_ms, said.fraction_within(slo_ms))
        )
    met = _simulate(servers, process, tail_ms, seed, requests)[1] if abs(error) > _MUCH else None
    return PoolComparison(
        shape,
        describe_group(servers),
        load,
        error,
        float(said.fraction_within(slo_ms) - in_time),
        met,
        (p99_error / float(p99_ms), goodput_error),
        seconds,
        fluid,
        goodput,
    )


def compare_fluid(servers: Sequence[BatchServer], process: MmppArrivals, p99_ms: float) -> float | None:
    """Return how far a p99 is off what a fluid waits and up to a batch more; None where few batches are waited for."""
    longest_ms = max(one.latency_ms[-1] for one in servers)
    wait_ms = fluid_wait_ms(process, math.fsum(one.capacity_rps for one in servers), 0.99)
    if wait_ms < _MANY * longest_ms:
        return None
    return (min(0.0, p99_ms - wait_ms) + max(0.0, p99_ms - wait_ms - longest_ms)) / wait_ms


def fluid_wait_ms(process: MmppArrivals, capacity_rps: float, part: float) -> float:
    """Return within how long the given part of all requests is taken, were they a fluid and the pool one server.

    What is waiting in a burst that brings more than is taken is exponentially distributed; in the calm it crosses each
    level downwards as often as upwards in bursts.
    """
    waiting, decay = _fluid_law(process, capacity_rps)
    return max(0.0, math.log(waiting / (1.0 - part))) / decay if waiting else 0.0


def _compare_fluid_goodput(
    servers: Sequence[BatchServer], process: MmppArrivals, slo_ms: float, within: float
) -> float:
    """Return how far a part of requests in time is off that of a fluid, whose requests take up to a batch more."""
    longest_ms = max(one.latency_ms[-1] for one in servers)
    waiting, decay = _fluid_law(process, math.fsum(one.capacity_rps for one in servers))
    least, most = (1.0 - min(1.0, waiting * math.exp(-decay * max(0.0, ms))) for ms in (slo_ms - longest_ms, slo_ms))
    return min(0.0, within - least) + max(0.0, within - most)


def _fluid_law(process: MmppArrivals, capacity_rps: float) -> tuple[float, float]:
    """Return the part of a fluid that waits, and how fast the part that waits longer falls with the milliseconds."""
    calm_s, burst_s = process.calm_s, process.burst_s
    calm_rps = process.rate_rps * (burst_s + calm_s) / (process.ratio * burst_s + calm_s)
    burst_rps = process.ratio * calm_rps
    growth_rps, fall_rps = burst_rps - capacity_rps, capacity_rps - calm_rps
    if growth_rps <= 0.0:
        return 0.0, 1.0
    decay = 1.0 / (burst_s * growth_rps) - 1.0 / (calm_s * fall_rps)
    waiting = burst_s * (burst_rps + calm_rps * growth_rps / fall_rps) / ((burst_s + calm_s) * process.rate_rps)
    return waiting, decay * capacity_rps / 1000.0


def _simulate(
    servers: Sequence[BatchServer], process: ArrivalProcess, slo_ms: float, seed: int, requests: int
) -> tuple[float, float]:
    replicas = tuple(
        Replica(
            model="m",
            batch=one.batch,
            processes=one.processes,
            rate_rps=process.rate_rps / len(servers),
            batch_latency_ms=one.latency_ms,
            predicted=ReplicaPrediction(
                latency_ms=one.latency_ms[-1],
                latency_cv=one.latency_cv,
                throughput_rps=one.capacity_rps,
                goodput_rps=process.rate_rps / len(servers),
            ),
        )
        for one in servers
    )
    gpus = tuple(
        Gpu(index=i, device="a100-80", partitions=(Partition(replicas=(one,)),)) for i, one in enumerate(replicas)
    )
    deployment = DeploymentMap(
        policy="bench",
        models={"m": DeployedModel(rate_rps=process.rate_rps, slo_ms=slo_ms)},
        nodes=(Node(name="node0", gpus=gpus),),
        predicted=MapPrediction(gpus=len(gpus), goodput_rps=0.0),
    )
    settling_s = _SETTLING / 1000.0 * max(one.latency_ms[-1] for one in servers)
    seconds = settling_s + requests / process.rate_rps
    options = SimulationOptions(duration_s=seconds, warmup_s=settling_s, seed=seed, refuse_hopeless=False)
    (found,) = simulate(deployment, {"m": scale_to_rate(process, process.rate_rps)}, options).models
    return found.p99_ms or math.inf, found.in_time / max(1, found.answered)


def _requests(process: ArrivalProcess) -> int:
    if not isinstance(process, MmppArrivals):
        return _REQUESTS
    return min(_MOST_REQUESTS, max(_REQUESTS, int(_CYCLES * (process.burst_s + process.calm_s) * process.rate_rps)))


def print_pools(
    groups: int, first: int, shapes: Sequence[str] = SHAPES, minutes: float = 60.0, keep: Path | None = None
) -> bool:
    """Print the errors over random groups under each shape of arrivals in turn, as many as there is time for.

    Returns
    -------
    bool
        Whether none is beyond 5% at p99, or 2% of goodput, by more than chance.
    """
    until, kept = time.monotonic() + 60.0 * minutes, KeptRows(keep)
    found: list[PoolComparison] = []
    for number in range(groups):
        shape, seed = shapes[number % len(shapes)], first + number
        if time.monotonic() < until or f"{shape} {seed}" in kept:
            found.append(PoolComparison(**kept.get_or_make(f"{shape} {seed}", partial(_compare_drawn, shape, seed))))
    print(f"{len(found)} of {groups} groups")
    for shape in shapes:
        some = [one for one in found if one.shape == shape]
        if some:
            _print_errors(shape, some)
    _print_errors("all", found)
    for one in sorted(found, key=lambda one: -abs(one.p99_error))[:_WORST]:
        print(f"  {one}")
    print("largest errors of goodput:")
    for one in sorted(found, key=lambda one: -abs(one.goodput_error))[:_WORST]:
        print(f"  {one}")
    return not any(_is_p99_off(one) or _is_goodput_off(one) for one in found)


def _compare_drawn(shape: str, seed: int) -> Row:
    servers, load = draw_group(seed)
    return asdict(compare_group(servers, load, shape, seed))


def _is_p99_off(one: PoolComparison) -> bool:
    return abs(one.p99_error) > _MUCH + 2.0 * one.uncertainty[0] if one.fluid is None else abs(one.fluid) > _MUCH


def _is_goodput_off(one: PoolComparison) -> bool:
    if one.fluid_goodput is not None:
        return abs(one.fluid_goodput) > _MUCH_GOODPUT
    return abs(one.goodput_error) > _MUCH_GOODPUT + 2.0 * one.uncertainty[1]


def _print_errors(title: str, found: Sequence[PoolComparison]) -> None:
    tails, goodputs = [abs(one.p99_error) for one in found], [abs(one.goodput_error) for one in found]
    far = [one for one in found if abs(one.p99_error) > _MUCH]
    sudden = sum(one.met is not None and abs(one.met - 0.99) <= _NEARLY_THERE for one in far)
    print(
        f"{title}, {len(found)} groups: p99 error {_spread(tails)}, {len(far)} above {_MUCH:.0%}, "
        f"{sum(map(_is_p99_off, found))} of them for sure ({sudden} met by 99 ± 0.2%); goodput {_spread(goodputs)}, "
        f"{sum(one > _MUCH_GOODPUT for one in goodputs)} above {_MUCH_GOODPUT:.0%}, {sum(map(_is_goodput_off, found))} "
        f"of them for sure; the simulated p99 is known to {max(one.uncertainty[0] for one in found):.1%}; "
        f"{statistics.median(one.seconds for one in found):.2f} s a pool",
        flush=True,
    )


def _spread(errors: Sequence[float]) -> str:
    return f"median {statistics.median(errors):.2%}, 95th {np.percentile(errors, 95.0):.2%}, largest {max(errors):.2%}"


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=500, help="under the shapes in turn")
    parser.add_argument("--shapes", default=";".join(SHAPES), help="separated by semicolons")
    parser.add_argument("--first", type=int, default=1, help="seed of the first")
    parser.add_argument("--minutes", type=float, default=60.0, help="to begin no more after")
    parser.add_argument("--keep", type=Path, help="file of what was found, to go on from")
    chosen = parser.parse_args()
    good = print_pools(chosen.groups, chosen.first, chosen.shapes.split(";"), chosen.minutes, chosen.keep)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
