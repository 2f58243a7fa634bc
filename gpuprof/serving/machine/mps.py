"""The share of a GPU to which a worker is limited; `gpuprof.machine.mps` drives the daemon that enforces the limit."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprof.machine.mps import MpsDaemon


@dataclass(frozen=True, slots=True)
class GpuShare:
    """The part of a GPU or MIG instance that a worker process may use."""

    uuid: str  #: ``GPU-…`` or ``MIG-…``.
    #: Percentage of its compute units, in (0, 100]; None: no limit, like all processes on it.
    active_pct: float | None
    memory_bytes: int | None = None  #: Limit of its memory.

    def environment(self, daemon: MpsDaemon | None) -> dict[str, str]:
        """Return the environment variables for the start of the process; ``daemon`` is None for shares without MPS."""
        variables = {"CUDA_VISIBLE_DEVICES": self.uuid}
        return variables if daemon is None else variables | daemon.environment(self.active_pct, self.memory_bytes)


def needs_mps(shares_pct: list[float]) -> bool:
    """Return whether the processes of a GPU or MIG instance need MPS: several, or one with less than 100%."""
    return len(shares_pct) > 1 or any(share < 100.0 for share in shares_pct)
