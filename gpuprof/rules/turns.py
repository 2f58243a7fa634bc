"""Models that share a worker: by turns, one batch at a time (temporal sharing, Choi et al., ATC'22), or time-sliced.

A worker is one process with a session for each of its models, one context and one share of a device. Batches run in the
order in which they are ready, and a model has a single batch at the worker. So a batch waits for the batches of the
other models that are ready before it: at most one of each, at their planned rates mostly none. Under the queueing model
the wait is part of the time of a batch (`add_waits`); under a latency budget every batch must be in time after the
longest wait (`find_cycle_ms`).

Time-sliced models have their batches running at once, as in Triton: in rotation, each for up to a time slice. The time
in which other batches run is called the wait of a batch, too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from gpuprof.domain.deployment import DeploymentMap, Replica
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.number_format import ROUNDING
from gpuprof.domain.sojourn import BatchServer
from gpuprof.errors import InputError

#: Estimate of a workload with neighbours, none with turns.
Ask = Callable[[Workload, Sequence[Workload]], Estimate]

#: Most iterations of the mean waits, which depend on one another.
_ROUNDS = 500
#: Part of the batches beyond the percentile at which waits are matched, and that percentile of the normal law.
_LATE = 0.01
_NORMAL_P99 = NormalDist().inv_cdf(1.0 - _LATE)


@dataclass(frozen=True, slots=True)
class LoadedReplica:
    """A replica at its request rate: its ``server``, ``share_pct`` of the device, and group ``turns`` of its worker.

    With ``time_slice_ms``, the batches of the group run at once.
    """

    server: BatchServer
    rate_rps: float
    share_pct: float
    turns: int = 0
    time_slice_ms: float | None = None


def load_replica(replica: Replica) -> LoadedReplica:
    """Return a replica of a map at its planned rate, with the map's times of its batches."""
    predicted = replica.predicted
    times_ms = replica.batch_latency_ms or (predicted.latency_ms,) * replica.batch
    server = BatchServer(
        tuple(max(ms, ROUNDING) for ms in times_ms),  # must be above 0
        replica.batch,
        replica.max_wait_ms,
        replica.processes,
        predicted.latency_cv,
        predicted.pause_factor,
        predicted.pause_cv,
    )
    return LoadedReplica(server, replica.rate_rps, replica.sm_share_pct, replica.turns, replica.time_slice_ms)


def require_turns(deployment: DeploymentMap) -> None:
    """Raise `InputError` for a map with time-sliced models: a worker of ``gpuprof serve`` runs one batch at a time."""
    if any(replica.time_slice_ms for *_, replica in deployment.places()):
        raise InputError(
            "the map is planned for models that run at once, and gpuprof serve runs those of a worker by turns",
            "serve it by Triton, or place without --triton-repository and --time-slice",
        )


def involves_turns(workload: Workload, neighbours: Sequence[Workload]) -> bool:
    """Return whether any workload takes turns, so that `estimate_turn` must be used."""
    return bool(workload.turns) or any(neighbour.turns for neighbour in neighbours)


def estimate_turn(ask: Ask, workload: Workload, neighbours: Sequence[Workload]) -> Estimate:
    """Return the estimate of a batch while it runs, for a workload with turns or with neighbours that take turns.

    Of neighbours that take turns among themselves, only one runs at a time: the neighbour that, alone, slows the
    workload most is used. Raises `InputError` as the estimator for any of the workloads.
    """
    isolated, concurrent = replace(workload, turns=0), without_turn_mates(workload, neighbours)
    running = [workload for workload in concurrent if not workload.turns]
    for number in sorted({workload.turns for workload in concurrent} - {0}):
        group = [replace(workload, turns=0) for workload in concurrent if workload.turns == number]
        # Of equally slow neighbours the first by name: the result must not depend on their order.
        running.append(max(sorted(group), key=lambda workload: ask(isolated, [workload]).latency_ms.upper()))
    return replace(ask(isolated, sorted(running)), workload=workload)


def without_turn_mates(workload: Workload, neighbours: Sequence[Workload]) -> tuple[Workload, ...]:
    """Return the neighbours that may run at the same time as the workload: all outside its turn group."""
    return tuple(neighbour for neighbour in neighbours if not workload.turns or neighbour.turns != workload.turns)


def held_shares(shares: Iterable[tuple[float, int]]) -> list[float]:
    """Return the distinct shares of a partition in percent, from pairs of a share and its turn group.

    Examples
    --------
    >>> held_shares([(40.0, 1), (60.0, 0), (40.0, 1)])
    [40.0, 60.0]
    """
    pairs = list(shares)
    firsts = list_firsts([turns for _, turns in pairs])
    return [share for (share, _), is_first in zip(pairs, firsts, strict=True) if is_first]


def list_firsts(turns: Sequence[int]) -> list[bool]:
    """Return for each replica of a partition, by its turn group, whether it is the first of its worker.

    A worker's process, share and context are counted with its first replica. Replicas without turns are all first.
    """
    numbers: set[int] = set()
    firsts = []
    for number in turns:
        firsts.append(number not in numbers)
        numbers |= {number} if number else set()
    return firsts


def find_cycle_ms(own_ms: float, mates_ms: Sequence[float], time_slice_ms: float | None) -> float:
    """Return the longest time of a batch from ready to done: with a full batch of every other model of its worker.

    Time-sliced, batches of all other models may run all the time, and have a slice before each of the batch's own.
    """
    if time_slice_ms is None:
        return own_ms + math.fsum(mates_ms)
    slices = math.ceil(own_ms / time_slice_ms)
    return own_ms + math.fsum(slices * min(ms, time_slice_ms) for ms in mates_ms)


def add_waits(replicas: Sequence[LoadedReplica]) -> tuple[BatchServer, ...]:
    """Return the replicas of a partition as queues of their own, with waits for turns as part of the batch times.

    A batch finds at most one batch of each other model: running, with the mean residual time E[S²]/2E[S], or waiting,
    which gives the mean waits. The wait of a batch that waits at all is nearly exponential. A batch queued behind
    another of its model waits longer: for the batches that arrived meanwhile and, as such queueing becomes frequent,
    nearly for a full batch of each other model. In an overloaded worker all batches wait that long. Over workers of 2
    to 41 models, busy for 37 to 90% of the time, the 99th percentiles are 0.88 to 1.26 of the simulated ones
    (`tests/rules/test_turns.py`).

    Time-sliced, see `_SlicedMember`.
    """
    members = _group_members(replicas)
    return tuple(
        replica.server if member is None else member.with_wait()
        for replica, member in zip(replicas, members, strict=True)
    )


def find_mean_waits(replicas: Sequence[LoadedReplica]) -> tuple[float, ...]:
    """Return the mean wait for its turn, in milliseconds, of a batch of each replica of a partition."""
    return tuple(0.0 if member is None else member.wait_ms for member in _group_members(replicas))


def _group_members(replicas: Sequence[LoadedReplica]) -> list[_Member | None]:
    workers: defaultdict[int, Counter[LoadedReplica]] = defaultdict(Counter)
    for replica in replicas:
        workers[replica.turns][replica] += 1
    members = {replica: member for turns, kinds in workers.items() if turns for replica, member in _find_waits(kinds)}
    return [members.get(replica) for replica in replicas]


class _Member:
    """A model of a worker, and the number of equal ones; its wait and usual batch are found by iteration."""

    def __init__(self, replica: LoadedReplica, count: int) -> None:
        self.server, self.rate, self.count = replica.server, replica.rate_rps / 1000.0, count
        self.times_ms = replica.server.latency_ms[: replica.server.batch]
        # Between its batches a model of a worker mostly rests.
        self.rested = max(1.0, self.server.pause_factor)
        self.cv = max(self.server.latency_cv, self.server.pause_cv or 0.0)
        self.full_ms, self.longest_ms = self.rested * self.times_ms[-1], 0.0
        self.turn_ms = self.full_ms
        self.wait_ms = self.late_ms = self.queued_ms = 0.0
        self.choose_size()

    def choose_size(self) -> None:
        """Set the batch size to the requests during the preceding batch, or to one request on an idle worker."""
        self.turn_ms, size = self._hold(self.rate * (self.wait_ms + self.turn_ms))
        self.busy = min(self.rate / size * self.turn_ms, self.turn_ms / (self.turn_ms + self.wait_ms))

    def _hold(self, arrivals: float) -> tuple[float, float]:
        """Return the time and size of a batch after one during which ``arrivals`` requests arrive on average."""
        size = min(float(len(self.times_ms)), arrivals + math.exp(-arrivals))
        below = int(size)
        above_ms = self.times_ms[min(below, len(self.times_ms) - 1)]
        return self.rested * (self.times_ms[below - 1] + (size - below) * (above_ms - self.times_ms[below - 1])), size

    @property
    def backlog_ms(self) -> float:
        """Mean time that other batches wait for this model: for its running batch, and for its waiting one."""
        return self.busy * (self.turn_ms * (1.0 + self.cv**2) / 2.0 + self.wait_ms)

    def add_since(self, cycle_ms: float) -> float:
        """Return the mean time of this model's batch that arrives within a cycle; 0 without requests."""
        return -math.expm1(-self.rate * cycle_ms) * self._hold(self.rate * cycle_ms)[0]

    def with_wait(self) -> BatchServer:
        """Return the server with its wait added to its times; the variation is that of the usual batch."""
        server, turn_ms = self.server, self.turn_ms / self.rested
        return replace(
            server,
            latency_ms=tuple(ms + self.queued_ms for ms in server.latency_ms),
            latency_cv=_join_variation(turn_ms, self.cv, self.wait_ms, self.late_ms),
            pause_factor=(server.pause_factor * turn_ms + self.wait_ms) / (turn_ms + self.queued_ms),
            pause_cv=None,
        )


def _find_waits(kinds: Mapping[LoadedReplica, int]) -> list[tuple[LoadedReplica, _Member]]:
    """Return the models of a worker, equal ones once, with the mean and 99th percentile of their waits."""
    if any(replica.time_slice_ms for replica in kinds):
        sliced = [_SlicedMember(replica, count) for replica, count in kinds.items()]
        _find_slowdowns(sliced)
        return list(zip(kinds, sliced, strict=True))
    members = [_Member(replica, count) for replica, count in kinds.items()]
    cycle_ms = math.fsum(member.count * member.full_ms for member in members)
    for member in members:
        member.longest_ms = cycle_ms - member.full_ms
    if math.fsum(member.count * member.rate * member.full_ms / len(member.times_ms) for member in members) >= 1.0:
        for member in members:
            member.wait_ms = member.late_ms = member.queued_ms = member.longest_ms
        return list(zip(kinds, members, strict=True))
    for _ in range(_ROUNDS):
        backlog_ms, change_ms = math.fsum(member.count * member.backlog_ms for member in members), 0.0
        waits_ms = [min(max(0.0, backlog_ms - member.backlog_ms), member.longest_ms) for member in members]
        for member, wait_ms in zip(members, waits_ms, strict=True):
            change_ms = max(change_ms, abs(wait_ms - member.wait_ms))
            member.wait_ms = wait_ms
            member.choose_size()
        if change_ms <= ROUNDING * cycle_ms:
            break
    busy = math.fsum(member.count * member.busy for member in members)
    for member in members:
        others_busy = max(busy - member.busy, _LATE)
        late_ms = member.wait_ms / others_busy * math.log(max(1.0, others_busy / _LATE))
        member.late_ms = min(max(late_ms, member.wait_ms), member.longest_ms)
        member.queued_ms = _find_queued_ms(member, members)
    return list(zip(kinds, members, strict=True))


def _find_queued_ms(member: _Member, members: Sequence[_Member]) -> float:
    """Return the mean wait of a batch that was queued behind another batch of the same model."""
    queued_ms = member.wait_ms
    for _ in range(_ROUNDS):
        before_ms, since_ms = queued_ms, member.turn_ms + queued_ms
        added_ms = math.fsum(mate.count * mate.add_since(since_ms) for mate in members) - member.add_since(since_ms)
        queued_ms = min(added_ms, member.longest_ms)
        if abs(queued_ms - before_ms) <= ROUNDING * member.longest_ms:
            break
    queued_ms = max(queued_ms, member.wait_ms)
    load = min(1.0, member.rate * (member.turn_ms + queued_ms) / len(member.times_ms))
    return queued_ms + load**2 * (member.longest_ms - queued_ms)


class _SlicedMember(_Member):
    """A time-sliced model.

    A batch is slowed by each other batch that runs, as in a processor-sharing queue, or waits for a slice of it at
    least. The number of running batches varies as in such a queue (Coffman, Muntz and Trotter, JACM 17, 1970). Over
    workers of 2 to 41 models, busy for 37 to 82% of the time, the 99th percentiles with short slices are 0.9 to 1.5 of
    the simulated ones (`tests/rules/test_turns.py`); batches shorter than a slice beside much longer ones are later.
    """

    def __init__(self, replica: LoadedReplica, count: int) -> None:
        super().__init__(replica, count)
        self.slice_ms = replica.time_slice_ms or 0.0
        #: Part of the time in which a batch of the model is begun and not ended, and mean number of such other batches.
        self.running = self.beside = 0.0
        self.others: list[tuple[_SlicedMember, int]] = []  #: The other models, and their numbers.

    def slow_down(self) -> float:
        """Set the mean wait of the usual batch, and its size; return the relative change."""
        self.beside = math.fsum(count * mate.running for mate, count in self.others)
        before_ms, self.wait_ms = self.wait_ms, self.wait_for(self.turn_ms)
        self.choose_size()
        return abs(self.wait_ms - before_ms) / self.full_ms

    def wait_for(self, batch_ms: float) -> float:
        """Return the mean wait of a batch of ``batch_ms``."""
        return math.fsum(count * mate.running * self._wait_beside(mate, batch_ms) for mate, count in self.others)

    def _wait_beside(self, mate: _SlicedMember, batch_ms: float) -> float:
        # Of a running batch half a slice is left on average, and those behind it have whole slices.
        crowd = max(0.0, self.beside - mate.running)
        return max(batch_ms, min(mate.turn_ms, self.slice_ms) * (0.5 + crowd) / (1.0 + crowd))

    def with_wait(self) -> BatchServer:
        """Return the server with its wait added to its times; the variation is that of the usual batch."""
        server, turn_ms, variance = self.server, self.turn_ms / self.rested, 0.0
        for mate, count in self.others:
            # Beside one model a batch runs or not, beside many the number of running batches is geometric.
            part, crowd = min(mate.running, 1.0 - ROUNDING), 1.0 + max(0.0, self.beside - mate.running)
            spells = (self.turn_ms + self.wait_ms) / ((mate.turn_ms + mate.wait_ms) * (1.0 - part) * crowd)
            spread = count * part * (1.0 - part) * crowd * 2.0 * (spells + math.expm1(-spells)) / spells**2
            variance += spread * self._wait_beside(mate, self.turn_ms) ** 2
        scv = variance / (self.turn_ms + self.wait_ms) ** 2
        # Long batches are those behind which others queue, and these find the same batches beside them.
        *times_ms, usual_ms = (
            ms + self.wait_for(ms) + scv * (ms + self.wait_for(ms)) for ms in (*server.latency_ms, turn_ms)
        )
        return replace(
            server,
            latency_ms=tuple(times_ms),
            latency_cv=math.sqrt(self.cv**2 + scv),
            pause_factor=(server.pause_factor * turn_ms + self.wait_ms) / usual_ms,
            pause_cv=None,
        )


def _find_slowdowns(members: Sequence[_SlicedMember]) -> None:
    """Set the parts of the time in which the models of a worker run, and their mean waits."""
    for member in members:
        member.others = [(mate, mate.count - (mate is member)) for mate in members]
    for _ in range(_ROUNDS):
        total = math.fsum(member.count * member.running for member in members)
        parts = [min(1.0, member.busy * (1.0 + total - member.running)) for member in members]
        for member, part in zip(members, parts, strict=True):
            member.running = part
        if max([member.slow_down() for member in members]) <= ROUNDING:
            break


def _join_variation(turn_ms: float, cv: float, wait_ms: float, late_ms: float) -> float:
    """Return the coefficient of variation of the gamma distribution with the 99th percentile of wait plus batch.

    The percentile of a gamma distribution: Wilson and Hilferty, PNAS 17, 1931.
    """
    mean_ms = turn_ms + wait_ms
    late = (turn_ms + math.hypot(_NORMAL_P99 * cv * turn_ms, late_ms)) / mean_ms
    excess = min(max(late, 1.0) ** (1.0 / 3.0) - 1.0, _NORMAL_P99**2 / 4.0)
    return max(1.5 * (_NORMAL_P99 - math.sqrt(_NORMAL_P99**2 - 4.0 * excess)), cv * turn_ms / mean_ms)
