"""Goodput under overload: served in virtual time, simulated, and the most that any admission could reach.

    python -m bench.admission [--requests N] [--cv CV] [--batches 8,16] [--quick]

For batches of 1 to 64, SLOs of 1.5 to 6 full batches, 0.8 to 4 times the capacity and one to four replicas, the same
arrivals go through the runtime's own router (``bench.virtual_server``) and through the simulator. Printed is what part
of the capacity (below it: of the load) was answered within the SLO and, where that is less than 95% of the capacity,
the part that the best rule reaches that decides as requests come: exact for batches of one (`most_alone`), else by
dynamic programming (`bench.pooled_admission`; up to two minutes for a cell with four replicas). Such a rule knows how
long every batch takes and keeps nothing of the SLO in hand, which the router learns to do within some hundred batches:
so there are a thousand in each run, of which the first quarter is not counted. At 1 to 4 times the capacity goodput is
to be at least 95% of the capacity or, where that is less, of what is possible, and served and simulated within 5% of
each other. At the end stand the cells below 95% of the capacity, then two priorities, and two clients of one model.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.pooled_admission import most_pooled
from bench.recovery import replica_of
from bench.virtual_server import VirtualRequest, serve, serve_requests
from gpuprof.domain.arrival_process import NS_PER_S, RecordedArrivals
from gpuprof.domain.deployment import DeployedModel, DeploymentMap, Gpu, MapPrediction, Node, Partition, Replica
from gpuprof.load.traffic import arrival_times
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate

BATCHES, SLOS, REPLICAS = (1, 4, 8, 16, 32, 64), (1.5, 2.0, 3.0, 6.0), (1, 2, 3, 4)
LOADS = (0.8, 1.0, 1.15, 1.5, 2.0, 3.0, 4.0)
ENOUGH, APART = 0.95, 0.05
#: Of the requests of a run the first part is not counted: queues fill, and the reserve is learned.
_WARMUP = 0.25
#: Full batches of a run, of all replicas together.
_LEAST_BATCHES = 1000
#: By the number of replicas, the largest batch for which the most is worked out, and the ticks of a full batch then:
#: the time that it takes grows with the square of the batch, and with the ticks to the power of the replicas.
_POOLED = {1: (64, 30), 2: (32, 20), 3: (16, 15), 4: (8, 15)}


@dataclass(frozen=True)
class AdmissionCell:
    """One load of one configuration; goodputs in parts of the capacity, or of the load where that is less."""

    batch: int
    slo_batches: float
    load: float
    replicas: int
    served: float
    simulated: float
    possible: float | None

    @property
    def is_enough(self) -> bool:
        """Whether goodput is what it is to be."""
        return self.load < 1.0 or self.served >= ENOUGH * min(1.0, self.possible or 1.0)

    @property
    def agrees(self) -> bool:
        """Whether the simulator says what the server does."""
        return abs(self.simulated / self.served - 1.0) <= APART if self.served else self.simulated < APART


def batch_times(batch: int) -> list[float]:
    """Return times of batches in ms: 10 ms and about 1 ms a request, so that a batch of 32 takes 40 ms."""
    return [10.0 + 30.0 * rows / 32.0 for rows in range(1, batch + 1)]


def measure(batch: int, slo_batches: float, load: float, replicas: int, requests: int, cv: float) -> AdmissionCell:
    """Serve and simulate one load."""
    times = batch_times(batch)
    capacity_rps, slo_ms = replicas * 1000.0 * batch / times[-1], slo_batches * times[-1]
    seconds = max(requests / load, _LEAST_BATCHES * batch) / capacity_rps
    arrivals_s = arrival_times("poisson", load * capacity_rps, seconds, batch)
    counted_s = (1.0 - _WARMUP) * seconds * capacity_rps * min(1.0, load)
    one = replica_of(times, cv)
    run = serve([one] * replicas, (1000.0 * arrivals_s).tolist(), slo_ms=slo_ms)
    served = run.in_time(slo_ms, 1000.0 * _WARMUP * seconds) / counted_s
    options = SimulationOptions(seconds, warmup_s=_WARMUP * seconds)
    arrivals = RecordedArrivals(np.rint(arrivals_s * NS_PER_S).astype(np.int64), seconds)
    outcome = simulate(make_map([one] * replicas, slo_ms, capacity_rps), {"m": arrivals}, options)
    possible = None
    if load >= 1.0 and served < ENOUGH:
        most_rps = _most((1000.0 * arrivals_s).tolist(), times, slo_ms, replicas, load * capacity_rps)
        possible = None if most_rps is None else most_rps / capacity_rps
    return AdmissionCell(batch, slo_batches, load, replicas, served, outcome.models[0].in_time / counted_s, possible)


def _most(
    arrivals_ms: Sequence[float], times: Sequence[float], slo_ms: float, replicas: int, rate_rps: float
) -> float | None:
    """Return the requests/s that can be answered in time at most; None where that would take too long."""
    if len(times) == 1:
        return 1000.0 * most_alone(arrivals_ms, times[0], slo_ms, replicas) / arrivals_ms[-1]
    largest, ticks = _POOLED[replicas]
    return most_pooled(times, rate_rps, slo_ms, replicas, ticks) if len(times) <= largest else None


def most_alone(arrivals_ms: Sequence[float], time_ms: float, slo_ms: float, replicas: int) -> float:
    """Return how many requests replicas that take one at a time can answer in time at most, whatever they refuse.

    All take equally long and all may: whoever comes first and can be in time is served. To refuse it for one that comes
    later gains nothing, since that one ends later.
    """
    free_at = [0.0] * replicas
    served = 0
    for arrived in arrivals_ms:
        end = max(arrived, free_at[0]) + time_ms
        if end <= arrived + slo_ms:
            heapq.heapreplace(free_at, end)
            served += 1
    return float(served)


def make_map(replicas: Sequence[Replica], slo_ms: float, rate_rps: float) -> DeploymentMap:
    """Return a map of replicas of one model ``m``, each on a device of its own."""
    gpus = tuple(Gpu(index=i, device="cpu", partitions=(Partition(replicas=(one,)),)) for i, one in enumerate(replicas))
    return DeploymentMap(
        policy="bench",
        models={"m": DeployedModel(rate_rps=rate_rps, slo_ms=slo_ms)},
        nodes=(Node(name="node0", gpus=gpus),),
        predicted=MapPrediction(gpus=len(gpus), goodput_rps=rate_rps),
    )


def show_grid(requests: int, cv: float, batches: Sequence[int], loads: Sequence[float]) -> bool:
    """Print all loads of all configurations, and return whether every one is as it is to be."""
    print("served/simulated(/possible), % of the capacity or of the load; times the capacity:")
    print("batch  SLO  replicas " + "".join(f"{load:>15g}" for load in loads))
    below: list[AdmissionCell] = []
    good = True
    for batch in batches:
        for slo_batches in SLOS:
            for replicas in REPLICAS:
                cells = [measure(batch, slo_batches, load, replicas, requests, cv) for load in loads]
                good &= all(cell.is_enough and cell.agrees for cell in cells)
                below += [cell for cell in cells if cell.load >= 1.0 and cell.served < ENOUGH]
                print(f"{batch:5d} {slo_batches:4g} {replicas:9d} " + "".join(map(_cell, cells)), flush=True)
    print(f"below {100 * ENOUGH:g}% of the capacity: batch, SLO, replicas, load: served, possible, part of that")
    for cell in below:
        where = f"{cell.batch:5d} {cell.slo_batches:4g} {cell.replicas:9d} {cell.load:5g}"
        most = "" if cell.possible is None else f"{100 * cell.possible:6.1f} {100 * cell.served / cell.possible:6.1f}"
        print(f"{where}: {100 * cell.served:5.1f} {most}")
    return good


def _cell(cell: AdmissionCell) -> str:
    possible = "" if cell.possible is None else f"/{100.0 * min(1.0, cell.possible):.0f}"
    mark = ("" if cell.is_enough else "<") + ("" if cell.agrees else "≠")
    return f"{f'{100.0 * cell.served:.0f}/{100.0 * cell.simulated:.0f}{possible}{mark}':>15s}"


def show_priorities(cv: float, seconds: float = 20.0) -> bool:
    """Print the goodput of requests of two priorities, each with 0.4 to 1.5 times the capacity."""
    times = batch_times(8)
    capacity_rps, slo_ms = 1000.0 * 8 / times[-1], 4.0 * times[-1]
    good = True
    print("two priorities, batch 8, SLO 4 batches; parts of the capacity: asked → in time")
    for first, second in ((0.4, 0.4), (0.5, 1.5), (1.5, 0.5), (1.5, 1.5)):
        rates = (first * capacity_rps, second * capacity_rps)
        requests = merge_requests(
            [VirtualRequest(1000.0 * at, priority) for at in arrival_times("poisson", rate, seconds, priority)]
            for priority, rate in enumerate(rates)
        )
        run = serve_requests([replica_of(times, cv)], requests, slo_ms=slo_ms)
        parts = [
            sum(
                one.priority == priority and took is not None and took <= slo_ms
                for one, took in zip(run.requests, run.took_ms, strict=True)
            )
            / (seconds * capacity_rps)
            for priority in range(2)
        ]
        answered = sum(took is not None for took in run.took_ms) / (seconds * capacity_rps)
        wanted = (min(first, 1.0), max(0.0, min(second, 1.0 - first)))
        fits = parts[0] >= ENOUGH * wanted[0] and sum(parts) >= ENOUGH * sum(wanted)
        good &= fits
        print(
            f"  {first:g} + {second:g} → {parts[0]:.2f} + {parts[1]:.2f}, {answered - sum(parts):.3f} late"
            f"{'' if fits else '  TOO LITTLE'}"
        )
    return good


def show_clients(cv: float, seconds: float = 20.0) -> bool:
    """Print what one client with a third of the capacity gets beside one that sends three times the capacity."""
    times = batch_times(8)
    capacity_rps, slo_ms = 1000.0 * 8 / times[-1], 4.0 * times[-1]
    good = True
    print("two clients of one model, batch 8, SLO 4 batches: parts of the capacity in time")
    for name, many, timeout_ms in (
        ("three times the capacity", "b", None),
        ("three times the capacity, from the same address, in no hurry (one hour)", "a", 3_600_000.0),
    ):
        times_s = arrival_times("poisson", capacity_rps / 3, seconds, 1)
        light = [VirtualRequest(1000.0 * at, client="a") for at in times_s]
        flood = [
            VirtualRequest(1000.0 * at, timeout_ms=timeout_ms, client=many)
            for at in arrival_times("poisson", 3 * capacity_rps, min(seconds, 5.0) if timeout_ms else seconds, 2)
        ]
        run = serve_requests([replica_of(times, cv)], merge_requests([light, flood]), slo_ms=slo_ms)
        pairs = list(zip(run.requests, run.took_ms, strict=True))
        own = {id(one) for one in light}
        got = sum(id(one) in own and took is not None and took <= slo_ms for one, took in pairs) / len(light)
        fits = got >= ENOUGH
        good &= fits
        print(f"  beside {name}: {100.0 * got:.0f}% of the other's{'' if fits else '  TOO LITTLE'}")
    return good


def merge_requests(parts: Iterable[Iterable[VirtualRequest]]) -> list[VirtualRequest]:
    """Return all requests by the time that they come."""
    return sorted((one for part in parts for one in part), key=lambda one: one.at_ms)


def main() -> int:
    """Print all of it; 0 when everything is as it is to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6000, help="of each load")
    parser.add_argument("--cv", type=float, default=0.0, help="spread of the batch times; the possible has none")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="largest batches")
    parser.add_argument("--quick", action="store_true", help="every second load")
    said = parser.parse_args()
    batches, loads = [int(text) for text in said.batches.split(",")], LOADS[::2] if said.quick else LOADS
    good = show_grid(said.requests, said.cv, batches, loads)
    good &= show_priorities(said.cv)
    return 0 if show_clients(said.cv) and good else 1


if __name__ == "__main__":
    sys.exit(main())
