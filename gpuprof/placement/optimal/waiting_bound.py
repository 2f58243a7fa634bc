"""How many requests per second replicas must be able to serve so that few of Poisson requests wait for too long.

Whatever becomes of the requests of a model, no more are in time than in one server that serves one after another as
quickly as all replicas together do at most. Proof: a batch of n that takes S has requests in time only if S is within
the SLO, and its replica then serves n / S <= r of them at a time. In a server of rate r each of them can have all of
its work while the batch runs, between its arrival and its deadline; and one server with the sum of the rates can do
what several do. All deadlines come as long after the arrivals. So no rule has more requests in time there than to take
each request that can still be answered in time, and to refuse the others: a rule that refuses one of those can refuse
the next that it takes instead.

What that server refuses is known. Let V be the work in it and K what it does within the SLO, both in requests, and ρ
the load; a request is refused where V > K - 1. By level crossing the law of V up to K - 1 is in proportion to that of
M/D/1: G(v), the sum over k <= v of (-ρ (v - k))^k / k! exp(ρ (v - k)). With T the sum of all, the server is idle for
1 / T of the time, and busy with what it took for ρ G(K - 1) / T. Both add up to 1, so that T is 1 + ρ G(K - 1), and it
refuses 1 - G(K - 1) / T.
"""

from __future__ import annotations

import math
from functools import lru_cache

#: Work at which the sum is exact enough; with more within the SLO there is hardly any waiting to speak of.
_MOST_WORK = 20.0
_PRECISION = 1e-4


@lru_cache(maxsize=100_000)
def least_rate_within(rate: float, limit: float, late_part: float) -> float:
    """Return what replicas serve at least at their best, together, that have but this part of the requests late.

    Parameters
    ----------
    rate : float
        Of Poisson requests, per unit of time.
    limit : float
        Of a request's time.
    late_part : float
        That may take longer, below 1.

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


def _is_enough(rate: float, served: float, limit: float, late_part: float) -> bool:
    return served * limit - 1.0 > _MOST_WORK or refused_part(rate / served, served * limit) <= late_part


def refused_part(load: float, work: float) -> float:
    """Return which part of Poisson requests a server refuses that takes those whose answers are in time.

    Parameters
    ----------
    load : float
        Requests that come while one is served.
    work : float
        Requests that are served within the time that one may take.

    Examples
    --------
    Where one may take just as long as it is served for, only an idle server takes it:

    >>> refused_part(load=1.0, work=1.0)
    0.5
    """
    if work < 1.0:
        return 1.0
    upto = math.fsum(
        (-load * (work - 1.0 - k)) ** k / math.factorial(k) * math.exp(load * (work - 1.0 - k))
        for k in range(int(work))
    )
    return 1.0 - upto / (1.0 + load * upto)
