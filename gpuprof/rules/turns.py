"""Turns: models time-share a part of a device, with a single batch running at a time (Choi et al., ATC'22).

Batches run in the order in which they are ready. A worker has a single batch at a time, so a batch waits for at most
one batch of each other model: the longest time from ready to done is a duty cycle, the sum of a full batch of each
model. Predictions use this longest time, regardless of the actual load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from gpuprof.domain.estimate import SOURCE_KINDS, Estimate, Figure, Workload, classify_source

#: Estimate of a workload with neighbours, none with turns.
Ask = Callable[[Workload, Sequence[Workload]], Estimate]


def involves_turns(workload: Workload, neighbours: Sequence[Workload]) -> bool:
    """Return whether any workload takes turns, so that `estimate_in_turn` must be used."""
    return bool(workload.turns) or any(neighbour.turns for neighbour in neighbours)


def estimate_in_turn(ask: Ask, workload: Workload, neighbours: Sequence[Workload]) -> Estimate:
    """Return the estimate of a workload with turns, or with neighbours that take turns.

    The latency is the time from ready to done, with the longest wait for the workload's turn. Of neighbours that take
    turns among themselves, only one runs at a time: the neighbour that, alone, slows the workload most is used.
    Raises `InputError` as the estimator for any of the workloads.
    """
    own_turn = _ask_during_turn(ask, workload, neighbours)
    if not workload.turns:
        return own_turn
    mates = [neighbour for neighbour in neighbours if neighbour.turns == workload.turns]
    concurrent = [neighbour for neighbour in neighbours if neighbour not in mates]
    batches = [own_turn, *(_ask_during_turn(ask, mate, concurrent) for mate in mates)]
    longest = _add_figures([batch.latency_ms for batch in batches])
    # Standard deviations of independent times add up in quadrature.
    pauses = [batch.pause_factor * batch.latency_ms.value for batch in batches]
    return replace(
        own_turn,
        latency_ms=longest,
        latency_cv=_sum_squares(batch.latency_cv * batch.latency_ms.value for batch in batches) / longest.value,
        pause_factor=math.fsum(pauses) / longest.value,
        pause_cv=_sum_squares(
            (batch.latency_cv if batch.pause_cv is None else batch.pause_cv) * ms
            for batch, ms in zip(batches, pauses, strict=True)
        )
        / math.fsum(pauses),
        overlapped_ms=0.0,
    )


def without_turn_mates(workload: Workload, neighbours: Sequence[Workload]) -> tuple[Workload, ...]:
    """Return the neighbours that may run concurrently with the workload: all outside its turn group."""
    return tuple(neighbour for neighbour in neighbours if not workload.turns or neighbour.turns != workload.turns)


def held_shares(shares: Iterable[tuple[float, int]]) -> list[float]:
    """Return the distinct shares of a partition in percent, from pairs of a share and its turn group.

    Examples
    --------
    >>> held_shares([(40.0, 1), (60.0, 0), (40.0, 1)])
    [40.0, 60.0]
    """
    turn_numbers: set[int] = set()
    distinct = []
    for share, turns in shares:
        if turns in turn_numbers:
            continue
        distinct.append(share)
        turn_numbers |= {turns} if turns else set()
    return distinct


def _ask_during_turn(ask: Ask, workload: Workload, neighbours: Sequence[Workload]) -> Estimate:
    isolated, concurrent = replace(workload, turns=0), without_turn_mates(workload, neighbours)
    running = [workload for workload in concurrent if not workload.turns]
    for number in sorted({workload.turns for workload in concurrent} - {0}):
        group = [replace(workload, turns=0) for workload in concurrent if workload.turns == number]
        # Of equally slow neighbours the first by name: the result must not depend on their order.
        running.append(max(sorted(group), key=lambda workload: ask(isolated, [workload]).latency_ms.upper()))
    return replace(ask(isolated, sorted(running)), workload=workload)


def _add_figures(figures: Sequence[Figure]) -> Figure:
    """Return the sum with the least certain source; interval ends add up, as errors of a single model do."""
    source = max((figure.source for figure in figures), key=lambda figure: SOURCE_KINDS.index(classify_source(figure)))
    value = math.fsum(figure.value for figure in figures)
    if all(figure.low is None or figure.high is None for figure in figures):
        return Figure(value, source)
    low = math.fsum(figure.value if figure.low is None else figure.low for figure in figures)
    return Figure(value, source, low, math.fsum(figure.upper() for figure in figures))


def _sum_squares(values: Iterable[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values))
