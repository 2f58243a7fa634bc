"""Checks before a load test that this machine is idle.

Latencies beyond the prediction are as often due to the machine as to the prediction. The checks take a second.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.errors import InputError
from gpuprof.machine.cgroup import own_cores
from gpuprof.machine.cores import allowed_cores
from gpuprof.machine.machine_load import MachineLoad, measure_lateness
from gpuprof.rules.cpu_slices import plan_shared_slices

#: Busy cores up to this number are normal background activity.
BUSY_CORES = 0.25
#: Stolen fraction of the CPU time above which the 99th percentile is affected.
STOLEN_PART = 0.005
#: Limit of the 99th percentile of wake-up delays; an idle machine needs a fraction of a millisecond.
LATE_MS = 2.0
_WATCH_S = 0.5


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """The findings of a check of the machine."""

    busy_cores: float | None  #: Cores kept busy by other programs; None: unknown.
    late_ms: float = 0.0  #: 99th percentile of the wake-up delay without load.
    #: Fraction of the CPU time that the hypervisor gave to other machines meanwhile; None: unknown.
    stolen: float | None = None

    def notes(self) -> Iterator[str]:
        """Yield warnings before a measurement."""
        if self.busy_cores is not None and self.busy_cores > BUSY_CORES:
            yield (
                f"something else keeps {self.busy_cores:.1f} of this machine's {len(allowed_cores())} cores busy: "
                "expect longer latencies than predicted"
            )
        if self.late_ms > LATE_MS:
            yield (
                f"1% of the wake-ups on this machine are {self.late_ms:.1f} ms late or more before anything is sent: "
                "every request needs several of them"
            )
        if (remark := describe_stolen(self.stolen)) is not None:
            yield f"before anything was sent, {remark}"


def describe_stolen(part: float | None) -> str | None:
    """Return a remark on the CPU time stolen by the hypervisor; None where it is negligible."""
    if part is None or part <= STOLEN_PART:
        return None
    return (
        f"the hypervisor gave {100.0 * part:.1f}% of this machine's time to others: what was due then waited "
        "for milliseconds, which no prediction covers and which p99 shows first"
    )


def is_local(host: str) -> bool:
    """Return whether this name or address is this machine's own loopback."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host.strip("[]"))).is_loopback
    except (OSError, ValueError):
        return host.strip("[]") == "::1"


def worker_cores(deployment: DeploymentMap) -> frozenset[int]:
    """Return the cores of this machine held by the workers of a map if served here; empty if impossible."""
    if len(deployment.nodes) != 1:
        return frozenset()
    shares = [
        (replica.sm_share_pct, replica.turns)
        for gpu in deployment.nodes[0].gpus
        if gpu.device.startswith("cpu") and not gpu.index
        for partition in gpu.partitions
        for replica in partition.replicas
    ]
    try:
        return frozenset(core for part in plan_shared_slices(shares, own_cores()) for core in part.cores)
    except InputError:
        return frozenset()


def check_machine() -> MachineCheck:
    """Watch the machine for a second before anything is sent."""
    load = MachineLoad(allowed_cores())
    time.sleep(_WATCH_S)
    busy = load.busy_cores()
    late_ms = measure_lateness(_WATCH_S)
    return MachineCheck(busy, late_ms, load.stolen_part())
