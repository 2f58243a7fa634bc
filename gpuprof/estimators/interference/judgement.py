"""Errors of interference models on measured co-locations, by leaving out what is to be predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuprof.estimators.interference.models import ColocatedWorkload, InterferenceModel

#: Co-locations below which nothing is fitted.
ENOUGH_ROWS = 8


def by_pair(row: ColocatedWorkload) -> str:
    """Return the models of a co-location as one name."""
    return "+".join(sorted([row.victim.model, *(one.model for one in row.beside)]))


def by_victim(row: ColocatedWorkload) -> str:
    """Return the model that was slowed down."""
    return row.victim.model


_GROUPS: dict[str, Callable[[ColocatedWorkload], str]] = {
    "pair": by_pair,
    "victim": by_victim,
    "nothing": lambda row: "all",  # fitted and tested on the same rows: the benchmark's yardstick
}


def ratios(make: Callable[[], InterferenceModel], measured: Sequence[ColocatedWorkload], left_out: str) -> list[float]:
    """Return measured over predicted latency of each row, predicted by a fit without its group."""
    group = _GROUPS[left_out]
    all_ratios = []
    for held in sorted({group(row) for row in measured}):
        # All rows are one group where nothing is left out: then it is fitted to what it predicts.
        training = [row for row in measured if group(row) != held] or list(measured)
        model = make().fit(training)
        all_ratios += [
            row.latency_ms / (model.slowdown(row.victim, row.beside) * row.victim.solo_ms)
            for row in measured
            if group(row) == held
        ]
    return all_ratios


@dataclass(frozen=True, slots=True)
class LeftOutRow:
    """A co-location predicted by a fit that has seen nothing of one of its models, in neither role."""

    model: str  #: Which was left out.
    is_victim: bool  #: Whether it was slowed down; else it was a neighbour.
    ratio: float  #: Measured over predicted latency.


def leave_models_out(make: Callable[[], InterferenceModel], measured: Sequence[ColocatedWorkload]) -> list[LeftOutRow]:
    """Leave every model out in turn, as victim and as neighbour, and predict all rows in which it takes part.

    A model is passed over where too few rows remain without it.
    """
    rows = []
    for name in sorted({one.model for row in measured for one in (row.victim, *row.beside)}):
        training = [row for row in measured if not _takes_part(name, row)]
        if len(training) < ENOUGH_ROWS:
            continue
        model = make().fit(training)
        for row in measured:
            if _takes_part(name, row):
                ratio = row.latency_ms / (model.slowdown(row.victim, row.beside) * row.victim.solo_ms)
                rows.append(LeftOutRow(name, row.victim.model == name, ratio))
    return rows


def _takes_part(name: str, row: ColocatedWorkload) -> bool:
    return name in (row.victim.model, *(one.model for one in row.beside))
