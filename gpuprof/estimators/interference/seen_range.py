"""Which co-locations lie within what was measured, and in what others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuprof.estimators.interference.models import ColocatedWorkload, RunningWorkload

#: How far beyond the least and the most that was seen still counts as seen, in parts of the range between.
_MARGIN = 0.1


class SeenRange:
    """The least and the most of what interference depends on, over measured co-locations.

    ``measured``: at least one.
    """

    def __init__(self, measured: Sequence[ColocatedWorkload]) -> None:
        rows = [_describe(one.victim, one.beside) for one in measured]
        self._range = {name: (min(row[name] for row in rows), max(row[name] for row in rows)) for name in rows[0]}

    def list_beyond(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> tuple[str, ...]:
        """Return the names of what no measured co-location had as little or as much of; none: it is within them."""
        names = []
        for name, value in _describe(victim, beside).items():
            least, most = self._range[name]
            slack = _MARGIN * (most - least)
            if not least - slack - 1e-9 <= value <= most + slack + 1e-9:
                names.append(name)
        return tuple(names)


def _describe(victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> Mapping[str, float]:
    return {
        "the victim's use of DRAM": victim.dram_pct,
        "the victim's use of the L2": victim.l2_pct,
        "the victim's launches per ms": victim.kernels / victim.solo_ms,
        "the victim's transfers": victim.transfer_ms / victim.solo_ms,
        "the number of neighbours": float(len(beside)),
        "the neighbours' use of DRAM": sum(one.dram_pct for one in beside),
        "the neighbours' use of the L2": sum(one.l2_pct for one in beside),
        "the neighbours' transfers": sum(one.transfer_ms / one.solo_ms for one in beside),
        "the power of all": victim.power_w + sum(one.power_w for one in beside),
    }
