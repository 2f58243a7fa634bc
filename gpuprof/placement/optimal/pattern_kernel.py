"""The maximal patterns of a partition, enumerated in machine code: each program evaluates tens of thousands."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpuprof.machine.machine_code import compile_untimed

Integers = npt.NDArray[np.int64]


def _fill_maximal(units: Integers, weights: Integers, space: int, memory: int, most: int, patterns: Integers) -> int:
    """Write the maximal packings into the rows of ``patterns`` and return their number.

    Parameters
    ----------
    units, held : (n,) int64
        Space and memory of each size; no memory where memory is not counted.
    space, memory : int
        Of the partition.
    most : int
        Maximum number of packings to evaluate.
    patterns : (m, n) int64
        Multiplicity of each size, a packing a row; packings with most of the first size come first.

    Returns
    -------
    int
        -1 where there are more than ``m``, or where ``most`` do not suffice to enumerate them.
    """
    sizes = len(units)
    counts = np.zeros(sizes, dtype=np.int64)
    spaces, memories = np.empty(sizes + 1, dtype=np.int64), np.empty(sizes + 1, dtype=np.int64)
    spaces[0], memories[0] = space, memory
    depth, count, visited = 0, 0, 0
    counts[0] = _most_that_fit(units[0], weights[0], space, memory)
    while True:
        spaces[depth + 1] = spaces[depth] - counts[depth] * units[depth]
        memories[depth + 1] = memories[depth] - counts[depth] * weights[depth]
        depth += 1
        if depth < sizes:
            counts[depth] = _most_that_fit(units[depth], weights[depth], spaces[depth], memories[depth])
            continue
        visited += 1
        if not _has_room(units, weights, spaces[depth], memories[depth]):
            if count == len(patterns):
                return -1
            patterns[count] = counts
            count += 1
        if visited > most:
            return -1
        depth = sizes - 2  # all that fit of the last size are taken: fewer are never maximal
        while depth >= 0 and counts[depth] == 0:
            depth -= 1
        if depth < 0:
            return count
        counts[depth] -= 1


def _most_that_fit(units: int, weight: int, space: int, memory: int) -> int:
    most = space // units
    return min(most, memory // weight) if weight > 0 else most


def _has_room(units: Integers, weights: Integers, space: int, memory: int) -> bool:
    has_room = False
    for size in range(len(units)):
        has_room |= units[size] <= space and weights[size] <= memory
    return has_room


fill_maximal = compile_untimed(_fill_maximal)
