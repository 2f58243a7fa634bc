"""The routing rules, pure: which replica takes a request, and which requests are refused at once.

The router and the simulator obey the same rules: those that take nothing but numbers and sequences of numbers
(`finish_ms`, `nth_smallest`, `next_living`, `is_hopeless`, `is_given_up`, `goes_alone`) are what the simulator
compiles, and so are written with loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpuprof.errors import unknown_name


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica has to do at one moment.

    Attributes
    ----------
    waiting : int
        Requests in its queue.
    oldest_wait_ms : float
        How long the oldest of them has waited; 0 when the queue is empty.
    busy_ms : tuple of float, one for each process that lives
        Time until each is expected to have finished all that it was given; 0: idle.
    latency_ms : sequence of float
        Expected time of a batch of 1, 2, … requests; its length is the largest batch.
    max_wait_ms : float
        How long a batch waits to be filled.
    """

    waiting: int
    oldest_wait_ms: float
    busy_ms: tuple[float, ...]
    latency_ms: Sequence[float]
    max_wait_ms: float = 0.0


def expected_finish_ms(load: ReplicaLoad) -> float:
    """Return the time until a request that joins the queue now is expected to be answered.

    Full batches ahead of it are spread over the processes; its own batch starts when a process is free and it is
    full or has waited long enough. Infinite when no process lives.
    """
    return finish_ms(load.waiting, load.oldest_wait_ms, load.busy_ms, load.latency_ms, load.max_wait_ms)


def finish_ms(
    waiting: int, oldest_wait_ms: float, busy_ms: Sequence[float], latency_ms: Sequence[float], max_wait_ms: float
) -> float:
    """Return `expected_finish_ms` of a replica whose `ReplicaLoad` has these values."""
    processes = len(busy_ms)
    if processes == 0:
        return math.inf
    batch = len(latency_ms)
    ahead = waiting // batch if waiting >= batch else 0
    beside = waiting - ahead * batch
    start, total = busy_ms[0], 0.0
    for busy in busy_ms:
        start = min(start, busy)
        total += busy
    if ahead > 0:
        start = max(start, (total + ahead * latency_ms[batch - 1]) / processes)
    if beside + 1 < batch:
        waited = oldest_wait_ms if beside > 0 and ahead == 0 else 0.0
        start = max(start, max_wait_ms - waited)
    return start + latency_ms[beside]


def nth_smallest(values: Sequence[float], turn: int) -> int:
    """Return the position of the smallest value; of ``n`` equal ones that which is ``turn % n`` in order."""
    best, equal = values[0], 0
    for value in values:
        if value < best:
            best, equal = value, 0
        if value == best:
            equal += 1
    left = turn % equal
    for position in range(len(values)):
        if values[position] == best:
            if left == 0:
                return position
            left -= 1
    return 0


def next_living(living: Sequence[int], last: int) -> int:
    """Return the first position after ``last``, going round, with a value above 0; ``last + 1`` when none has."""
    count = len(living)
    for step in range(1, count + 1):
        position = (last + step) % count
        if living[position] > 0:
            return position
    return (last + 1) % count


class RoutingRule(Protocol):
    """Chooses the replica for the next request of one model."""

    def choose(self, loads: Sequence[ReplicaLoad]) -> int:
        """Return the position of the chosen replica in ``loads``, which holds at least one."""
        ...


class FastestFirst:
    """The replica that is expected to answer first; among equals each in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, loads: Sequence[ReplicaLoad]) -> int:
        """Return the position of the smallest expected finishing time."""
        if len(loads) == 1:
            return 0
        self._turn += 1
        return nth_smallest([expected_finish_ms(load) for load in loads], self._turn)


class RoundRobin:
    """Each replica in turn, whatever it has to do (Elvinger's thesis, section 4.3)."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, loads: Sequence[ReplicaLoad]) -> int:
        """Return the next position; replicas without a living process are passed over while another has one."""
        self._turn = next_living([len(load.busy_ms) for load in loads], self._turn)
        return self._turn


RULES: dict[str, type[FastestFirst] | type[RoundRobin]] = {"fastest": FastestFirst, "round-robin": RoundRobin}


def routing_rule(name: str) -> RoutingRule:
    """Return a new rule of this name.

    Raises
    ------
    InputError
        When there is none.
    """
    if name not in RULES:
        raise unknown_name("routing rule", name, list(RULES))
    return RULES[name]()


#: The part of a deadline that early refusal keeps in hand at least: expected times are means, and half of all times are
#: longer. The server keeps more where it sees that it must (`gpuprof.serving.router.reserve`).
RESERVE = 0.1


def is_hopeless(finish_ms: float, waited_ms: float, deadline_ms: float, reserve: float = RESERVE) -> bool:
    """Return whether a request that would be answered in ``finish_ms`` misses its deadline and is to be refused.

    Under overload every request that is let in comes close to the limit; without the reserve half would be late.

    Parameters
    ----------
    finish_ms : float
        From now on, by `expected_finish_ms`.
    waited_ms : float
        What has passed since the request arrived.
    deadline_ms : float
        Its SLO, or what it asked for.
    reserve : float
        Part of the deadline.
    """
    return waited_ms + finish_ms > (1.0 - reserve) * deadline_ms


#: How often a request is sent before it is given up: one that kills every worker must not kill them for ever.
MAX_ATTEMPTS = 3


def is_given_up(attempts: int) -> bool:
    """Return whether a request that was sent so often, each time to a worker that ended, is not sent again."""
    return attempts >= MAX_ATTEMPTS


def goes_alone(attempts: int) -> bool:
    """Return whether a request that was sent so often in vain shares no batch, lest it take others with it again."""
    return attempts > 1
