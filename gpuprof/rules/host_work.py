"""CPU time that serving costs a machine beside the batches, and how much longer batches take for it.

Router, machine process and clients compute, too. On an idle core they slow no batch down. Where every
core runs a batch, they mostly go on where they were last, on the core that was idle last, and whatever runs there ends
so much later: the short batches of a busy model bear it more than the long ones beside them. The simulator plays that
event by event (`gpuprof.simulator.host`); here stands what it comes to on average, for placing, checking and
predicting: replica i, running, is disturbed when all other cores run batches too, and as often as its cores, of all,
are the last that begin to run, or just as any other. Disturbances of ``event_ms`` come at random, so they lengthen a
time ``S`` to ``S / (1 - x)`` and add a variance of ``x S event_ms`` (a compound Poisson sum), ``x`` being the part of
its time that a replica loses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.planned_with import PlannedWith
from gpuprof.domain.sojourn import Arrivals, BatchServer, QueueModel
from gpuprof.errors import InputError
from gpuprof.rules.cpu_slices import CpuSlice, plan_shared_slices

#: Requests a second at which the cost is measured: hardly any work meets other work, and much of it does.
CALM_RPS, BUSY_RPS = 60.0, 600.0
#: A request is worked for twice: as it comes, and as its answer goes.
EVENTS_PER_REQUEST = 2
#: How often the host's work stays on the core where it ran last though every core runs a batch; otherwise it goes to
#: any core. Fitted to samples of perf on two cores under Linux 6.18: of the host's work at such times batches of 1 ms
#: bear 83% and 90% beside batches of 33 ms (at 80% and 50% load; this constant gives 85% and 86%), batches of 7 ms
#: beside 47 ms bear 70% (it gives 77%), and batches of 5 ms beside 7 ms bear 65% (it gives 57%).
STAYS = 0.75
#: Part of a core's time that disturbances are taken to leave at least; beyond it nothing is served in time anyway.
_LEAST_LEFT = 0.01
#: Iterations of the fixed point in `disturb_servers`: time lost makes replicas busier, which makes them lose more.
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class HostWork:
    """The cost of serving, measured by ``gpuprof profile``."""

    #: Time that each batch occupies its worker beyond the model's: receiving it and sending the answer.
    handover_ms: float = 0.0
    #: CPU time that router, machine process and clients of the same machine take for a request, at few of them.
    host_ms: float = 0.0
    #: Cores of the machine; 0: the workers' device is not the CPU that those processes run on, or nothing is known.
    host_cores: int = 0
    #: The same at `BUSY_RPS`: less, since whoever is awake already takes what has come meanwhile, too. 0: not known.
    host_ms_busy: float = 0.0

    def __post_init__(self) -> None:
        times = {"handover": self.handover_ms, "host time": self.host_ms, "busy host time": self.host_ms_busy}
        for name, value in times.items():
            if not 0.0 <= value < 1e9:
                raise InputError(f"{name} must be at least 0 ms but got {value:g}")

    def at(self, rate_rps: float) -> HostWork:
        """Return the cost at a request rate, between the two measured rates linear in the logarithm of the rate."""
        # Not measured under load, or no cheaper there: one figure holds at every rate.
        if not 0.0 < self.host_ms_busy < self.host_ms:
            return replace(self, host_ms_busy=0.0)
        # Held at the ends beyond the two rates: nothing was measured there, and a line would go below zero.
        part = math.log(min(max(rate_rps, CALM_RPS), BUSY_RPS) / CALM_RPS) / math.log(BUSY_RPS / CALM_RPS)
        return replace(self, host_ms=(1.0 - part) * self.host_ms + part * self.host_ms_busy, host_ms_busy=0.0)

    @property
    def event_ms(self) -> float:
        """CPU time at the arrival, and at the answer, of one request."""
        return self.host_ms / EVENTS_PER_REQUEST

    @property
    def can_disturb(self) -> bool:
        """Whether serving can slow batches down at all."""
        return self.host_cores > 0 and self.host_ms > 0.0


#: Nothing was measured, or a GPU computes.
NO_HOST_WORK = HostWork()


@dataclass(frozen=True, slots=True)
class LoadedReplica:
    """A replica at its request rate: ``server`` undisturbed, ``share_pct`` of the CPU, its turn group ``turns``."""

    server: BatchServer
    rate_rps: float
    share_pct: float
    turns: int = 0


def host_work_of_plan(planned_with: PlannedWith) -> HostWork:
    """Return the cost of serving that a map was planned with."""
    host = planned_with.host
    return HostWork(host.handover_ms, host.host_ms, host.host_cores, host.host_ms_busy)


def cores_of(shares: Sequence[tuple[float, int]], cores: int) -> tuple[CpuSlice, ...]:
    """Return the cores that the workers of each replica will run on, by share and turn group, numbered from 0.

    Raises `InputError` when the shares are more than the machine.
    """
    return plan_shared_slices(shares, tuple(range(cores)))


def disturb_servers(work: HostWork, replicas: Sequence[LoadedReplica], queueing: QueueModel) -> tuple[BatchServer, ...]:
    """Return the replicas of one machine with the time that serving these request rates costs them.

    ``replicas``: all of the machine's; ``queueing``: tells for which part of the time each is busy. Raises `InputError`
    when the shares are more than the machine.
    """
    if not work.can_disturb or not replicas:
        return tuple(replica.server for replica in replicas)
    work = work.at(math.fsum(replica.rate_rps for replica in replicas))
    slices = cores_of([(replica.share_pct, replica.turns) for replica in replicas], work.host_cores)
    alone = [min(1.0, queueing.sojourn(Arrivals(replica.rate_rps), replica.server).utilization) for replica in replicas]
    offered = work.host_ms / 1000.0 * math.fsum(replica.rate_rps for replica in replicas)
    lost = [0.0] * len(replicas)
    for _ in range(_ROUNDS):  # what is disturbed is busy for longer, and so are all cores at a time
        busy = [min(1.0, part / (1.0 - gone)) for part, gone in zip(alone, lost, strict=True)]
        parts = _host_work_fractions(replicas, slices, busy, work.host_cores)
        lost = [
            _clip_lost_part(offered * part * _probability_others_busy(index, slices, busy, work.host_cores))
            for index, part in enumerate(parts)
        ]
    return tuple(
        lengthen_times(loaded.server, gone, work.event_ms) for loaded, gone in zip(replicas, lost, strict=True)
    )


def disturb_at_worst(work: HostWork, server: BatchServer, rate_rps: float) -> BatchServer:
    """Return a replica in the worst case: all other cores always run batches, so that it bears all of the host's work.

    ``rate_rps`` is that of all requests to the machine. No placement of them disturbs the replica more.
    """
    if not work.can_disturb:
        return server
    work = work.at(rate_rps)
    return lengthen_times(server, _clip_lost_part(work.host_ms / 1000.0 * rate_rps), work.event_ms)


def lengthen_times(server: BatchServer, lost: float, event_ms: float) -> BatchServer:
    """Return a replica that loses a fraction of its time in interruptions of ``event_ms`` on average."""
    if lost <= 0.0:
        return server
    times = tuple(ms / (1.0 - lost) for ms in server.latency_ms)
    # The compound Poisson variance x·S·event_ms over S², at the full batch: a server has one cv for all batch sizes.
    extra = lost * event_ms / times[-1]
    return replace(
        server,
        latency_ms=times,
        latency_cv=math.sqrt(server.latency_cv**2 + extra),
        pause_cv=None if server.pause_cv is None else math.sqrt(server.pause_cv**2 + extra),
    )


def _clip_lost_part(part: float) -> float:
    return min(part, 1.0 - _LEAST_LEFT)


def _host_work_fractions(
    replicas: Sequence[LoadedReplica], slices: Sequence[CpuSlice], busy: Sequence[float], cores: int
) -> list[float]:
    """Return the fraction of the host's work, done while every core runs a batch, that delays each replica."""
    last = _last_start_fractions(replicas, slices, busy, cores)
    return [STAYS * part + (1.0 - STAYS) * len(own.cores) / cores for part, own in zip(last, slices, strict=True)]


def _last_start_fractions(
    replicas: Sequence[LoadedReplica], slices: Sequence[CpuSlice], busy: Sequence[float], cores: int
) -> list[float]:
    """Return for each replica how often its cores are the last to begin a batch when all cores come to be busy.

    Cores that run the same replicas begin together. They do so at the rate of their requests while they are idle, and
    are the last where all others run already: in proportion to ``rate (1 - busy) / busy``, which without requests is
    one over the time of a batch.
    """
    weights = {}
    for group in {tuple(i for i, own in enumerate(slices) if core in own.cores) for core in range(cores)} - {()}:
        runs = 1.0 - math.prod(1.0 - busy[i] for i in group)
        rate_rps = math.fsum(replicas[i].rate_rps for i in group)
        least_ms = min(replicas[i].server.latency_ms[0] for i in group)
        weights[group] = (1.0 - runs) * (rate_rps / runs if runs > 0.0 else 1000.0 / least_ms)
    total = math.fsum(weights.values())
    if not total:  # none of them ever rests
        return [1.0 / len(weights)] * len(replicas)
    return [math.fsum(weight for group, weight in weights.items() if i in group) / total for i in range(len(replicas))]


def _probability_others_busy(index: int, slices: Sequence[CpuSlice], busy: Sequence[float], cores: int) -> float:
    """Return the probability that every core that is not this replica's runs some batch."""
    mine = set(slices[index].cores)
    together = 1.0
    counted: set[int] = set()
    for core in range(cores):
        if core in mine or core in counted:
            continue
        here = [other for other, part in enumerate(slices) if core in part.cores]
        counted |= set(_fully_shared_cores(here, slices))
        together *= 1.0 - math.prod(1.0 - busy[other] for other in here)
    return together


def _fully_shared_cores(here: Sequence[int], slices: Sequence[CpuSlice]) -> Iterator[int]:
    """Yield the cores that run just the replicas ``here``: they are busy at the same times."""
    held = Counter(core for part in slices for core in part.cores)
    for core in slices[here[0]].cores if here else ():
        if held[core] == len(here) and all(core in slices[other].cores for other in here):
            yield core
