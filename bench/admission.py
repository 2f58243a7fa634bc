"""Goodput under overload: served in virtual time, simulated, and the most that any admission could reach.

    python -m bench.admission [--requests N] [--cv CV] [--quick]

For batches of 1 to 64, SLOs of 1.5 to 6 full batches, 0.8 to 4 times the capacity and one to four replicas, the same
arrivals go through the runtime's own router (``bench.virtual_server``) and through the simulator. Printed is what part
of the capacity (below it: of the load) was answered within the SLO, and where it is known the part that is possible.
With an SLO below two batches that is what the best rule reaches that decides as requests come and holds no batch: one
that comes just after a batch began can never wait for a whole one more. With longer SLOs it is the best choice of
requests and batches by somebody who knows all arrivals. Of several replicas it is known for batches of one and, with
an SLO below two batches, worked out for batches of up to eight where less than 95% is served: the best rule that
decides as requests come and may hold batches (`pooled_admission`; two minutes for batches of eight). All of them know
how long every batch takes and keep nothing of the SLO in hand, which the router learns to do within some hundred
batches; one replica may exceed the first by holding batches. At 1 to 4 times the capacity goodput is to be at least 95%
of the capacity or, where that is less, of what is possible, and served and simulated within 5% of each other. Of large
batches 6000 requests are some tens for each replica: what differs by more there agrees in longer runs, ``--requests
60000``. Then come two priorities, and two clients of one model.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from bench.pooled_admission import most_pooled
from bench.recovery import replica_of
from bench.virtual_server import VirtualRequest, serve, serve_requests
from gpuprof.domain.arrival_process import NS_PER_S, RecordedArrivals
from gpuprof.domain.deployment import DeployedModel, DeploymentMap, Gpu, MapPrediction, Node, Partition, Replica
from gpuprof.serving.load.traffic import arrival_times
from gpuprof.simulator.cluster import SimulationOptions
from gpuprof.simulator.engine import simulate

BATCHES, SLOS, REPLICAS = (1, 4, 8, 16, 32, 64), (1.5, 2.0, 3.0, 6.0), (1, 4)
LOADS = (0.8, 1.0, 1.15, 1.5, 2.0, 3.0, 4.0)
ENOUGH, APART = 0.95, 0.05
#: Of the requests of a run the first part is not counted: queues fill, and the reserve is learned.
_WARMUP = 0.25
#: So many requests are looked at for what is possible: the best choice takes the square of them.
_MOST_CHOSEN = 1500
#: Up to this batch the best rule of several replicas is worked out: its time grows with the square of the batch.
_LARGEST_POOLED = 8

Times = NDArray[np.float64]


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
    # At least twenty full batches of each replica, however few requests are asked for.
    seconds = max(requests / (load * capacity_rps), 0.03 * times[-1])
    arrivals_s = arrival_times("poisson", load * capacity_rps, seconds, batch)
    counted_s = (1.0 - _WARMUP) * seconds * capacity_rps * min(1.0, load)
    one = replica_of(times, cv)
    run = serve([one] * replicas, (1000.0 * arrivals_s).tolist(), slo_ms=slo_ms)
    served = run.in_time(slo_ms, 1000.0 * _WARMUP * seconds) / counted_s
    options = SimulationOptions(seconds, warmup_s=_WARMUP * seconds)
    arrivals = RecordedArrivals(np.rint(arrivals_s * NS_PER_S).astype(np.int64), seconds)
    outcome = simulate(_map([one] * replicas, slo_ms, capacity_rps), {"m": arrivals}, options)
    possible = None
    if replicas > 1 and 1 < batch <= _LARGEST_POOLED and slo_batches < 2.0 and load >= 1.0 and served < ENOUGH:
        possible = most_pooled(times, load * capacity_rps, slo_ms, replicas) / capacity_rps
    elif replicas == 1 and slo_batches < 2.0:
        possible = most_online(times, load * capacity_rps, slo_ms) / (capacity_rps * min(1.0, load))
    elif replicas == 1:
        chosen = 1000.0 * arrivals_s[:_MOST_CHOSEN]
        span_s = (chosen[-1] - chosen[0]) / 1000.0 + slo_ms / 1000.0
        possible = most_in_time(chosen, times, slo_ms) / (span_s * capacity_rps * min(1.0, load))
    elif batch == 1:
        possible = most_alone((1000.0 * arrivals_s).tolist(), times[0], slo_ms, replicas)
        possible /= seconds * capacity_rps * min(1.0, load)
    return AdmissionCell(batch, slo_batches, load, replicas, served, outcome.models[0].in_time / counted_s, possible)


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


def most_in_time(arrivals_ms: Times, times_ms: Sequence[float], slo_ms: float) -> int:
    """Return how many of the requests one replica can answer in time at most, whatever it refuses.

    Who is served is served in the order of arrival, and a batch holds neighbours: of three requests with the middle one
    refused the first may as well be, which only adds time. So the earliest end of a batch, by the requests decided on
    and those refused, tells all (dynamic programming).
    """
    count = len(arrivals_ms)
    free_at = np.full((count + 1, count + 1), np.inf)
    free_at[0, 0] = -np.inf
    for first in range(count):
        ends = free_at[first]
        np.minimum(free_at[first + 1, 1:], ends[:-1], out=free_at[first + 1, 1:])
        for rows in range(1, min(len(times_ms), count - first) + 1):
            done = np.maximum(ends, arrivals_ms[first + rows - 1]) + times_ms[rows - 1]
            if arrivals_ms[first + rows - 1] + times_ms[rows - 1] > arrivals_ms[first] + slo_ms:
                break
            done[done > arrivals_ms[first] + slo_ms] = np.inf
            np.minimum(free_at[first + rows], done, out=free_at[first + rows])
    refused = int(np.flatnonzero(np.isfinite(free_at[count]) | np.isneginf(free_at[count]))[0])
    return count - refused


def most_online(times_ms: Sequence[float], rate_rps: float, slo_ms: float) -> float:
    """Return the requests/s in time of the best rule that knows the rate of the arrivals, but not when they come.

    The rule decides on each request as it comes; the replica begins what it has let in as soon as it is free, and who
    is let in joins the next batch. By dynamic programming over the time until the replica is free, the requests let in
    and when the first of them came: exact but for time being cut into ticks in which at most one request comes.
    """
    tick_ms = min(0.4 * 1000.0 / rate_rps, 0.05 * times_ms[0])
    times = np.array([round(time / tick_ms) for time in times_ms], np.int64)
    chance, slo = rate_rps * tick_ms / 1000.0, round(slo_ms / tick_ms)
    low, high = 0.0, max((rows + 1) / time for rows, time in enumerate(times.tolist()))
    while high - low > 2e-3 * high:
        gain = (low + high) / 2.0
        low, high = (gain, high) if _is_reachable(times, slo, chance, gain) else (low, gain)
    return 1000.0 * low / tick_ms


@numba.njit(cache=False)
def _is_reachable(times: NDArray[np.int64], slo: int, chance: float, gain: float) -> bool:
    """Return whether a rule has more than ``gain`` requests in time in a tick: whether its surplus grows for ever."""
    batch, longest = len(times), times[-1]
    value, ahead = np.zeros(batch + 1), np.zeros((longest + 1, batch + 1, longest + 1))
    for _ in range(80):
        ahead[0] = value.reshape(-1, 1)
        for left in range(1, longest + 1):
            for rows in range(batch + 1):
                for first in range(left, longest + 1):
                    stays, joins = ahead[left - 1, rows, first], -1e18
                    came = first if rows > 0 else left
                    if rows < batch and came + times[rows] <= slo:
                        joins = ahead[left - 1, rows + 1, came]
                    ahead[left, rows, first] = stays + chance * max(0.0, joins - stays)
        after = np.zeros(batch + 1)
        for rows in range(1, batch + 1):
            after[rows] = rows - gain * times[rows - 1] + ahead[times[rows - 1], 0, times[rows - 1]]
        after[0] = after[1] - gain / chance
        grown = after - value
        if grown.min() > 1e-9:
            return True
        if grown.max() < -1e-9:
            return False
        value = after
    return True


def _map(replicas: Sequence[Replica], slo_ms: float, rate_rps: float) -> DeploymentMap:
    gpus = tuple(Gpu(index=i, device="cpu", partitions=(Partition(replicas=(one,)),)) for i, one in enumerate(replicas))
    return DeploymentMap(
        policy="bench",
        models={"m": DeployedModel(rate_rps=rate_rps, slo_ms=slo_ms)},
        nodes=(Node(name="node0", gpus=gpus),),
        predicted=MapPrediction(gpus=len(gpus), goodput_rps=rate_rps),
    )


def show_grid(requests: int, cv: float, quick: bool) -> bool:
    """Print all loads of all configurations, and return whether every one is as it is to be."""
    batches, loads = (BATCHES[::2], LOADS[::2]) if quick else (BATCHES, LOADS)
    print("served/simulated(/possible), % of the capacity or of the load; times the capacity:")
    print("batch  SLO  replicas " + "".join(f"{load:>15g}" for load in loads))
    good = True
    for batch in batches:
        for slo_batches in SLOS:
            for replicas in REPLICAS:
                cells = [measure(batch, slo_batches, load, replicas, requests, cv) for load in loads]
                good &= all(cell.is_enough and cell.agrees for cell in cells)
                print(f"{batch:5d} {slo_batches:4g} {replicas:9d} " + "".join(map(_cell, cells)), flush=True)
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
    parser.add_argument("--quick", action="store_true", help="every second batch and load")
    said = parser.parse_args()
    good = show_grid(said.requests, said.cv, said.quick)
    good &= show_priorities(said.cv)
    return 0 if show_clients(said.cv) and good else 1


if __name__ == "__main__":
    sys.exit(main())
