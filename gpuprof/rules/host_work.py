"""Host work: CPU time of serving besides the batches, and its effect on batch times.

Router, machine process and clients also need CPU time. On an idle core they do not delay batches. While every core runs
a batch, they mostly stay on their last core, the most recently idle core, and delay the batch there: short batches of a
busy model are delayed more than the long batches of its neighbours. The simulator models these events one by one
(`gpuprof.simulator.kernel`); this module gives their mean effect, for placement, checks and predictions. A running
replica i is disturbed while all other cores run batches, either because its cores were the last to begin a batch, or
with the same probability as any other core. Disturbances of ``event_ms`` arrive at random: they lengthen a time ``S``
to ``S / (1 - x)`` and add a variance of ``x S event_ms`` (a compound Poisson sum), where ``x`` is the fraction of time
lost by the replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gpuprof.domain.host_work import HostWork
from gpuprof.domain.sojourn import Arrivals, BatchServer, QueueModel
from gpuprof.rules.cpu_slices import CpuSlice, plan_shared_slices
from gpuprof.rules.turns import LoadedReplica

#: Probability that host work stays on its last core while every core runs a batch; otherwise the core is random.
#: Fitted to perf samples on two cores under Linux 6.18. Fraction of such host work on the core of the shorter batches:
#: with batches of 1 ms and 33 ms 83% and 90% (at 80% and 50% load; this constant gives 85% and 86%), with 7 ms and
#: 47 ms 70% (77%), and with 5 ms and 7 ms 65% (57%).
STAYS = 0.75
#: Least fraction of a core's time left by disturbances in the model; below it nothing is served in time anyway.
_LEAST_LEFT = 0.01
#: Fixed-point iterations in `disturb_servers`: lost time makes replicas busier, and busier replicas lose more time.
_ROUNDS = 4


def cores_of(shares: Sequence[tuple[float, int]], cores: int) -> tuple[CpuSlice, ...]:
    """Return the cores of each replica's workers, numbered from 0, by share and turn group.

    Raises `InputError` when the shares exceed the machine.
    """
    return plan_shared_slices(shares, tuple(range(cores)))


def disturb_servers(work: HostWork, replicas: Sequence[LoadedReplica], queueing: QueueModel) -> tuple[BatchServer, ...]:
    """Return the replicas of a machine with batch times lengthened by the host work for all their requests.

    ``replicas``: all replicas of the machine; ``queueing``: model of each replica's utilization. Raises `InputError`
    when the shares exceed the machine.
    """
    if not work.can_disturb or not replicas:
        return tuple(replica.server for replica in replicas)
    work = work.at(math.fsum(replica.rate_rps for replica in replicas))
    slices = cores_of([(replica.share_pct, replica.turns) for replica in replicas], work.host_cores)
    loads = [min(1.0, queueing.sojourn(Arrivals(replica.rate_rps), replica.server).utilization) for replica in replicas]
    host_load = work.host_ms / 1000.0 * math.fsum(replica.rate_rps for replica in replicas)
    fractions = [0.0] * len(replicas)
    for _ in range(_ROUNDS):  # disturbed replicas are busy for longer, so all cores are more often busy at once
        busy = [min(1.0, part / (1.0 - fraction)) for part, fraction in zip(loads, fractions, strict=True)]
        last = _last_start_fractions(replicas, slices, busy, work.host_cores)
        own = [len(cpu_slice.cores) / work.host_cores for cpu_slice in slices]
        parts = [STAYS * newest + (1.0 - STAYS) * part for newest, part in zip(last, own, strict=True)]
        # Of a time-sliced worker, other batches run on its other cores meanwhile: it loses a core's time alone.
        parts = [
            part / len(cpu_slice.cores) if replica.time_slice_ms else part
            for part, cpu_slice, replica in zip(parts, slices, replicas, strict=True)
        ]
        fractions = [
            _clip_lost_part(host_load * part * _probability_others_busy(index, slices, busy, work.host_cores))
            for index, part in enumerate(parts)
        ]
    return tuple(
        lengthen_times(loaded.server, fraction, work.event_ms)
        for loaded, fraction in zip(replicas, fractions, strict=True)
    )


def disturb_at_worst(work: HostWork, server: BatchServer, rate_rps: float) -> BatchServer:
    """Return a replica in the worst case: all other cores always run batches, and all host work interrupts it.

    ``rate_rps`` is the rate of all requests to the machine. No placement disturbs the replica more.
    """
    if not work.can_disturb:
        return server
    work = work.at(rate_rps)
    return lengthen_times(server, _clip_lost_part(work.host_ms / 1000.0 * rate_rps), work.event_ms)


def lengthen_times(server: BatchServer, lost_part: float, event_ms: float) -> BatchServer:
    """Return a replica that loses the fraction ``lost_part`` of its time to interruptions of mean ``event_ms``."""
    if lost_part <= 0.0:
        return server
    times = tuple(ms / (1.0 - lost_part) for ms in server.latency_ms)
    # The compound Poisson variance x·S·event_ms over S², at the full batch: a server has a single cv for all sizes.
    extra = lost_part * event_ms / times[-1]
    return replace(
        server,
        latency_ms=times,
        latency_cv=math.sqrt(server.latency_cv**2 + extra),
        pause_cv=None if server.pause_cv is None else math.sqrt(server.pause_cv**2 + extra),
    )


def _clip_lost_part(part: float) -> float:
    return min(part, 1.0 - _LEAST_LEFT)


def _last_start_fractions(
    replicas: Sequence[LoadedReplica], slices: Sequence[CpuSlice], busy: Sequence[float], cores: int
) -> list[float]:
    """Return the probability that each replica's cores are the last to begin a batch before all cores are busy.

    Cores with the same replicas begin together. While idle, they begin at their request rate, and are last if all
    other cores already run: with probability proportional to ``rate (1 - busy) / busy``, which without requests is
    the inverse of the batch time.
    """
    weights = {}
    groups = {tuple(i for i, cpu_slice in enumerate(slices) if core in cpu_slice.cores) for core in range(cores)}
    for group in groups - {()}:
        runs = 1.0 - math.prod(1.0 - busy[i] for i in group)
        rate_rps = math.fsum(replicas[i].rate_rps for i in group)
        least_ms = min(replicas[i].server.latency_ms[0] for i in group)
        weights[group] = (1.0 - runs) * (rate_rps / runs if runs > 0.0 else 1000.0 / least_ms)
    total = math.fsum(weights.values())
    if not total:  # no core is ever idle
        return [1.0 / len(weights)] * len(replicas)
    return [math.fsum(weight for group, weight in weights.items() if i in group) / total for i in range(len(replicas))]


def _probability_others_busy(index: int, slices: Sequence[CpuSlice], busy: Sequence[float], cores: int) -> float:
    """Return the probability that every core outside this replica's slice runs a batch."""
    others = set(range(cores)) - set(slices[index].cores)
    # Cores with the same replicas are busy at the same times.
    groups = {tuple(i for i, cpu_slice in enumerate(slices) if core in cpu_slice.cores) for core in others}
    return math.prod(1.0 - math.prod(1.0 - busy[i] for i in group) for group in groups)
