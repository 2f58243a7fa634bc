"""The share of a GPU to which a worker is limited; `gpuprof.machine.mps` drives the daemon that enforces it."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprof.machine.mps import MpsDaemon


@dataclass(frozen=True, slots=True)
class GpuShare:
    """What one worker process may use of a GPU or a MIG instance."""

    uuid: str  #: ``GPU-…`` or ``MIG-…``.
    #: Of its compute units, in (0, 100]; None: it is held to none, beside others who are not either.
    active_pct: float | None
    memory_bytes: int | None = None  #: Limit of its memory.

    def environment(self, daemon: MpsDaemon | None) -> dict[str, str]:
        """Return what to set before the process starts; ``daemon`` is None where it needs no MPS."""
        variables = {"CUDA_VISIBLE_DEVICES": self.uuid}
        return variables if daemon is None else variables | daemon.environment(self.active_pct, self.memory_bytes)


def needs_mps(shares_pct: list[float]) -> bool:
    """Return whether the processes of one GPU or MIG instance need MPS: several, or one with less than all of it."""
    return len(shares_pct) > 1 or any(share < 100.0 for share in shares_pct)
