"""The bound of a box of pressures in machine code: knapsacks over shares, with multipliers for the pressures."""

from __future__ import annotations

import numpy as np

from gpuprof.domain.interference_table import Floats, Integers
from gpuprof.machine.machine_code import compile_function

#: What a knapsack must gain by one replica more.
_GAIN = 1e-15
#: Workloads that the search looks at in one box.
_MOST_LOOKED_AT = 200_000


def _bound_box(
    per_rps: Floats,
    of_pieces: Floats,
    pressures: Floats,
    numbers: Integers,
    rates: Floats,
    ends: Floats,
    packing: Integers,
    steps: Floats,
    items: Integers,
) -> tuple[float, int]:
    """Return an upper bound of the value of a box's devices, and how many replicas attain it.

    Parameters
    ----------
    per_rps, of_pieces : (c,) and (c, p) float64
        What a request per second of each class, and so many pieces of a demand are worth.
    pressures : (n, m) float64
        Of each workload, smallest share first.
    numbers : (3, n) int64
        Their classes, the pieces that they serve, their shares in units.
    rates : (n,) float64
        Requests per second that they serve.
    ends : (m,) float64
        What the sum of each pressure stays below, infinite where it may be anything.
    packing : (3,) int64
        Units of the device, the fewest and the most replicas.
    steps : (m + 2,) float64
        Multipliers, replaced by the best; how many steps they take at most (Polyak's rule); a bound below which is good
        enough.
    items : (most,) int64
        Filled with the numbers of the workloads.

    Returns
    -------
    (float, int)
        Minus infinity and none where so many do not fit.
    """
    space, fewest, most = packing
    count = len(ends)
    now, beyond = steps[:count].copy(), np.zeros(count)
    best, first = np.empty(space + 1), np.empty(space + 1, dtype=np.int64)
    tables, chosen = np.empty((most + 1, space + 1)), np.empty((most, space + 1), dtype=np.int64)
    standing = np.empty(most, dtype=np.int64)
    value, found, length, goal = np.inf, 0, 1.0, steps[count + 1]
    sizes, lowered, worth = numbers[2], np.empty(len(rates)), np.empty(len(rates))
    for row in range(len(rates)):
        worth[row] = per_rps[numbers[0, row]] * rates[row] + of_pieces[numbers[0, row], numbers[1, row]]
    for _ in range(int(steps[count])):
        _lower(worth, pressures, now, lowered)
        _find_best(lowered, sizes, best, first)
        levels = _pack(best, space, fewest, most, tables, chosen)
        bound = tables[levels, space]
        if bound == -np.inf:
            return -np.inf, 0
        for pressure in range(count):
            if np.isfinite(ends[pressure]):
                bound += now[pressure] * ends[pressure]
        number = _read_packing(levels, space, chosen, first, standing)
        if bound < value:
            value, found = bound, number
            items[:number] = standing[:number]
            steps[:count] = now
        else:
            length /= 2.0
        squares = 0.0
        for pressure in range(count):
            beyond[pressure] = 0.0
            if np.isfinite(ends[pressure]):
                total = 0.0
                for place in range(number):
                    total += pressures[standing[place], pressure]
                if now[pressure] > 0.0 or total > ends[pressure]:
                    beyond[pressure] = (total - ends[pressure]) / max(ends[pressure], 1e-300)
            squares += beyond[pressure] ** 2
        if bound <= goal or squares == 0.0:
            break
        for pressure in range(count):
            raised = now[pressure] + beyond[pressure] * length * (bound - goal) / squares / max(ends[pressure], 1e-300)
            now[pressure] = max(0.0, raised)
    if value <= goal:
        return value, found
    # Multipliers let one packing press too much and another too little: that none does is searched for.
    _lower(worth, pressures, steps[:count], lowered)
    _find_best(lowered, sizes, best, first)
    # With a range of counts: by any number up to the most, for what is still to come.
    levels = _pack(best, space, fewest if fewest == most else 0, most, tables, chosen)
    tables[levels + 1 :] = tables[levels]
    exact, number = _search(worth, lowered, pressures, sizes, ends, steps, fewest, tables, standing)
    if exact < value:
        value = exact
        if number > 0:
            found = number
            items[:number] = standing[:number]
    return value, found


def _find_undominated(classes: Integers, sizes: Integers, rates: Floats, pressures: Floats, kept: Integers) -> int:
    """Write the numbers of the workloads that no other may stand for, rising, and return how many there are.

    One of the same class may that takes no larger share, serves no less and presses no more: whatever rates and pieces
    are worth, it is worth as much. Of those that an earlier one may not stand for some are left that a later one may.

    Parameters
    ----------
    classes, sizes : (n,) int64
        Of each workload, smallest share first.
    rates : (n,) float64
    pressures : (n, m) float64
    kept : (n,) int64
        Filled.
    """
    number = 0
    last, before = np.full(np.max(classes) + 1, -1), np.empty(len(classes), dtype=np.int64)
    for row in range(len(classes)):
        other = last[classes[row]]
        while other >= 0:
            stands = rates[other] >= rates[row] and sizes[other] <= sizes[row]
            for pressure in range(pressures.shape[1]):
                stands &= pressures[other, pressure] <= pressures[row, pressure]
            if stands:
                break
            other = before[other]
        if other < 0:
            before[row], last[classes[row]] = last[classes[row]], row
            kept[number] = row
            number += 1
    return number


def _search(
    worth: Floats,
    lowered: Floats,
    pressures: Floats,
    sizes: Integers,
    ends: Floats,
    steps: Floats,
    fewest: int,
    tables: Floats,
    standing: Integers,
) -> tuple[float, int]:
    """Return the goal, or what more the best replicas are worth that press no more than they may, and how many are.

    Depth first, each replica a workload that comes no later than the one before it: what is packed best into the rest
    of the device with multipliers bounds what is still to come. Infinite where that takes too long.
    """
    most, count, space, looked_at = len(standing), len(ends), tables.shape[1] - 1, 0
    allowed = 0.0
    for pressure in range(count):
        if np.isfinite(ends[pressure]):
            allowed += steps[pressure] * ends[pressure]
    top, found = steps[count + 1], 0
    chosen, left = np.empty(most, dtype=np.int64), np.empty(most + 1, dtype=np.int64)
    reached, pressed = np.empty(most + 1), np.zeros((most + 1, count))
    reached[0], left[0], depth = allowed, space, 0
    chosen[0] = len(worth)
    while depth >= 0:
        chosen[depth] -= 1
        row = chosen[depth]
        looked_at += 1
        if looked_at > _MOST_LOOKED_AT:
            return np.inf, 0
        if row < 0:
            depth -= 1
            continue
        rest = left[depth] - sizes[row]
        if rest < 0 or reached[depth] + lowered[row] + tables[most - depth - 1, rest] <= top:
            continue
        fits = True
        for pressure in range(count):
            pressed[depth + 1, pressure] = pressed[depth, pressure] + pressures[row, pressure]
            fits &= pressed[depth + 1, pressure] <= ends[pressure]
        if not fits:
            continue
        if depth + 1 >= fewest:
            total = 0.0
            for place in range(depth + 1):
                total += worth[chosen[place]]
            if total > top:
                top, found = total, depth + 1
                standing[:found] = chosen[:found]
        if depth < most - 1:
            left[depth + 1], reached[depth + 1] = rest, reached[depth] + lowered[row]
            chosen[depth + 1] = row + 1
            depth += 1
    return top, found


def _lower(worth: Floats, pressures: Floats, multipliers: Floats, lowered: Floats) -> None:
    """Write what workloads are worth less what they press, by the multipliers."""
    for row in range(len(worth)):
        lowered[row] = worth[row]
        for pressure in range(len(multipliers)):
            lowered[row] -= pressures[row, pressure] * multipliers[pressure]


def _find_best(lowered: Floats, sizes: Integers, best: Floats, first: Integers) -> None:
    """Write what the best workload of each size is worth, and which that is."""
    best[:] = -np.inf
    for row in range(len(lowered)):
        if lowered[row] > best[sizes[row]]:
            best[sizes[row]] = lowered[row]
            first[sizes[row]] = row


def _pack(best: Floats, space: int, fewest: int, most: int, tables: Floats, chosen: Integers) -> int:
    """Fill the tables of what fits into each space, by the number of replicas, and return how many were filled."""
    tables[0, :] = 0.0
    for number in range(most):
        better = number < fewest
        for left in range(space + 1):
            top, size = -np.inf, 0
            for taken in range(left + 1):
                reached = tables[number, left - taken] + best[taken]
                if reached > top:
                    top, size = reached, taken
            if number < fewest or top > tables[number, left] + _GAIN:
                tables[number + 1, left], chosen[number, left] = top, size
                better = True
            else:
                tables[number + 1, left], chosen[number, left] = tables[number, left], -1
        if not better:
            return number
    return most


def _read_packing(levels: int, space: int, chosen: Integers, first: Integers, standing: Integers) -> int:
    """Write the workloads of the best packing and return how many they are."""
    left, number = space, 0
    for level in range(levels - 1, -1, -1):
        size = chosen[level, left]
        if size >= 0:
            standing[number] = first[size]
            number += 1
            left -= size
    return number


_lower = compile_function(_lower, _nrt=False)
_find_best = compile_function(_find_best, _nrt=False)
_search = compile_function(_search)
_pack = compile_function(_pack, _nrt=False)
_read_packing = compile_function(_read_packing, _nrt=False)
bound_box = compile_function(_bound_box)
find_undominated = compile_function(_find_undominated)
