"""Routing and admission rules as pure functions: the choice of a replica, and the refusal of requests.

The router and the simulator use the same rules. The simulator compiles the rules on numbers and sequences of numbers,
which therefore use loops: `expect_rows`, `finish_ms`, `decay_count`, `update_mean_left_ms`, `extend_wait_ms`,
`forecast_joining`, `makes_oldest_late`, `argmin_in_turn`, `is_refused`, `correct_expected_ms`,
`adapt_reserve`, `is_retry_limit_reached`, `must_be_alone`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)  # created for every request: a frozen class takes three times as long
class ReplicaLoad:
    """Queue and work in progress of a replica at a moment."""

    waiting: int  #: Requests in the queue.
    oldest_wait_ms: float  #: Wait of the oldest request so far; 0 when the queue is empty.
    busy_ms: tuple[float, ...]  #: Expected time until each process finishes its assigned work; 0: idle.
    latency_ms: Sequence[float]  #: Expected time of a batch of 1, 2, … requests; its length is the largest batch.
    max_wait_ms: float = 0.0  #: Longest wait of a batch to be filled.
    #: Processes without a batch; a process with an overdue batch is busy, though its ``busy_ms`` is 0.
    idle: int = 0
    #: Expected final size of the next batch, by `forecast_joining`; 0 while a process is idle.
    joining: int = 0
    oldest_deadline_ms: float = math.inf  #: Deadline of the oldest waiting request, from its arrival.


def expected_finish_ms(load: ReplicaLoad) -> float:
    """Return the expected time until a request that joins the queue now is answered.

    Full batches ahead are spread over the processes; the request's batch starts when a process is free and the batch is
    full or has waited long enough. While every process runs a batch, more requests join until the start, so the
    expected final size determines the batch time. With the current size the request would be admitted, and would be
    late together with all later arrivals. Infinite when no process is alive.
    """
    rows = expect_rows(load.waiting, load.joining, len(load.latency_ms))
    return finish_ms(load.waiting, load.oldest_wait_ms, load.busy_ms, rows, load.latency_ms, load.max_wait_ms)


def expect_rows(waiting: int, joining: int, batch: int) -> int:
    """Return the expected batch size for a request that joins the queue now.

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
    """Return `expected_finish_ms` for the values of a `ReplicaLoad`, with ``rows`` by `expect_rows`."""
    processes = len(busy_ms)
    if processes == 0:
        return math.inf
    batch = len(latency_ms)
    full_batches = waiting // batch if waiting >= batch else 0
    remainder = waiting - full_batches * batch
    start, total = busy_ms[0], 0.0
    for busy in busy_ms:
        start = min(start, busy)
        total += busy
    if full_batches > 0:
        start = max(start, (total + full_batches * latency_ms[batch - 1]) / processes)
    waited_ms = oldest_wait_ms if remainder > 0 and full_batches == 0 else 0.0
    if rows < batch:
        return max(start, max_wait_ms - waited_ms) + latency_ms[rows - 1]
    return start + latency_ms[batch - 1]


#: Time constant of the exponential decay of a replica's arrival counts, in full-batch times.
_COUNTED_BATCHES = 10.0


def decay_count(count: float, elapsed_ms: float, full_batch_ms: float) -> float:
    """Return an exponentially decayed count of arrivals at a replica after ``elapsed_ms``."""
    return count * math.exp(-elapsed_ms / (_COUNTED_BATCHES * full_batch_ms)) if full_batch_ms > 0.0 else 0.0


#: Fraction of refused arrivals at a replica from which batches wait for the longest admissible time.
_MANY_REFUSED = 0.04


def extend_wait_ms(
    max_wait_ms: float, refused: float, arrivals: float, allowed_ms: float, latency_ms: Sequence[float]
) -> float:
    """Return the wait of a batch to be filled at a replica with refusals.

    An idle process takes the waiting requests at once, which minimises latency at low load. Near the capacity this
    costs goodput, because a batch of a single request takes nearly as long as a full batch. So with more refusals, the
    oldest request waits longer, finally as long as its deadline allows.

    ``max_wait_ms``: wait without refusals; ``refused``, ``arrivals``: decayed counts (`decay_count`) of refused and of
    all requests at the replica; ``allowed_ms``: time limit for admission, infinite without admission control;
    ``latency_ms``: expected time of a batch of 1, 2, … requests. The longest batch time is used, not that of the full
    batch: measured, a smaller batch may take longer, and requests filling such a batch would be refused while the
    oldest waits (`makes_oldest_late`).
    """
    if refused <= 0.0 or arrivals <= 0.0:
        return max_wait_ms
    longest_batch_ms = 0.0
    for batch_ms in latency_ms:
        if batch_ms > longest_batch_ms:  # runs for every request: `max` takes three times as long
            longest_batch_ms = batch_ms
    longest_ms = max(0.0, 0.999 * allowed_ms - longest_batch_ms)  # the rest is a margin for rounding
    return max(max_wait_ms, min(1.0, refused / arrivals / _MANY_REFUSED) * longest_ms)


def update_mean_left_ms(mean_ms: float, left_ms: float, count: float) -> float:
    """Return the mean time of a replica's arrivals until a process is free, updated by another arrival.

    With several replicas, requests arrive shortly before a process is free; a single replica receives them at all
    times. ``mean_ms`` and ``left_ms``: the previous mean, and the time until a process is free; ``count``: decayed
    count (`decay_count`), the effective number of arrivals in the mean.
    """
    return mean_ms + (left_ms - mean_ms) / max(1.0, count)


def forecast_joining(
    count: float, batch_ms: float, latency_ms: Sequence[float], processes: int, left_ms: float, allowed_ms: float
) -> int:
    """Return the expected size of the next batch at the start of a batch of ``batch_ms``.

    The size is the number of arrivals until a process is free that the next batch can still answer in time, plus half a
    standard deviation. Early arrivals cannot wait for a long batch, so a larger batch may hold fewer arrivals; the
    result is the size at which both agree.

    Parameters
    ----------
    count : float
        Decayed count (`decay_count`) of arrivals at the replica, refused requests included.
    batch_ms : float
        Expected time of the starting batch.
    latency_ms : sequence of float
        Expected time of a batch of 1, 2, … requests; its length is the largest batch.
    processes : int
        Processes of the replica.
    left_ms : float
        Mean time of arrivals until a process is free, by `update_mean_left_ms`; arrivals are uniform over twice this.
    allowed_ms : float
        Time limit for admission; infinite without admission control.
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
        # The right side decreases with the size, so bisection finds the largest valid size; the last 0.5 rounds.
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
    """Return whether another request in its batch would delay the oldest request, now in time, beyond ``allowed_ms``.

    The other parameters are as in `ReplicaLoad`.
    """
    if waiting == 0 or waiting >= len(latency_ms) or len(busy_ms) == 0:
        return False
    start = busy_ms[0]
    for busy in busy_ms:
        start = min(start, busy)
    begin = oldest_wait_ms + max(start, max_wait_ms - oldest_wait_ms)
    full_ms = oldest_wait_ms + start if waiting + 1 == len(latency_ms) else begin  # a full batch starts without waiting
    return begin + latency_ms[waiting - 1] <= allowed_ms < full_ms + latency_ms[waiting]


def argmin_in_turn(values: Sequence[float], turn: int) -> int:
    """Return the position of the smallest value; of ``n`` ties, the tie at ``turn % n``."""
    best, equal = values[0], 0
    for value in values:
        if value < best:
            best, equal = value, 0
        if value == best:
            # Ties are counted, then searched again: the simulator's compiled code must not allocate a list of ties.
            equal += 1
    remaining = turn % equal
    for position in range(len(values)):
        if values[position] == best:
            if remaining == 0:
                return position
            remaining -= 1
    return 0


class FastestFirst:
    """Routing to the replica with the earliest expected completion; ties in rotation."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, loads: Sequence[ReplicaLoad]) -> int:
        """Return the position of the smallest expected finishing time."""
        if len(loads) == 1:
            return 0
        self._turn += 1
        return argmin_in_turn([expected_finish_ms(load) for load in loads], self._turn)


#: Initial reserve of admission control, as a fraction of the deadline, and its bounds. Expected times are means, and
#: half of all times are longer. The reserve is adapted to the errors of expected times (`adapt_reserve`).
RESERVE, LEAST_RESERVE, LARGEST_RESERVE = 0.05, 0.001, 0.3
_RESERVE_STEP = 0.02
#: Least expected time, as a fraction of the deadline, of requests informative about requests near the limit.
_NEAR_LIMIT = 0.5
#: Time constant of the return of a raised reserve to its initial value.
_RELAXING_MS = 10_000.0


def is_refused(waiting: int, idle: int, finish_ms: float, waited_ms: float, deadline_ms: float, reserve: float) -> bool:
    """Return whether admission control refuses a request at the chosen replica because it would miss its deadline.

    Under overload every admitted request comes close to the limit; without the reserve half would be late. A request
    that finds an idle process and an empty queue is always admitted: it delays no other request, and reveals wrong
    expectations.

    Parameters
    ----------
    waiting, idle : int
        Requests in the replica's queue, and its processes without a batch.
    finish_ms : float
        Expected time from now to the answer, by `expected_finish_ms`.
    waited_ms : float
        Time since the request's arrival.
    deadline_ms : float
        The SLO, or the request's own deadline.
    reserve : float
        Fraction of the deadline.
    """
    return (waiting > 0 or idle == 0) and waited_ms + finish_ms > (1.0 - reserve) * deadline_ms


def correct_expected_ms(expected_ms: float, expected_rows: int, rows: int, latency_ms: Sequence[float]) -> float:
    """Return the expected time of a request from arrival to answer, corrected for the actual size of its batch.

    Later requests lengthen a batch beyond the expectation of its first requests, and are admitted only if those stay in
    time (`makes_oldest_late`). This is not an error of batch times, so it must not raise the reserve. The same holds
    for the time for which a free process waits for a full batch: such a batch is expected from its start.

    ``expected_ms``: time from arrival to answer as expected at admission; ``expected_rows`` and ``rows``: expected
    (`expect_rows`) and actual size of the batch; ``latency_ms``: expected time of a batch of 1, 2, … requests.
    """
    return expected_ms + latency_ms[rows - 1] - latency_ms[expected_rows - 1]


def adapt_reserve(
    reserve: float, expected_ms: float, took_ms: float, deadline_ms: float, late_part: float, together: int
) -> float:
    """Return the reserve, as a fraction of the deadline, after a request's answer.

    Each answer moves the reserve by a step: up if the request would have been late at the limit, else down. The steps
    are proportional to the SLO's percentile and its complement, so the reserve settles where the percentile is in time.
    The requests of a batch are late together and make a single step.

    Parameters
    ----------
    reserve : float
        The reserve so far.
    expected_ms, took_ms : float
        Expected time from arrival to answer, by `correct_expected_ms`, and actual time.
    deadline_ms : float
        The SLO, or the request's own deadline.
    late_part : float
        Fraction of requests that may be late: 0.01 for an SLO at the 99th percentile.
    together : int
        Requests in the batch.
    """
    if expected_ms < _NEAR_LIMIT * deadline_ms:
        return reserve
    # At the limit of admission, the expected time is (1 - reserve) · deadline, and a request is late once it takes more
    # than the deadline: more than 1 / (1 - reserve) times the expected time.
    late = 1.0 if took_ms * (1.0 - reserve) > expected_ms else 0.0
    return min(LARGEST_RESERVE, max(LEAST_RESERVE, reserve + _RESERVE_STEP * (late - late_part) / together))


def relax_reserve(reserve: float, elapsed_ms: float) -> float:
    """Return the reserve ``elapsed_ms`` after the value ``reserve``, decaying to `RESERVE`.

    A reserve raised by an overload or a pause refuses the requests that could lower it; hence the decay.
    """
    if reserve <= RESERVE:
        return reserve
    return RESERVE + (reserve - RESERVE) * math.exp(-elapsed_ms / _RELAXING_MS)


#: Most attempts of a request: a request that kills its workers must not do so for ever.
MAX_ATTEMPTS = 3


def is_retry_limit_reached(attempts: int) -> bool:
    """Return whether a request is given up after this many attempts, each ended by the death of its worker."""
    return attempts >= MAX_ATTEMPTS


def must_be_alone(attempts: int) -> bool:
    """Return whether a request needs its own batch after this many failed attempts, to protect other requests."""
    return attempts > 1
