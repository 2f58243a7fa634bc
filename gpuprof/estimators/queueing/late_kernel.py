"""Part of late requests of a replica, in machine code, for batches of constant time by size.

The process takes all waiting requests, up to a full batch, as soon as it is free. The number waiting then is a Markov
chain by itself: the requests left over, plus a Poisson number of arrivals during a batch. Its stationary law gives the
requests ahead of an arrival during a batch, and the arrivals behind it until its own batch begins, which takes longer
with its size. Single moments of each batch represent the time around them. The kernel answers for one limit in tens of
microseconds; `gpuprof.estimators.queueing.batch_chain` answers for all times in milliseconds.
"""

from __future__ import annotations

import math

import numpy as np

from gpuprof.estimators.queueing.batch_chain import Array
from gpuprof.machine.machine_code import compile_function

#: Moments of a batch at which arrivals are evaluated.
_MOMENTS = 24
#: Probabilities below this are left out.
_NOTHING = 1e-9
_LOG_NOTHING = -math.log(_NOTHING)
#: Probability of a transition between states treated as zero.
_NO_MOVE = 1e-14
#: Maximum load: beyond it the number of states exceeds the limit.
_MOST_LOAD = 0.999
#: Steps of Newton's method.
_ROOT_STEPS = 8
#: Number of late requests kept as distinct states, times the unused fraction of the capacity.
_LATE_LONG = 3.0
#: Maximum number of waiting requests beyond a full batch kept as distinct states.
_MOST_LEFT = 400


def _fill_late_parts(rate: float, times: Array, limits: Array, late: Array) -> bool:
    """Fill in the parts of Poisson requests later than the limits; False where larger batches are quicker.

    ``rate``: requests per unit of time, below capacity; ``times``: of batches of 1, 2, … B requests; ``limits``:
    rising.
    """
    for size in range(1, len(times)):
        if times[size] < times[size - 1]:
            return False
    batch = _largest_used(rate, times)
    states = _count_states(rate, times[batch - 1], batch, limits[-1])
    waiting = _stationary(rate, times, batch, states)
    requests, told = waiting[0], np.zeros(len(limits))
    before, ahead, in_time, within = np.empty(states), np.empty(states), np.empty(batch), np.empty(batch + 1)
    for size in range(1, batch + 1):
        lasts = times[size - 1]
        left = states - batch if size == batch else 1  # numbers left over are distinct states only for full batches
        mass = 0.0
        for number in range(left):
            mass += _weight(waiting, size, number)
        requests += mass * rate * lasts
        if mass < _NOTHING:
            continue
        _fill_within(rate * lasts, waiting, size, left, before, within)
        for moment in range(_MOMENTS):
            part = (moment + 0.5) / _MOMENTS
            begins, is_known = (1.0 - part) * lasts, False
            for one in range(len(limits)):
                rest = limits[one] - begins
                most = _count_in_time(times, batch, rest)
                if most < batch:
                    # Requests ahead of a request and those behind it in time form its batch together.
                    found = mass - within[most]
                elif mass - within[batch] < _NOTHING:
                    continue
                else:
                    if not is_known:
                        is_known = True
                        _fill_ahead(rate * lasts * part, waiting, size, left, before, ahead)
                    full = times[batch - 1]
                    found = _late_behind(rate, times[:batch], begins + full, rest - full, ahead, in_time)
                told[one] += rate * lasts / _MOMENTS * found
    for one in range(len(limits)):
        alone = waiting[0] if times[0] > limits[one] else 0.0
        late[one] = (told[one] + alone) / requests
    return True


def _largest_used(rate: float, times: Array) -> int:
    """Return the largest batch that occurs with more than negligible probability."""
    for size in range(1, len(times)):
        mean = rate * times[size - 1]
        if size > mean + 6.0 * math.sqrt(mean) + 4.0:
            return size
    return len(times)


def _count_states(rate: float, full: float, batch: int, limit: float) -> int:
    """Return the number of distinct states: with more requests waiting all are late, or the case is negligible."""
    load = min(rate * full / batch, _MOST_LOAD)
    # Near capacity, requests long overdue still delay others.
    late = batch * (int(limit / full) + 3) + int(_LATE_LONG / (1.0 - load))
    usual = batch + int(_LOG_NOTHING / math.log(_decay_of_left(load))) + 1
    return min(late, usual, batch + _MOST_LEFT) + 2


def _decay_of_left(load: float) -> float:
    """Return a lower bound of the decay factor of the probabilities of 1, 2, … requests left by a full batch.

    The bound is the root above 1 of ``ln z = load (z - 1)``, from above by Newton's method: Lundberg's inequality for
    the random walk of arrivals during a full batch minus the batch; smaller batches take no longer.
    """
    root = 1.0 / (load * load)
    for _ in range(_ROOT_STEPS):
        root -= (math.log(root) - load * (root - 1.0)) / (1.0 / root - load)
    return root


def _fill_poisson(mean: float, law: Array) -> int:
    """Fill in the probabilities of 0, 1, … requests; return the number of non-negligible probabilities."""
    term = math.exp(-mean)
    law[0] = term
    for number in range(1, len(law)):
        term *= mean / number
        law[number] = term
        if number > mean and term < _NOTHING:
            return number + 1
    return len(law)


def _stationary(rate: float, times: Array, batch: int, states: int) -> Array:
    """Return the law of the number waiting when the process comes free, by elimination of states from the last on."""
    moves, law = np.zeros((states, states)), np.empty(states)
    for waiting in range(states):
        size = min(max(waiting, 1), batch)
        left = max(waiting - size, 0)
        known, beyond = _fill_poisson(rate * times[size - 1], law), 1.0
        for came in range(min(known, states - 1 - left)):
            moves[waiting, left + came] = law[came]
            beyond -= law[came]
        moves[waiting, states - 1] += max(beyond, 0.0)
    for last in range(states - 1, 0, -1):
        lowest, leaving = max(0, last - batch), 0.0
        leaves = moves[last, lowest:last]
        for number in range(len(leaves)):
            leaving += leaves[number]
        for state in range(last):
            if moves[state, last] > _NO_MOVE:
                part = moves[state, last] = moves[state, last] / leaving
                row = moves[state, lowest:last]
                for number in range(len(leaves)):  # starts at 0, so that the compiler vectorises the loop
                    row[number] += part * leaves[number]
            else:
                moves[state, last] = 0.0
    found = np.zeros(states)
    found[0], total = 1.0, 0.0
    for before in range(states):
        total += found[before]
        for state in range(before + 1, states):
            found[state] += found[before] * moves[before, state]
    return found / total


def _weight(waiting: Array, size: int, number: int) -> float:
    """Return the probability that a batch of ``size`` leaves ``number``; a lone request also follows an idle state."""
    return float(waiting[size + number]) + (float(waiting[0]) if size == 1 and number == 0 else 0.0)


def _fill_within(mean: float, waiting: Array, size: int, left: int, law: Array, within: Array) -> None:
    """Fill in the probabilities of fewer than 0, 1, … requests left by a batch and arriving during it, together.

    ``law`` is working memory.
    """
    known, batch = _fill_poisson(mean, law), len(within) - 1
    within[:] = 0.0
    for number in range(min(left, batch)):
        weight = _weight(waiting, size, number)
        for came in range(min(known, batch - number)):
            within[number + came + 1] += weight * law[came]
    for number in range(batch):
        within[number + 1] += within[number]


def _fill_ahead(mean: float, waiting: Array, size: int, left: int, law: Array, ahead: Array) -> None:
    """Fill in the probabilities of 0, 1, … requests ahead of a request; ``mean``: earlier arrivals during the batch."""
    known = _fill_poisson(mean, law)
    ahead[:] = 0.0
    for number in range(left):
        weight = _weight(waiting, size, number)
        for came in range(min(known, len(ahead) - number)):
            ahead[number + came] += weight * law[came]


def _count_in_time(times: Array, batch: int, rest: float) -> int:
    """Return the largest batch up to ``batch`` within the time ``rest``."""
    low, high = 0, batch
    while low < high:
        middle = (low + high) // 2
        if times[middle] <= rest:
            low = middle + 1
        else:
            high = middle
    return low


def _late_behind(rate: float, times: Array, begins: float, rest: float, ahead: Array, in_time: Array) -> float:
    """Return the probability that a request with at least a full batch ahead is late.

    Parameters
    ----------
    rate : float
    times : (b,) float64
    begins, rest : float
        Time until the following batch is done, and the limit's remainder then.
    ahead : (states,) float64
        Probability of each number of requests ahead.
    in_time : (b,) float64
        Working memory.
    """
    batch, states = len(times), len(ahead)
    late, first = 0.0, batch
    while first < states:
        most = _count_in_time(times, batch, rest)
        if most == 0:
            break
        if most < batch:
            # Probabilities of at most 0, 1, … arrivals behind the request.
            term = math.exp(-rate * begins)
            total = in_time[0] = term
            for number in range(1, most):
                term *= rate * begins / number
                total += term
                in_time[number] = total
            for place in range(min(batch, states - first)):
                late += ahead[first + place] * (1.0 - in_time[most - 1 - place] if place < most else 1.0)
        first += batch
        begins += times[-1]
        rest -= times[-1]
    for place in range(first, states):
        late += ahead[place]
    return late


_largest_used = compile_function(_largest_used, _nrt=False)
_decay_of_left = compile_function(_decay_of_left, _nrt=False)
_count_states = compile_function(_count_states, _nrt=False)
_fill_poisson = compile_function(_fill_poisson, _nrt=False)
_stationary = compile_function(_stationary)
_weight = compile_function(_weight, _nrt=False)
_fill_within = compile_function(_fill_within, _nrt=False)
_fill_ahead = compile_function(_fill_ahead, _nrt=False)
_count_in_time = compile_function(_count_in_time, _nrt=False)
_late_behind = compile_function(_late_behind, _nrt=False)
fill_late_parts = compile_function(_fill_late_parts)
