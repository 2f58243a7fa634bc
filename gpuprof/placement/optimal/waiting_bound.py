"""Minimum capacity (requests per unit of time) of replicas under Poisson arrivals so that few requests wait too long.

No more requests of a model are in time than with a single server serving them one after another at the maximum rate
of all replicas together. Proof: a batch of n that takes S has requests in time only if S is within the SLO, and its
replica then serves n / S <= r of them per unit of time. In a server of rate r each of them can have all of its work
while the batch runs, between its arrival and its deadline; and a server with the sum of the rates can do the work of
several. All deadlines follow their arrivals by the same time. So the best rule there takes each request that can still
be answered in time, and refuses the others: a rule that refuses such a request can refuse the next one it takes
instead.

The refused part of that server is known in closed form. Let V be its work and K the requests it serves within the
SLO, both in requests, and ρ the load; a request is refused where V > K - 1. By level crossing, the law of V up to K - 1
is proportional to that of M/D/1: G(v), the sum over k <= v of (-ρ (v - k))^k / k! exp(ρ (v - k)). With T the total, the
server is idle for 1 / T of the time, and busy with accepted requests for ρ G(K - 1) / T. Both add up to 1, so T is 1 +
ρ G(K - 1), and the server refuses 1 - G(K - 1) / T.
"""

from __future__ import annotations

import math
from functools import lru_cache

#: Work at which the sum is exact enough; with more within the SLO, waiting is negligible.
_MOST_WORK = 20.0
_PRECISION = 1e-4


@lru_cache(maxsize=100_000)
def least_rate_within(rate: float, limit: float, late_part: float) -> float:
    """Return the minimum total capacity of replicas with at most this part of the requests late.

    Parameters
    ----------
    rate : float
        Of Poisson requests, per unit of time.
    limit : float
        Of a request's time.
    late_part : float
        Part of the requests that may take longer, below 1.

    Returns
    -------
    float
        At least ``rate * (1 - late_part)``.
    """
    low = high = rate * (1.0 - late_part)
    while not _is_enough(rate, high, limit, late_part):
        low, high = high, 2.0 * high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if _is_enough(rate, middle, limit, late_part) else (middle, high)
    return low


def _is_enough(rate: float, speed: float, limit: float, late_part: float) -> bool:
    return speed * limit - 1.0 > _MOST_WORK or refused_part(rate / speed, speed * limit) <= late_part


def refused_part(load: float, work: float) -> float:
    """Return the refused part of Poisson requests of a server that takes the requests whose answers are in time.

    Parameters
    ----------
    load : float
        Arrivals during the service of a request.
    work : float
        Requests that are served within a request's time limit.

    Examples
    --------
    Where the time limit equals the service time, only an idle server takes a request:

    >>> refused_part(load=1.0, work=1.0)
    0.5
    """
    if work < 1.0:
        return 1.0
    ratio = math.fsum(
        (-load * (work - 1.0 - k)) ** k / math.factorial(k) * math.exp(load * (work - 1.0 - k))
        for k in range(int(work))
    )
    return 1.0 - ratio / (1.0 + load * ratio)
