"""Assignment of CPU cores to replicas: whole cores exclusively, fractions of a core under a CPU quota."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.domain.number_format import ROUNDING
from gpuprof.errors import InputError
from gpuprof.rules.turns import held_shares


@dataclass(frozen=True, slots=True)
class CpuSlice:
    """Part of a CPU for a group of processes."""

    cores: tuple[int, ...]  #: Allowed cores of the processes.
    #: CPU time per second allowed for all processes together, in cores; None: no quota.
    quota_cores: float | None = None

    @property
    def amount_cores(self) -> float:
        """CPU time per second allowed by the slice, in cores."""
        return float(len(self.cores)) if self.quota_cores is None else self.quota_cores

    @property
    def threads(self) -> int:
        """Threads needed to fill the slice: ONNX Runtime's intra-op threads in each process."""
        return max(1, math.ceil(self.amount_cores - ROUNDING))


def plan_slices(shares_pct: Sequence[float], cores: Sequence[int]) -> tuple[CpuSlice, ...]:
    """Divide ``cores`` into a slice for each share: whole cores are exclusive, fractions get a quota.

    A share of X% of N cores is X·N/100 cores. The integer part takes exclusive cores. Fractions are placed on the
    remaining cores by best fit, the largest first; a fraction that fits on no core is spread over several cores, with
    its quota. Slices are in the order of the shares. ``shares_pct``: each in (0, 100], with a sum of at most 100.
    Raises `InputError` when a share is out of range or the sum exceeds the CPU.
    """
    return _assign_cores(shares_pct, cores)[0]


def plan_shared_slices(shares: Sequence[tuple[float, int]], cores: Sequence[int]) -> tuple[CpuSlice, ...]:
    """Return the slice of each replica by its share and turn group: replicas with turns have a common slice.

    Raises `InputError` as `plan_slices` does.
    """
    slices = iter(plan_slices(held_shares(shares), cores))
    planned: list[CpuSlice] = []
    of_turns: dict[int, CpuSlice] = {}
    for _, turns in shares:
        cpu_slice = of_turns.get(turns) or next(slices)
        planned.append(cpu_slice)
        if turns:
            of_turns[turns] = cpu_slice
    return tuple(planned)


def unassigned_cores(shares_pct: Sequence[float], cores: Sequence[int]) -> dict[int, float]:
    """Return the unassigned capacity after `plan_slices`: core → its free fraction, in (0, 1].

    Raises `InputError` as `plan_slices` does.
    """
    return {core: part for core, part in _assign_cores(shares_pct, cores)[1].items() if part > ROUNDING}


def _assign_cores(shares_pct: Sequence[float], cores: Sequence[int]) -> tuple[tuple[CpuSlice, ...], dict[int, float]]:
    _check_shares(shares_pct)
    amounts = [pct * len(cores) / 100.0 for pct in shares_pct]
    core_counts = [math.floor(amount + ROUNDING) for amount in amounts]
    # Whole cores are assigned first: a fraction placed before them could take the last untouched core.
    free = list(cores)
    assignments: list[list[int]] = []
    for count in core_counts:
        assignments.append(free[:count])
        del free[:count]
    free_parts = dict.fromkeys(free, 1.0)
    parts = [max(0.0, amount - count) for amount, count in zip(amounts, core_counts, strict=True)]
    for index in sorted(range(len(parts)), key=lambda i: -parts[i]):
        if parts[index] > ROUNDING:
            assignments[index] += _assign_fraction(parts[index], free_parts)
    slices = tuple(
        CpuSlice(tuple(sorted(assignment)), None if part <= ROUNDING else round(amount, 6))
        for assignment, part, amount in zip(assignments, parts, amounts, strict=True)
    )
    return slices, free_parts


def _check_shares(shares_pct: Sequence[float]) -> None:
    for share in shares_pct:
        if not 0.0 < share <= 100.0 + ROUNDING:
            raise InputError(f"a share must be above 0 and at most 100 percent but got {share:g}")
    # Looser than for a single share: rounding errors add up.
    if sum(shares_pct) > 100.0 + 1e-4:
        raise InputError(f"shares of one CPU must add up to at most 100 percent but got {sum(shares_pct):g}")


def _assign_fraction(part: float, free_parts: dict[int, float]) -> list[int]:
    """Take ``part`` of a core, from the fullest core with enough free capacity, else from several; return the cores."""
    fitting_cores = [core for core, free in free_parts.items() if free >= part - ROUNDING]
    if fitting_cores:
        core = min(fitting_cores, key=lambda c: free_parts[c])
        free_parts[core] -= part
        return [core]
    cores = []
    # The emptiest cores first, so that the slice is spread over as few cores as possible.
    for core in sorted(free_parts, key=lambda c: -free_parts[c]):
        if part <= ROUNDING:
            break
        if free_parts[core] > ROUNDING:
            amount = min(part, free_parts[core])
            free_parts[core] -= amount
            part -= amount
            cores.append(core)
    return cores
