"""Compares the GPUs, MIG instances and MPS shares of this machine with those that a deployment map plans.

CUDA raises no error for most wrong shares: a client that finds no MPS daemon at its pipe directory runs on the whole
GPU. So a client is started with each planned percentage, and asked for its number of SMs.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gpuprof.domain.deployment import Gpu, Node
from gpuprof.domain.device import Device
from gpuprof.domain.plural import count_of
from gpuprof.errors import UnavailableError
from gpuprof.machine.gpu import local_gpus
from gpuprof.machine.gpu_share import MigLayout, read_layout
from gpuprof.machine.mps import ANSWER_S, DEFAULT_PIPE, PERCENTAGE
from gpuprof.runtime.providers import MPS_PIPE

_CLIENT = "from gpuprof.machine.nvml import visible_sms; print(visible_sms() or '')"

#: SMs are granted in pairs (TPCs): a client may get one pair more than its percentage.
_PAIR = 2


def _ask_client(gpu: int, percentage: float) -> int | None:
    """Return the SMs that CUDA grants a client of a GPU with this percentage; None without an answer."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), PERCENTAGE: f"{percentage:g}"}
    try:
        process = subprocess.run(
            [sys.executable, "-c", _CLIENT], env=environment, capture_output=True, text=True, timeout=ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return int(process.stdout) if process.stdout.strip().isdecimal() else None


@dataclass(frozen=True, slots=True)
class LiveMachine:
    """Access to the GPUs of this machine, replaceable in tests."""

    gpus: Callable[[], Sequence[Device]] = local_gpus
    layout: Callable[[int], MigLayout] = read_layout  #: Number of a GPU → its MIG layout.
    granted_sms: Callable[[int, float], int | None] = _ask_client  #: Number of a GPU, and a percentage → SMs.
    pipe: str = field(default_factory=lambda: os.environ.get(MPS_PIPE, DEFAULT_PIPE))


def find_live_faults(node: Node, machine: LiveMachine | None = None) -> Iterator[tuple[str, str]]:
    """Yield the planned GPUs and shares that this machine does not have: the place, and the difference."""
    machine = machine or LiveMachine()
    gpus = [gpu for gpu in node.gpus if not gpu.device.startswith(("cpu", "sim:"))]
    devices = machine.gpus() if gpus else ()
    for gpu in gpus:
        place = f"{node.name} gpu {gpu.index}"
        if gpu.index >= len(devices):
            count = count_of(len(devices), "NVIDIA GPU") if devices else "no NVIDIA GPU"
            yield place, f"this machine has {count}, and the map plans a {gpu.device}"
        elif devices[gpu.index].name != gpu.device:
            yield place, f"the GPU is a {devices[gpu.index].name}, and the map plans a {gpu.device}"
        else:
            yield from ((place, fault) for fault in _find_faults(gpu, devices[gpu.index], machine))


def _find_faults(gpu: Gpu, device: Device, machine: LiveMachine) -> Iterator[str]:
    instances = [(part.mig.profile, part.mig.start) for part in gpu.partitions if part.mig is not None]
    profiles = {profile.name for profile in device.mig_profiles}
    for profile in sorted({profile for profile, _ in instances} - profiles):
        yield f"the driver offers no MIG profile {profile}; it offers {', '.join(sorted(profiles)) or 'none'}"
    try:
        layout = machine.layout(gpu.index)
    except UnavailableError as error:
        layout = MigLayout(False)
        if instances:
            yield str(error)
    target = MigLayout.of(instances) if instances else MigLayout(False)
    if layout != target:
        yield (
            f"the GPU has {_describe(layout)}, and the map plans {_describe(target)}: "
            "gpuprof serve --apply-mig changes the layout"
        )
    elif not instances:
        yield from _find_wrong_shares(gpu, device, machine)


def _find_wrong_shares(gpu: Gpu, device: Device, machine: LiveMachine) -> Iterator[str]:
    shares = {
        replica.sm_share_pct
        for part in gpu.partitions
        for replica in part.replicas
        if not part.unshared and replica.sm_share_pct < 100.0
    }
    for percentage in sorted(shares):
        sms = machine.granted_sms(gpu.index, percentage)
        limit = math.ceil(percentage / 100.0 * device.compute_units) + _PAIR
        if sms is None:
            yield f"a CUDA client at {percentage:g}% does not start"
        elif sms >= device.compute_units:
            yield (
                f"a client at {percentage:g}% gets all {sms} SMs: no MPS daemon answers at {machine.pipe}, or the "
                "client is in another namespace"
            )
        elif sms > limit:
            yield f"a client at {percentage:g}% gets {sms} SMs, and its share is {limit - _PAIR}"


def _describe(layout: MigLayout) -> str:
    if not layout.enabled:
        return "no MIG"
    return ", ".join(f"{profile} at {start}" for profile, start in layout.instances) or "MIG without instances"
