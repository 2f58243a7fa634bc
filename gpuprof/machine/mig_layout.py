"""Partitions a GPU of this machine into MIG instances, and restores the former layout, through ``nvidia-smi``.

Every instance is a GPU instance with a single compute instance of full size (``-cgi PROFILE:START -C``). Source:
NVIDIA, Multi-Instance GPU User Guide, "Getting Started with MIG".
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.errors import UnavailableError
from gpuprof.machine.mps import ANSWER_S

NVIDIA_SMI = "nvidia-smi"
#: A line of ``nvidia-smi mig -lgi``: GPU, name, profile id, instance id, placement (start:size).
_INSTANCE = re.compile(r"\|\s*(\d+)\s+MIG (\S+)\s+\d+\s+\d+\s+(\d+):\d+\s*\|")
_NO_INSTANCES = "No GPU instances found"


@dataclass(frozen=True, slots=True)
class MigLayout:
    """MIG mode and instances of a GPU."""

    enabled: bool  #: MIG mode is enabled.
    instances: tuple[tuple[str, int], ...] = ()  #: Profile and first memory slice of each instance, sorted by slice.

    @classmethod
    def of(cls, instances: Sequence[tuple[str, int]]) -> MigLayout:
        """Return the layout that has exactly these instances."""
        return cls(True, tuple(sorted(((name, start) for name, start in instances), key=lambda instance: instance[1])))


def read_layout(gpu: int, tool: str = NVIDIA_SMI) -> MigLayout:
    """Return the current layout of GPU number ``gpu``.

    Raises `UnavailableError` when there is no such GPU or no nvidia-smi.
    """
    mode = _run_smi(tool, gpu, "--query-gpu=mig.mode.current", "--format=csv,noheader").strip()
    if mode not in ("Enabled", "Disabled"):
        raise UnavailableError(f"GPU {gpu} cannot be cut into MIG instances", "only A30, A100, H100 and later can")
    if mode == "Disabled":
        return MigLayout(False)
    listing = _run_smi(tool, gpu, "-lgi", mig=True, harmless=_NO_INSTANCES)
    instances = [(name, int(start)) for number, name, start in _INSTANCE.findall(listing) if int(number) == gpu]
    return MigLayout.of(instances)


def apply_layout(gpu: int, target: MigLayout, tool: str = NVIDIA_SMI) -> MigLayout | None:
    """Partition a GPU as ``target``; return its previous layout, or None if it already has the wanted layout.

    Raises `UnavailableError` when the driver refuses: no permission, or a process uses the GPU. The previous layout is
    restored then.
    """
    before = read_layout(gpu, tool)
    if before == target:
        return None
    try:
        _change(gpu, before, target, tool)
    except UnavailableError:
        # The driver may have refused after creating some of the instances.
        restore_layout(gpu, before, tool)
        raise
    return before


def restore_layout(gpu: int, layout: MigLayout, tool: str = NVIDIA_SMI) -> str | None:
    """Restore the layout of a GPU; return None on success, else the reason of the failure."""
    try:
        now = read_layout(gpu, tool)
        if now != layout:
            _change(gpu, now, layout, tool)
    except UnavailableError as error:
        return str(error)
    return None


def _change(gpu: int, now: MigLayout, target: MigLayout, tool: str) -> None:
    # Compute instances first: a GPU instance with compute instances cannot be destroyed.
    if now.instances:
        _run_smi(tool, gpu, "-dci", mig=True)
        _run_smi(tool, gpu, "-dgi", mig=True)
    if now.enabled != target.enabled:
        _run_smi(tool, gpu, "-mig", str(int(target.enabled)))
        # nvidia-smi also succeeds when the driver only notes the new mode for the next reset ("pending").
        if read_layout(gpu, tool).enabled != target.enabled:
            raise UnavailableError(
                f"GPU {gpu} takes another MIG mode only after a reset",
                f"{tool} --gpu-reset -i {gpu}, with nothing on it",
            )
    for profile, start in target.instances:
        _run_smi(tool, gpu, "-cgi", f"{profile}:{start}", "-C", mig=True)


def _run_smi(tool: str, gpu: int, *arguments: str, mig: bool = False, harmless: str = "") -> str:
    """Return the output of the tool; an exit code with ``harmless`` in the output is no error."""
    command = [tool, *(["mig"] if mig else []), "-i", str(gpu), *arguments]
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except FileNotFoundError:
        raise UnavailableError(f"{tool} is not installed", "it comes with NVIDIA's driver") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{' '.join(command)} does not answer: {error}") from None
    output = " ".join(f"{process.stdout} {process.stderr}".split())
    if process.returncode and not (harmless and harmless in output):
        fix = "MIG instances are root's to make" if "ermission" in output else "is a process on the GPU? see nvidia-smi"
        raise UnavailableError(f"{' '.join(command)}: {output[-200:] or f'exit code {process.returncode}'}", fix)
    return process.stdout
