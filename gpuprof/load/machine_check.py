"""Checks before a load test that this machine is idle and as fast as when it was profiled.

Latencies beyond the prediction are as often due to the machine as to the prediction. The checks take a second or two.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuprof.domain.deployment import DeploymentMap, Replica
from gpuprof.errors import InputError
from gpuprof.load.load import LoadSettings, RequestStream, run_load
from gpuprof.load.target import Target
from gpuprof.machine.busy_cores import busy_cores
from gpuprof.machine.core_sharing import allowed_cores
from gpuprof.machine.cpu_share import own_cores
from gpuprof.machine.lost_time import StolenTime, measure_lateness
from gpuprof.rules.cpu_slices import plan_shared_slices
from gpuprof.rules.host_work import host_work_of_plan

#: Busy cores up to this number are normal background activity.
BUSY_CORES = 0.25
#: Relative difference from the profile's speed that is reported.
OTHER_SPEED = 0.1
#: Stolen fraction of the CPU time above which the 99th percentile is affected.
STOLEN_PART = 0.005
#: Limit of the 99th percentile of wake-up delays; an idle machine needs a fraction of a millisecond.
LATE_MS = 2.0
_WATCH_S, _PROBE_S, _MOST_PROBED = 0.5, 1.0, 2
#: Load of the probe: its pauses between batches are as long as during profiling.
_PROBED_LOAD = 0.25


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """The findings of a check of the machine."""

    busy_cores: float | None  #: Cores kept busy by other programs; None: unknown.
    slowdowns: Mapping[str, float]  #: Model → batch time at batch size 1 now, relative to the profile.
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
        for model, factor in self.slowdowns.items():
            if abs(factor - 1.0) > OTHER_SPEED:
                word = "longer" if factor > 1.0 else "less"
                yield (
                    f"{model}: a batch of one takes {100.0 * abs(factor - 1.0):.0f}% {word} than when it was profiled: "
                    "the machine's speed has changed, and all latencies with it"
                )


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


def check_machine(target: Target, streams: Sequence[RequestStream], deployment: DeploymentMap) -> MachineCheck:
    """Watch the machine, then send each model sequential requests and compare its batch times with the profile.

    Only the first two models with a known batch time are probed: each takes a second. Raises `GpuprofError` when no
    server answers, or the server lacks a model.
    """
    stolen = StolenTime()
    busy, late_ms = busy_cores(_WATCH_S, allowed_cores()), measure_lateness(_WATCH_S)
    stolen_part = stolen.part()
    handover_ms = host_work_of_plan(deployment.planned_with).handover_ms
    known = {stream.model: expected_ms(deployment, stream.model, handover_ms) for stream in streams}
    slowdowns = {}
    for stream in [candidate for candidate in streams if known[candidate.model]][:_MOST_PROBED]:
        wanted = known[stream.model]
        assert wanted is not None
        settings = LoadSettings(_PROBE_S, 0.0, arrivals="constant", clients=1)
        probe = RequestStream(
            stream.model, _PROBED_LOAD * 1000.0 / (wanted + handover_ms), stream.slo_ms, stream.path, dims=stream.dims
        )
        (stages,) = run_load(target, [probe], settings).stages
        seen, batches = stages.get("infer_ms"), stages.get("batches")
        if isinstance(seen, float) and isinstance(batches, dict) and set(batches) == {1}:
            slowdowns[stream.model] = seen / wanted
    return MachineCheck(busy, slowdowns, late_ms, stolen_part)


def expected_ms(deployment: DeploymentMap, model: str, handover_ms: float) -> float | None:
    """Return the time of a batch of 1 on an idle worker, without the handover; None: there is no single time."""
    replicas: list[Replica] = [replica for *_, replica in deployment.places() if model in replica.rates()]
    times = {
        round(own_ms[0] * replica.predicted.pause_factor, 9)
        for replica in replicas
        if (own_ms := replica.own_batch_ms()) and replica.model == model
    }
    return max(0.0, times.pop() - handover_ms) or None if len(times) == 1 else None
