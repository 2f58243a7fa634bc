"""The resources of a machine that workers share: its cores and its GPUs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gpuprof.machine.cpu_share import own_cores
from gpuprof.serving.machine.gpu_places import LocalGpu, LocalMigInstance, list_local_gpus


@dataclass(frozen=True, slots=True)
class MachineParts:
    """Cores available to processes of a machine, and its GPUs with their MIG instances."""

    cores: tuple[int, ...]
    gpus: tuple[LocalGpu, ...] = ()

    @classmethod
    def here(cls) -> MachineParts:
        """Return the parts of this machine."""
        return cls(own_cores(), list_local_gpus())

    def to_message(self) -> dict[str, Any]:
        """Return the parts as JSON for the wire."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> MachineParts:
        """Return the parts that `to_message` described."""
        gpus = (
            LocalGpu(
                gpu["index"], gpu["device"], gpu["uuid"], tuple(LocalMigInstance(**mig) for mig in gpu["instances"])
            )
            for gpu in message["gpus"]
        )
        return cls(tuple(message["cores"]), tuple(gpus))
