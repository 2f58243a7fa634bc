"""Whether a workload fits into a device's memory at all."""

from __future__ import annotations

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate
from gpuprof.errors import InputError


def check_memory(estimate: Estimate, device: Device) -> None:
    """Do nothing if the processes of ``estimate`` fit into the memory that their share can reach.

    Raises
    ------
    InputError
        With what they need and what there is.
    """
    workload, memory = estimate.workload, estimate.memory_bytes
    limit = device.memory_bytes(workload.share)
    if memory is None or memory.value * workload.processes <= limit:
        return
    needed = memory.value * workload.processes
    raise InputError(
        f"{workload.model} at batch {workload.batch} needs {needed / 2**30:.1f} GiB ({memory.source}), "
        f"but {device.name} at {workload.share} has {limit / 2**30:.1f} GiB",
        "choose a smaller batch or another device",
    )
