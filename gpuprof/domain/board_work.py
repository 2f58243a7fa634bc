"""Conservation of work: a lower bound on the number of boards for a set of demands.

A request takes at least a certain time of the whole board (`board_work`): the time of its kernels at the most
efficient batch size, with launches and copies hidden behind other processes. Shares, MIG instances and processes
divide this time; none of them adds to it. So demands with a total work of 11.2 boards need 12 or more, and a GPU with
1.75 seconds of work per second is overloaded, whatever times the map predicts.

Examples
--------
A bound for a plan on a single kind of device, at the interval ends of the plan:

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

#: Rounding error allowed in a number of boards.
_ROUNDING = 1e-6


@runtime_checkable
class WorkEstimator(Estimator, Protocol):
    """An estimator of the work of a request."""

    def board_work_ms(self, model: str, device: Device) -> Figure | None:
        """Return a lower bound, in ms, of the time of the whole device per request; None where unknown.

        Raises
        ------
        InputError
            As `estimate` does.
        """
        ...


def board_work(estimator: Estimator, model: str, device: Device) -> Figure | None:
    """Return a lower bound, in ms and with its interval, of the time of the whole device per request.

    None where the estimator has no bound or the device cannot run the model. The figure's source is ``measured``
    where the bound follows from measurements; batch sizes between and beyond them may be estimated slightly better.
    """
    if not isinstance(estimator, WorkEstimator):
        return None
    try:
        return estimator.board_work_ms(model, device)
    except InputError:
        return None


@dataclass(frozen=True, slots=True)
class WorkBound:
    """Lower bounds of the devices and the cost for a set of demands."""

    gpus: int
    cost_per_hour: float


def bound_by_work(
    rates_rps: Mapping[str, float],
    kinds: Sequence[tuple[Device, float]],
    work_ms: Callable[[str, Device], float | None],
) -> WorkBound:
    """Return lower bounds of the number of devices and of the cost per hour for the work of demands.

    Parameters
    ----------
    rates_rps : mapping of str to float
        Model → served requests per second.
    kinds : sequence of (Device, float)
        The available kinds of device, each with its price per hour.
    work_ms : callable
        Model and device → `board_work` at the plan's confidence (the mean, or an end of the interval). None: unknown,
        and counted as 0.
    """
    devices = cost = 0.0
    for model, rate_rps in rates_rps.items():
        options = [(rate_rps * (work_ms(model, device) or 0.0) / 1e3, price) for device, price in kinds]
        devices += min((boards for boards, _ in options), default=0.0)
        cost += min((boards * price for boards, price in options), default=0.0)
    gpus = math.ceil(devices - _ROUNDING)
    prices = {price for _, price in kinds}
    return WorkBound(gpus, max(cost, gpus * min(prices, default=0.0)))
