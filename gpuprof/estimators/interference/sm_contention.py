"""Batch time where replicas contend for all SMs of a GPU, without shares.

Elvinger's thesis (ETH, 2024) runs `milp` without shares (§6.1.3) and packs models by their weighted SM utilisation
(WSM, §5.3.2), on the premise that models with a total WSM of at most 100% do not slow each other down (§5.4.3). Here
the premise gives the mean: demand beyond all SMs stretches each model in proportion. The upper end assumes that every
neighbour always runs and never overlaps: as in time slices, each of its busy SMs is taken from the others. The thesis
measured one pair: resnet50 (WSM 36%) beside alexnet (WSM 47%) takes 8 ms for 6.8 (§6.2.1), which lies between 6.8 and
10.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuprof.domain.estimate import Figure, Workload

#: SM utilisation assumed for unknown models: every SM, as in time slices.
_UNKNOWN_PCT = 100.0


def is_sharing_all_sms(workload: Workload, beside: Sequence[Workload]) -> bool:
    """Return whether all workloads have the same whole device or instance, without shares."""
    return bool(beside) and all(
        member.share.sm_pct == 100.0 and member.share.mig == workload.share.mig for member in (workload, *beside)
    )


def slow_by_contention(alone: Figure, own_pct: float | None, others_pct: Sequence[float | None]) -> Figure:
    """Return the time beside others that use the same SMs.

    ``own_pct`` and ``others_pct``: SM utilisation in percent (WSM); None where unknown, treated as all SMs.

    Examples
    --------
    >>> slow_by_contention(Figure(2.0, "measured"), 80.0, [70.0]).value
    3.0
    """
    busy = [_UNKNOWN_PCT if pct is None else pct for pct in (own_pct, *others_pct)]
    factor = max(1.0, sum(busy) / 100.0)
    most = max(factor, 1.0 + sum(busy[1:]) / 100.0)
    is_complete = own_pct is not None and None not in others_pct
    low = alone.value if alone.low is None else alone.low
    source = f"{alone.source} × SM contention{'' if is_complete else ' (of unknown SM utilisation)'}"
    return Figure(alone.value * factor, source, low, alone.upper() * most)
