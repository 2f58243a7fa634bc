"""Finds the device of this machine that a command measures on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuprof.cli.output import say
from gpuprof.errors import UnavailableError, unknown_name

if TYPE_CHECKING:
    from gpuprof.domain.device import Device


def local_device(name: str | None, collector: str) -> Device:
    """Return this machine's device called ``name``.

    Parameters
    ----------
    name : str or None
        ``"cpu"``, ``"gpu"``, or a device's name; None: the first GPU that ``collector`` can measure, else the CPU,
        saying why the GPU was left alone.
    collector : str
        As `gpuprof.profiling.collector.choose` takes it.

    Raises
    ------
    InputError
        When this machine has no device of that name.
    UnavailableError
        When it has no GPU although one was asked for.
    """
    from gpuprof.machine.local_device import local_cpu, local_gpus
    from gpuprof.profiling.collector import choose

    cpu = local_cpu()
    if name in ("cpu", cpu.name):
        return cpu
    gpus = local_gpus()
    if name is None:
        if not gpus:
            return cpu
        try:
            choose(collector, "gpu")
        except UnavailableError as error:
            say(f"gpuprof: {gpus[0].name} is not measured: {error.message}")
            return cpu
        return gpus[0]
    if not gpus:
        raise UnavailableError(f"this machine has no GPU that gpuprof can describe, asked for {name}", "--device cpu")
    if name == "gpu":
        return gpus[0]
    for gpu in gpus:
        if gpu.name == name:
            return gpu
    raise unknown_name("device of this machine", name, ["cpu", "gpu", *(gpu.name for gpu in gpus)])
