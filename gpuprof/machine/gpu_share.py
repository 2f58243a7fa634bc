"""Shares of a GPU: binds processes to them by MPS percentage, by MIG instance, or both; creates and checks them.

Every MIG instance is a GPU instance with a single compute instance of full size (``nvidia-smi mig -cgi PROFILE:START
-C``). Source: NVIDIA, Multi-Instance GPU User Guide, "Getting Started with MIG".
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gpuprof.domain.deployment import Gpu, Node
from gpuprof.domain.device import Device
from gpuprof.domain.plural import count_of
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, UnavailableError
from gpuprof.machine.gpu import LocalMigInstance, list_local_gpus, local_gpus
from gpuprof.machine.mps import DEFAULT_PIPE, PERCENTAGE, mps_daemon
from gpuprof.runtime.module_command import ANSWER_S
from gpuprof.runtime.providers import MPS_PIPE

VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def bind_shares(device: Device, shares: Sequence[Share], nvml: Any = None) -> Iterator[tuple[dict[str, str], ...]]:
    """Yield the environment that binds a process to each of ``shares`` of a GPU while all are running.

    Partial shares of the same MIG profile share an instance; whole shares get an instance each. MPS runs when any share
    is partial or several share the whole GPU; if all of several shares are the whole GPU, no process is limited and
    each may use all SMs. ``nvml``: replaces ``pynvml``. Raises `InputError` when the shares exceed the GPU, or the
    device has no such profile; `UnavailableError` when MPS is missing, or no such instance exists: none is created
    here.
    """
    plain = [share for share in shares if share.mig is None]
    total = sum(share.sm_pct for share in plain)
    unshared = len(plain) > 1 and all(share.is_whole for share in plain)
    if total > 100.0 + 1e-6 and len(plain) > 1 and not unshared:
        raise InputError(f"shares of {total:g}% together do not fit a GPU", "give smaller shares")
    for share in shares:
        if share.mig is not None:
            device.mig_profile(share.mig)
    if any(share.mig for share in shares):
        if plain:
            raise InputError("a GPU is either cut into MIG instances or shared whole, not both")
        gpus = list_local_gpus(nvml)
        with _in_instances(shares, gpus[0].instances if gpus else ()) as environments:
            yield environments
    elif len(shares) == 1 and shares[0].is_whole:
        yield ({},)
    else:
        with mps_daemon() as daemon:
            yield tuple(daemon.environment(None if unshared else share.sm_pct) for share in shares)


def describe_share_means(environments: Sequence[Mapping[str, str]]) -> str:
    """Return the mechanism that enforces shares in environments of `bind_shares`, for a run's settings."""
    names = {name for environment in environments for name in environment}
    means = [word for name, word in _MEANS.items() if name in names]
    return " and ".join(means) or "nothing: the whole device"


_MEANS = {VISIBLE: "MIG", PERCENTAGE: "MPS"}


@contextmanager
def _in_instances(
    shares: Sequence[Share], instances: Sequence[LocalMigInstance]
) -> Iterator[tuple[dict[str, str], ...]]:
    free = list(instances)
    uuids: list[str] = []
    open_parts: dict[str, tuple[str, float]] = {}  # profile → shared instance, and its free percentage
    for share in shares:
        assert share.mig is not None
        uuid, free_pct = open_parts.get(share.mig, ("", 0.0))
        if free_pct < share.sm_pct - 1e-6:
            uuid, free_pct = _take_instance(free, share.mig), 100.0
        open_parts[share.mig] = (uuid, free_pct - share.sm_pct)
        uuids.append(uuid)
    if all(share.sm_pct == 100.0 for share in shares):
        yield tuple({VISIBLE: uuid} for uuid in uuids)
        return
    # A daemon serves a single MIG instance, and a client finds its daemon by a single environment variable.
    if len(set(uuids)) > 1:
        raise UnavailableError("parts of several MIG instances at once need a daemon each", "measure them one by one")
    with mps_daemon(uuids[0]) as daemon:
        yield tuple({VISIBLE: uuids[0], **daemon.environment(share.sm_pct)} for share in shares)


def _take_instance(free: list[LocalMigInstance], profile: str) -> str:
    for instance in free:
        if instance.profile == profile:
            free.remove(instance)
            return instance.uuid
    profiles = ", ".join(instance.profile for instance in free) or "none"
    raise UnavailableError(
        f"no free MIG instance {profile}: there are {profiles}", f"nvidia-smi mig -cgi {profile} -C makes one"
    )


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
    """Return the output of the tool; a failure whose output contains ``harmless`` is no error."""
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


# CUDA raises no error for most wrong shares: a client that finds no MPS daemon at its pipe directory runs on the whole
# GPU. So a client is started with each planned percentage, and asked for its number of SMs.
_CLIENT = "from gpuprof.machine.gpu import visible_sms; print(visible_sms() or '')"

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
