"""Turns: models time-share one part of a device, and one batch of them runs at a time (Choi et al., ATC'22).

Turns are first come, first served, by when a batch is ready. A worker has one batch at a time, so that
a batch waits for at most one batch of each of the others: the longest time from when it is ready until it is done is a
duty cycle, the sum of one full batch of each. Predictions are by that longest time, whatever runs in truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from gpuprof.domain.estimate import Estimate, Figure, Workload, classify_source

#: What an estimator says of a workload beside others, none of which takes turns.
Ask = Callable[[Workload, Sequence[Workload]], Estimate]

#: The surest first, as `classify_source` names them.
_KINDS = ("measured", "interpolated", "extrapolated", "predicted")


def involves_turns(workload: Workload, beside: Sequence[Workload]) -> bool:
    """Return whether any of these workloads takes turns, so that `estimate_in_turn` must be used."""
    return bool(workload.turns) or any(one.turns for one in beside)


def estimate_in_turn(ask: Ask, workload: Workload, beside: Sequence[Workload]) -> Estimate:
    """Return the estimate of a workload that takes turns, or that runs beside others that do.

    Its time is that from when a batch is ready until it is done, with the longest wait for its turn. Of others that
    take turns among themselves one runs at a time: that one is taken which slows the workload most, if it was alone.
    Raises `InputError` as the estimator does for any of them.
    """
    own = _ask_during_turn(ask, workload, beside)
    if not workload.turns:
        return own
    mates = [one for one in beside if one.turns == workload.turns]
    others = [one for one in beside if one not in mates]
    batches = [own, *(_ask_during_turn(ask, mate, others) for mate in mates)]
    longest = _add_figures([one.latency_ms for one in batches])
    # Deviations of times that do not depend on one another add up by their squares.
    pauses = [one.pause_factor * one.latency_ms.value for one in batches]
    return replace(
        own,
        latency_ms=longest,
        latency_cv=_sum_squares(one.latency_cv * one.latency_ms.value for one in batches) / longest.value,
        pause_factor=math.fsum(pauses) / longest.value,
        pause_cv=_sum_squares(
            (one.latency_cv if one.pause_cv is None else one.pause_cv) * ms
            for one, ms in zip(batches, pauses, strict=True)
        )
        / math.fsum(pauses),
        overlapped_ms=0.0,
    )


def without_turn_mates(workload: Workload, beside: Sequence[Workload]) -> tuple[Workload, ...]:
    """Return the neighbours that may run at the same time as the workload: those that do not take turns with it."""
    return tuple(one for one in beside if not workload.turns or one.turns != workload.turns)


def held_shares(shares: Iterable[tuple[float, int]]) -> list[float]:
    """Return the distinct shares of a partition in percent, from pairs of a share and its turn group.

    Examples
    --------
    >>> held_shares([(40.0, 1), (60.0, 0), (40.0, 1)])
    [40.0, 60.0]
    """
    seen: set[int] = set()
    held = []
    for share, turns in shares:
        if turns in seen:
            continue
        held.append(share)
        seen |= {turns} if turns else set()
    return held


def _ask_during_turn(ask: Ask, workload: Workload, beside: Sequence[Workload]) -> Estimate:
    own, at_once = replace(workload, turns=0), without_turn_mates(workload, beside)
    running = [one for one in at_once if not one.turns]
    for number in sorted({one.turns for one in at_once} - {0}):
        group = [replace(one, turns=0) for one in at_once if one.turns == number]
        # Of equally slow ones the first by name: the answer must not depend on the order that they come in.
        running.append(max(sorted(group), key=lambda one: ask(own, [one]).latency_ms.upper()))
    return replace(ask(own, sorted(running)), workload=workload)


def _add_figures(figures: Sequence[Figure]) -> Figure:
    """Return the sum with the least certain of the sources; interval ends add up, as the errors of one model do."""
    source = max((one.source for one in figures), key=lambda one: _KINDS.index(classify_source(one)))
    value = math.fsum(one.value for one in figures)
    if all(one.low is None or one.high is None for one in figures):
        return Figure(value, source)
    low = math.fsum(one.value if one.low is None else one.low for one in figures)
    return Figure(value, source, low, math.fsum(one.upper() for one in figures))


def _sum_squares(values: Iterable[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values))
