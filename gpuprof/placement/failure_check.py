"""Checks that no replica of a map is known to fail, alone or beside its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpuprof.domain.deployment import DeploymentMap, Partition, Replica
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.failure import FailedRun
from gpuprof.placement.evidence import Evidence, Violation
from gpuprof.placement.map_workloads import replica_workload

_TOLERANCE = 1e-6


def check_failures(deployment: DeploymentMap, evidence: Evidence) -> Iterator[Violation]:
    """Yield replicas that ask for no less, and have no more, than something that is known to have failed."""
    alone = [failed for failed in evidence.tried.failed if not failed.beside]
    for node, gpu, partition, replica in deployment.places():
        runs, device = _plain_workload(partition, replica), evidence.devices[gpu.device]
        if (device.name, runs) in evidence.tried.measured:
            continue
        failure = next((failed for failed in alone if _is_contained(device, [runs], [failed.workload], failed)), None)
        if failure is not None:
            yield Violation("failed", f"{node.name} gpu {gpu.index}", f"{replica.model}: {failure}")
    groups = [failed for failed in evidence.tried.failed if failed.beside]
    for node in deployment.nodes if groups else ():
        for gpu in node.gpus:
            for partition in gpu.partitions:
                held = [_plain_workload(partition, replica) for replica in partition.replicas]
                if (gpu.device, tuple(sorted(held))) in evidence.tried.together:
                    continue
                for failed in groups:
                    if _is_contained(evidence.devices[gpu.device], held, [failed.workload, *failed.beside], failed):
                        yield Violation("failed", f"{node.name} gpu {gpu.index}", str(failed))
                        break


def _plain_workload(partition: Partition, replica: Replica) -> Workload:
    """Return what a replica runs, as runs record it, which is without turns."""
    return replace(replica_workload(partition, replica, replica.batch), turns=0)


def _is_contained(device: Device, held: Sequence[Workload], tried: Sequence[Workload], failed: FailedRun) -> bool:
    """Whether there is for each of the workloads tried another one on the device that asks for as much with no more."""
    if device.name != failed.device or len(held) < len(tried):
        return False
    if not tried:
        return True
    for number, runs in enumerate(held):
        asks = runs.model == tried[0].model and tried[0].batch <= runs.batch and tried[0].processes <= runs.processes
        if asks and _is_no_larger(device, runs, tried[0], in_memory=failed.is_memory):
            others = [one for place, one in enumerate(held) if place != number]
            if _is_contained(device, others, tried[1:], failed):
                return True
    return False


def _is_no_larger(device: Device, runs: Workload, tried: Workload, *, in_memory: bool) -> bool:
    """Whether what runs has no more memory than what was tried, and no more compute unless memory was short."""
    profiles = {profile.name: profile for profile in device.mig_profiles}
    if not {runs.share.mig, tried.share.mig} <= {None, *profiles}:
        return False  # the geometry is reported by another check

    def measures(workload: Workload) -> tuple[int, float]:
        mig = workload.share.mig
        memory, units = (
            (device.dram_bytes, float(device.compute_units))
            if mig is None
            else (profiles[mig].memory_bytes, float(profiles[mig].sms))
        )
        return memory, units * workload.share.sm_pct

    (memory, units), (short, few) = measures(runs), measures(tried)
    return memory <= short and (in_memory or units <= few * (1.0 + _TOLERANCE))
