"""The routing rules, pure: which replica takes a request, and which requests are refused at once.

The router and the simulator obey the same rules. Those that take nothing but numbers and sequences of numbers are what
the simulator compiles, and so are written with loops: `expect_rows`, `finish_ms`, `decay_count`, `update_mean_left_ms`,
`extend_wait_ms`, `forecast_joining`, `makes_oldest_late`, `argmin_in_turn`, `next_live_replica`, `is_refused`,
`correct_expected_ms`, `adapt_reserve`, `is_retry_limit_reached`, `must_be_alone`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpuprof.errors import unknown_name


@dataclass(slots=True)  # made for every request: frozen it would take three times as long
class ReplicaLoad:
    """Queue and work in progress of a replica at one moment."""

    waiting: int  #: Requests in its queue.
    oldest_wait_ms: float  #: How long the oldest of them has waited; 0 when the queue is empty.
    busy_ms: tuple[float, ...]  #: Time until each is expected to have finished all that it was given; 0: idle.
    latency_ms: Sequence[float]  #: Expected time of a batch of 1, 2, … requests; its length is the largest batch.
    max_wait_ms: float = 0.0  #: How long a batch waits to be filled.
    #: Processes that run no batch; one whose batch takes longer than expected is busy, though its ``busy_ms`` is 0.
    idle: int = 0
    #: Requests that the next batch is expected to hold in the end, by `forecast_joining`; 0 while a process is idle.
    joining: int = 0
    oldest_deadline_ms: float = math.inf  #: By when the oldest of those that wait is to be answered, from its arrival.


def expected_finish_ms(load: ReplicaLoad) -> float:
    """Return the time until a request that joins the queue now is expected to be answered.

    Full batches ahead of it are spread over the processes; its own batch starts when a process is free and it is
    full or has waited long enough. Where every process runs a batch, others join its own until that starts: its time
    is that of the batch as it is expected to be then. By the time of what waits now the request would be let in, and be
    late with all that come after it. Infinite when no process lives.
    """
    rows = expect_rows(load.waiting, load.joining, len(load.latency_ms))
    return finish_ms(load.waiting, load.oldest_wait_ms, load.busy_ms, rows, load.latency_ms, load.max_wait_ms)


def expect_rows(waiting: int, joining: int, batch: int) -> int:
    """Return the expected size of the batch of a request that joins the queue now.

    ``waiting`` and ``joining``: as in `ReplicaLoad`; ``batch``: the largest batch.
    """
    return min(batch, max(joining, waiting % batch + 1))


def finish_ms(
    waiting: int,
    oldest_wait_ms: float,
    busy_ms: Sequence[float],
    rows: int,
    latency_ms: Sequence[float],
    max_wait_ms: float,
) -> float:
    """Return `expected_finish_ms` of a replica whose `ReplicaLoad` has these values; ``rows`` is by `expect_rows`."""
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
    waited = oldest_wait_ms if beside > 0 and ahead == 0 else 0.0
    if rows < batch:
        return max(start, max_wait_ms - waited) + latency_ms[rows - 1]
    return start + latency_ms[batch - 1]


#: Time constant of the exponential decay of a replica's arrival counts, in times of a full batch.
_COUNTED_BATCHES = 10.0


def decay_count(count: float, elapsed_ms: float, full_batch_ms: float) -> float:
    """Return an exponentially decayed count of arrivals at a replica after ``elapsed_ms``."""
    return count * math.exp(-elapsed_ms / (_COUNTED_BATCHES * full_batch_ms)) if full_batch_ms > 0.0 else 0.0


#: Fractions of refused arrivals at a replica: from the first on its batches wait for part of the time of a full one,
#: from the second on as long as they can. While little is refused, to hold a batch longer costs more than it fills.
_FEW_REFUSED, _FEW_WAIT, _MANY_REFUSED = 0.005, 0.5, 0.04
#: Of the time that an oldest request has to spare: the last of it would be lost to rounding.
_LATEST_PART = 0.999


def extend_wait_ms(
    max_wait_ms: float, refused: float, arrivals: float, allowed_ms: float, latency_ms: Sequence[float]
) -> float:
    """Return how long a batch waits to be filled at a replica that must refuse requests.

    A process that is free takes what is there, which answers soonest while there is time to spare. Near the capacity it
    costs goodput: a batch of one takes nearly as long as a full one. So the more is refused, the longer an oldest
    request waits for others: soon half the time of a full batch, at last as long as even that keeps it in time.
    ``max_wait_ms``: how long it waits where nothing is refused; ``refused``, ``arrivals``: requests that were sent to
    the replica and refused, and all that were sent there, as `decay_count` leaves them; ``allowed_ms``: by when a
    request must be answered to be let in; infinite where none is refused; ``latency_ms``: expected time of a batch of
    1, 2, … requests. The longest counts, not that of a full batch: measured, a smaller one may take longer, and a
    request that made it so would be refused as long as the oldest waits (`makes_oldest_late`).
    """
    if refused <= 0.0 or arrivals <= 0.0:
        return max_wait_ms
    longest_batch_ms = 0.0
    for batch_ms in latency_ms:
        if batch_ms > longest_batch_ms:  # for every request: a call of `max` would take three times as long
            longest_batch_ms = batch_ms
    part, longest_ms = refused / arrivals, _LATEST_PART * max(0.0, allowed_ms - longest_batch_ms)
    soon_ms = min(1.0, part / _FEW_REFUSED) * min(longest_ms, _FEW_WAIT * latency_ms[len(latency_ms) - 1])
    return max(max_wait_ms, soon_ms, min(1.0, part / _MANY_REFUSED) * longest_ms)


def update_mean_left_ms(mean_ms: float, left_ms: float, count: float) -> float:
    """Return the updated mean time that arrivals at a replica wait for an idle process, after one more arrival.

    One of several replicas gets its requests shortly before it is free, a lonely one all the time. ``mean_ms`` and
    ``left_ms``: the mean until now, and the time until a process is free; ``count``: as `decay_count` leaves it: over
    so many arrivals the mean is taken.
    """
    return mean_ms + (left_ms - mean_ms) / max(1.0, count)


def forecast_joining(
    count: float, batch_ms: float, latency_ms: Sequence[float], processes: int, left_ms: float, allowed_ms: float
) -> int:
    """Return the expected size of the next batch when one of ``batch_ms`` has just begun.

    These are the arrivals, until a process is free, that the next batch can still answer in time, and half a standard
    deviation of their number more. Who comes too early cannot wait for a long batch: the larger the next batch, the
    fewer it may hold. The number is the one at which both agree.

    Parameters
    ----------
    count : float
        Arrivals at the replica, refused ones too, as `decay_count` leaves them.
    batch_ms : float
        Expected time of the batch that begins.
    latency_ms : sequence of float
        Expected time of a batch of 1, 2, … requests; its length is the largest batch.
    processes : int
        Of the replica.
    left_ms : float
        Mean time that arrivals wait for a process, by `update_mean_left_ms`: they are spread evenly over twice that.
    allowed_ms : float
        By when a request must be answered to be let in; infinite where none is refused.
    """
    full_ms = latency_ms[len(latency_ms) - 1]
    if full_ms <= 0.0:
        return 0
    all_arrivals = count * batch_ms / (_COUNTED_BATCHES * full_ms * processes)
    low, high = 0, len(latency_ms)
    while low < high:
        size = (low + high + 1) // 2
        room_ms = max(0.0, allowed_ms - latency_ms[size - 1])
        arrivals = all_arrivals * (1.0 if room_ms >= 2.0 * left_ms else room_ms / (2.0 * left_ms))
        # The right side falls as the size grows, so bisection finds the last size that holds; the last 0.5 rounds.
        if size <= arrivals + 0.5 * math.sqrt(arrivals) + 0.5:
            low = size
        else:
            high = size - 1
    return low


def makes_oldest_late(
    waiting: int,
    oldest_wait_ms: float,
    busy_ms: Sequence[float],
    latency_ms: Sequence[float],
    max_wait_ms: float,
    allowed_ms: float,
) -> bool:
    """Return whether the oldest request would be answered within ``allowed_ms`` but for one more in its batch.

    The first values are those of `ReplicaLoad`.
    """
    if waiting == 0 or waiting >= len(latency_ms) or len(busy_ms) == 0:
        return False
    start = busy_ms[0]
    for busy in busy_ms:
        start = min(start, busy)
    begun = oldest_wait_ms + max(start, max_wait_ms - oldest_wait_ms)
    filled = oldest_wait_ms + start if waiting + 1 == len(latency_ms) else begun  # a full batch waits for no others
    return begun + latency_ms[waiting - 1] <= allowed_ms < filled + latency_ms[waiting]


def argmin_in_turn(values: Sequence[float], turn: int) -> int:
    """Return the position of the smallest value; of ``n`` ties the one at ``turn % n``."""
    best, equal = values[0], 0
    for value in values:
        if value < best:
            best, equal = value, 0
        if value == best:
            # Counted, then looked for again: compiled code of the simulator must allocate nothing, so there is no list
            # of equals.
            equal += 1
    remaining = turn % equal
    for position in range(len(values)):
        if values[position] == best:
            if remaining == 0:
                return position
            remaining -= 1
    return 0


def next_live_replica(living: Sequence[int], last: int) -> int:
    """Return the first position after ``last``, cyclically, with a value above 0; ``last + 1`` when there is none."""
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


class FastestFirst:
    """The replica with the earliest expected completion; ties in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, loads: Sequence[ReplicaLoad]) -> int:
        """Return the position of the smallest expected finishing time."""
        if len(loads) == 1:
            return 0
        self._turn += 1
        return argmin_in_turn([expected_finish_ms(load) for load in loads], self._turn)


class RoundRobin:
    """Each replica in turn, whatever its load (Elvinger's thesis, section 4.3)."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, loads: Sequence[ReplicaLoad]) -> int:
        """Return the next position; replicas without a living process are passed over while another has one."""
        self._turn = next_live_replica([len(load.busy_ms) for load in loads], self._turn)
        return self._turn


RULES: dict[str, type[FastestFirst] | type[RoundRobin]] = {"fastest": FastestFirst, "round-robin": RoundRobin}


def routing_rule(name: str) -> RoutingRule:
    """Return a new rule of this name. Raises `InputError` when there is none."""
    if name not in RULES:
        raise unknown_name("routing rule", name, list(RULES))
    return RULES[name]()


#: The part of a deadline that early refusal keeps in hand at first: expected times are means, and half of all times are
#: longer. It is adapted to how far expectations were off (`adapt_reserve`), between these bounds.
RESERVE, LEAST_RESERVE, LARGEST_RESERVE = 0.05, 0.001, 0.3
_RESERVE_STEP = 0.02
#: Only what was expected to take so much of its deadline says something of those that just meet theirs.
_NEAR_LIMIT = 0.5
#: A reserve above its usual one comes back to it, by half in each half-life; what is usual is its mean over so long.
_RESERVE_HALF_LIFE_MS, _USUAL_RESERVE_MS = 2_000.0, 60_000.0


def is_refused(waiting: int, idle: int, finish_ms: float, waited_ms: float, deadline_ms: float, reserve: float) -> bool:
    """Return whether admission control refuses a request at the chosen replica because it would miss its deadline.

    Under overload every request that is let in comes close to the limit; without the reserve half would be late. One
    that finds a process idle and nobody waiting is let in, whatever is expected of it: it takes no time from others,
    and where expectations are wrong it is how that is found out.

    Parameters
    ----------
    waiting, idle : int
        Requests in the replica's queue; processes of it that run no batch.
    finish_ms : float
        From now on, by `expected_finish_ms`.
    waited_ms : float
        What has passed since the request arrived.
    deadline_ms : float
        Its SLO, or what it asked for.
    reserve : float
        Part of the deadline.
    """
    return (waiting > 0 or idle == 0) and waited_ms + finish_ms > (1.0 - reserve) * deadline_ms


def correct_expected_ms(expected_ms: float, expected_rows: int, rows: int, latency_ms: Sequence[float]) -> float:
    """Return when a request is expected to be answered once its batch is sent, by how many it turned out to hold.

    What joins a batch makes it longer than its first requests were told, and is let in only if they stay in time
    (`makes_oldest_late`): it shows nothing of how far batch times are off, and so must not raise the reserve. Nor does
    the time for which a free process held a batch to be filled: such a batch is expected from when it is sent.
    ``expected_ms``: from its arrival to its answer, as it was expected when it was let in; ``expected_rows`` and
    ``rows``: what its batch was expected to hold then, by `expect_rows`, and what it holds; ``latency_ms``: expected
    time of a batch of 1, 2, … requests.
    """
    return expected_ms + latency_ms[rows - 1] - latency_ms[expected_rows - 1]


def adapt_reserve(
    reserve: float, expected_ms: float, took_ms: float, deadline_ms: float, late_part: float, together: int
) -> float:
    """Return the part of a deadline to keep in hand after a request was answered.

    Each answer moves it by a step, up where the request would have been late at the limit, down where not; the steps
    are as large as the percentile of the SLO and what is left of it, so that it rests where just that part is in time.
    The requests of a batch are late together: all of them are one step.

    Parameters
    ----------
    reserve : float
        Kept in hand until now.
    expected_ms, took_ms : float
        From the request's arrival to its answer: as it was expected, by `correct_expected_ms`, and as it came.
    deadline_ms : float
        Its SLO, or what it asked for.
    late_part : float
        Of the requests that may be late: 0.01 for an SLO at the 99th percentile.
    together : int
        Requests of its batch.
    """
    if expected_ms < _NEAR_LIMIT * deadline_ms:
        return reserve
    # Would it have been late at the limit? There it is expected to take (1 - reserve) · deadline, and late once it
    # takes the deadline: once it takes 1 / (1 - reserve) times what was expected.
    late = 1.0 if took_ms * (1.0 - reserve) > expected_ms else 0.0
    return min(LARGEST_RESERVE, max(LEAST_RESERVE, reserve + _RESERVE_STEP * (late - late_part) / together))


def relax_reserve(reserve: float, usual: float, elapsed_ms: float) -> float:
    """Return the reserved part of a deadline ``elapsed_ms`` after it was ``reserve``; see `usual_reserve`.

    What an overload or a pause has raised refuses the requests that could correct it; so it is given up again.
    """
    if reserve <= usual:
        return reserve
    return usual + (reserve - usual) * math.exp(-math.log(2.0) * elapsed_ms / _RESERVE_HALF_LIFE_MS)


def usual_reserve(usual: float, reserve: float, elapsed_ms: float) -> float:
    """Return the running mean of the reserve, ``usual`` before, after it was ``reserve`` for ``elapsed_ms``.

    An overload of some seconds hardly moves it; where expectations are off all the time, it is what is needed.
    """
    return reserve + (usual - reserve) * math.exp(-elapsed_ms / _USUAL_RESERVE_MS)


#: How often a request is sent before it is given up: one that kills every worker must not kill them for ever.
MAX_ATTEMPTS = 3


def is_retry_limit_reached(attempts: int) -> bool:
    """Return whether a request is not retried again after this many attempts, each of whose workers died."""
    return attempts >= MAX_ATTEMPTS


def must_be_alone(attempts: int) -> bool:
    """Return whether a request gets a batch of its own after this many failed attempts, so that it fails no others."""
    return attempts > 1
