"""Arrivals that a map is planned for and checked with: a shape by name, or a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuprof.domain.arrival_process import ArrivalProcess
    from gpuprof.domain.sojourn import QueueModel

#: The default arrivals of a plan.
POISSON = "poisson"


def make_queueing(arrivals: str | None, models: Iterable[str]) -> QueueModel:
    """Return the queueing model for arrivals of a shape, at the rates of the demands.

    Raises `InputError` for an unknown shape, and for a trace that is missing, unreadable or lacks a model.

    Parameters
    ----------
    arrivals : str or None
        As `gpuprof.domain.arrival_text.parse_arrivals` reads it, or the path of a trace; None: Poisson. A trace with
        model names gives a shape for each model, a trace without names or with a single name gives one shape for all.
    models : iterable of str
        The planned models.
    """
    from gpuprof.domain.model_queues import ModelQueues, ShapedQueue, queue_of
    from gpuprof.estimators.queueing.deferred_queue import DeferredQueue

    if arrivals is None or arrivals.strip().lower() == POISSON:
        return DeferredQueue()
    shapes = _read_shapes(arrivals)
    if len(shapes) == 1:
        return ShapedQueue(DeferredQueue(), next(iter(shapes.values())))
    queues = ModelQueues(
        {model: ShapedQueue(DeferredQueue(), shape) for model, shape in shapes.items()}, DeferredQueue()
    )
    # Query each model now, so that a trace without a model is refused here and not in the middle of a search.
    for model in models:
        queue_of(queues, model)
    return queues


def _read_shapes(text: str) -> Mapping[str, ArrivalProcess]:
    """Return the shape of each model's arrivals, or a single shape for all models."""
    from gpuprof.domain.arrival_text import FORMS, parse_arrivals
    from gpuprof.simulator.trace import read_trace

    path = Path(text)
    if not path.is_file():
        # The end of gamma:0.5 is no suffix.
        if path.suffix and text.partition(":")[0].strip().lower() not in FORMS:
            raise InputError(
                f"there is no trace {text}", "name a file with the column time_s, or a shape as in gamma:4"
            )
        return {"": parse_arrivals(text, 1.0)}
    return read_trace(path).arrivals()
