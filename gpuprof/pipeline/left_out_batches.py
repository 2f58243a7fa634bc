"""Measured batches that a plan under the queueing model must leave out, because smaller batches were not measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING

from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.domain.device import Device
    from gpuprof.placement.problem import Problem

#: The estimator that does not interpolate between measurements.
_ESTIMATOR = "measured"
_NAMED = 3


def list_left_out_batches(problem: Problem, estimator: str) -> Iterator[str]:
    """Yield a note for models and kinds of devices whose larger measured batches cannot be planned with.

    Waiting times depend on the times of partial batches, which the estimator ``measured`` has only where these batches
    were measured.
    """
    if estimator != _ESTIMATOR or problem.options.latency_budget is not None:
        return
    models: dict[tuple[str, int], list[str]] = {}
    for demand, entry in product(problem.demands, problem.fleet.entries):
        shares = _list_batches(problem, demand.model, entry.device)
        usable = max(map(_find_usable, shares), default=0)
        if 0 < usable < max((max(batches) for batches in shares), default=0):
            models.setdefault((entry.device.name, usable), []).append(demand.model)
    for (device, usable), names in models.items():
        more = "" if len(names) <= _NAMED else f" and {len(names) - _NAMED} more"
        yield (
            f"{', '.join(names[:_NAMED])}{more}: batches above {usable} are left out on {device}: how long requests "
            "wait depends on all smaller batches, too, of which not all were measured (--estimator database "
            "interpolates them, --latency-budget asks for full batches alone)"
        )


def _list_batches(problem: Problem, model: str, device: Device) -> list[Sequence[int]]:
    """Return the batches measured under each share, up to the options' ``max_batch``."""
    found: list[Sequence[int]] = []
    with suppress(InputError):
        for share in problem.estimator.shares(model, device):
            batches = problem.estimator.batches(model, device, share)
            found.append([batch for batch in batches if batch <= problem.options.max_batch])
    return [batches for batches in found if batches]


def _find_usable(batches: Sequence[int]) -> int:
    """Return the largest batch up to which every size was measured; 0 where batch 1 was not."""
    return next(size for size in range(len(batches) + 1) if size + 1 not in batches)
