"""Conservation of work: what a board does in a second, and so how many boards a set of demands takes at least.

A request takes at least a certain time of the whole board (`board_work`): that of its kernels in the batch that uses
the board best, launches and copies hidden behind other processes. Shares, MIG instances and processes divide this
time; none of them makes more of it. So demands whose work adds up to 11.2 boards are planned on 12 or more, and a GPU
whose replicas are given 1.75 seconds of work a second is overloaded, whatever the map says of their times.

Examples
--------
A bound for a plan on one kind of device, at the ends of intervals that the plan counts with:

>>> from gpuprof.domain.catalogue import device
>>> t4 = device("t4")
>>> bound = bound_by_work({"bert": 400.0}, [(t4, 0.5)], lambda model, kind: 72.0)
>>> bound.gpus, bound.cost_per_hour
(29, 14.5)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimator, Figure
from gpuprof.errors import InputError

#: Rounding that a number of boards may be off.
_ROUNDING = 1e-6


@runtime_checkable
class WorkEstimator(Estimator, Protocol):
    """An estimator that gives the work of a request."""

    def board_work_ms(self, model: str, device: Device) -> Figure | None:
        """Return the least time of the whole device that one request takes in ms; None where that is not known.

        Raises
        ------
        InputError
            As `estimate` does.
        """
        ...


def board_work(estimator: Estimator, model: str, device: Device) -> Figure | None:
    """Return the least time of the whole device that a request takes in ms, with its interval.

    None where the estimator does not know it, or the device cannot run the model. The figure's source is ``measured``
    where it follows from measurements: batches between and beyond them may be estimated a little better.
    """
    if not isinstance(estimator, WorkEstimator):
        return None
    try:
        return estimator.board_work_ms(model, device)
    except InputError:
        return None


@dataclass(frozen=True, slots=True)
class WorkBound:
    """The least that demands take of a fleet."""

    gpus: int
    cost_per_hour: float


def bound_by_work(
    rates_rps: Mapping[str, float],
    kinds: Sequence[tuple[Device, float]],
    work_ms: Callable[[str, Device], float | None],
) -> WorkBound:
    """Return the least number of devices, and the least price, that the work of demands takes.

    Parameters
    ----------
    rates_rps : mapping of str to float
        Model → requests per second that are served.
    kinds : sequence of (Device, float)
        The devices that may be used, each with its price per hour.
    work_ms : callable
        Model and device → `board_work` as the plan counts it (the mean, an end of its interval). None: not known, and
        counted as nothing.
    """
    devices = cost = 0.0
    for model, rate_rps in rates_rps.items():
        each = [(rate_rps * (work_ms(model, device) or 0.0) / 1e3, price) for device, price in kinds]
        devices += min((boards for boards, _ in each), default=0.0)
        cost += min((boards * price for boards, price in each), default=0.0)
    gpus = math.ceil(devices - _ROUNDING)
    prices = {price for _, price in kinds}
    return WorkBound(gpus, max(cost, gpus * min(prices, default=0.0)))
