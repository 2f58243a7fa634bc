"""Which arrivals a map is planned for, and checked with: a shape by name, or a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.domain.arrival_process import ArrivalProcess
    from gpuprof.domain.sojourn import QueueModel

#: What is planned for unless something else is said.
POISSON = "poisson"


def make_queueing(arrivals: str | None) -> QueueModel:
    """Return the queueing model for arrivals of a shape, at whatever rate the demands ask for.

    Parameters
    ----------
    arrivals : str or None
        As `gpuprof.domain.arrival_text.parse_arrivals` reads it, or the path of a trace of one model; None: Poisson.

    Raises
    ------
    InputError
        For a shape that nobody knows, and a trace that is not there, cannot be read or names several models.
    """
    from gpuprof.domain.shaped_queue import ShapedQueue
    from gpuprof.estimators.queueing.queueing import BatchQueue

    if arrivals is None or arrivals.strip().lower() == POISSON:
        return BatchQueue()
    return ShapedQueue(BatchQueue(), _read_shape(arrivals))


def _read_shape(text: str) -> ArrivalProcess:
    from gpuprof.domain.arrival_text import parse_arrivals
    from gpuprof.simulator.trace import read_trace

    path = Path(text)
    if not path.is_file():
        if path.suffix:
            raise InputError(
                f"there is no trace {text}", "name a file with the column time_s, or a shape as in gamma:4"
            )
        return parse_arrivals(text, 1.0)
    recorded = read_trace(path).arrivals()
    if len(recorded) != 1:
        raise InputError(
            f"{text} names {len(recorded)} models", "plan with a trace of one: its shape is taken for every demand"
        )
    return next(iter(recorded.values()))
