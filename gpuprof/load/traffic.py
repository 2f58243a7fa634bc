"""When requests are sent: open-loop arrival times, the same for the same seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuprof.errors import unknown_name

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Times = npt.NDArray[np.float64]

ARRIVALS = ("poisson", "gamma", "constant")


def arrival_times(kind: str, rate_rps: float, duration_s: float, seed: int, scv: float = 4.0) -> Times:
    """Return the arrival times of requests in ``duration_s`` seconds, increasing.

    Raises `InputError` for an unknown kind.

    Parameters
    ----------
    kind : {"poisson", "gamma", "constant"}
        ``poisson`` is a Poisson process with a fixed number of arrivals, given by the rate, at independent times. With
        a random number, a run of a few hundred requests would miss its rate by several percent.
    scv : float
        Squared coefficient of variation of the gaps of ``gamma``; above 1 is burstier than Poisson.
    """
    import numpy as np

    if kind not in ARRIVALS:
        raise unknown_name("kind of arrivals", kind, list(ARRIVALS))
    count = int(rate_rps * duration_s + 6.0 * max(1.0, (rate_rps * duration_s * max(1.0, scv)) ** 0.5)) + 1
    random = np.random.default_rng(seed)
    if kind == "constant":
        times = (np.arange(count) + 0.5) / rate_rps
    elif kind == "gamma":
        times = np.cumsum(random.gamma(1.0 / scv, scv / rate_rps, count))
    else:
        times = np.sort(random.uniform(0.0, duration_s, max(1, round(rate_rps * duration_s))))
    within: Times = times[times < duration_s].astype(np.float64)
    return within
