"""The cheapest parts that make up a whole demand, in machine code."""

from __future__ import annotations

import numpy as np

from gpuprof.domain.interference_table import Floats, Integers
from gpuprof.machine.machine_code import compile_function


def _find_cover(parts: Integers, costs: Floats, whole: int, chosen: Integers) -> float:
    """Return what parts that add up to the whole, or more, cost at least.

    Parameters
    ----------
    parts : (n,) int64
        Greater than none; each may be taken any number of times.
    costs : (n,) float64
    whole : int
    chosen : (whole + 1,) int64
        Filled, but for the first, with the number of the part to be taken where so much is left to be covered.
    """
    least = np.zeros(whole + 1)
    for left in range(1, whole + 1):
        least[left] = np.inf
        for number in range(len(parts)):
            cost = costs[number] + least[max(0, left - parts[number])]
            if cost < least[left]:
                least[left], chosen[left] = cost, number
    return float(least[whole])


find_cover = compile_function(_find_cover)
