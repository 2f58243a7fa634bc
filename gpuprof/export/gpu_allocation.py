"""GPU allocation of Kubernetes: device plugin, dynamic resource allocation (DRA), KAI Scheduler or HAMi.

The device plugin and DRA give a pod whole GPUs or MIG instances; a pod is a node of the map, and divides its GPUs by
MPS daemons of its own. KAI Scheduler and HAMi give a pod a fraction of a GPU; a pod is a single replica of the map.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, Partition, Replica
from gpuprof.errors import InputError
from gpuprof.export.bundle import is_cpu, replica_names
from gpuprof.export.pod_resources import list_device_names

DEVICE_PLUGIN, DRA, KAI, HAMI = "k8s", "k8s-dra", "k8s-kai", "k8s-hami"
ALLOCATIONS = (DEVICE_PLUGIN, DRA, KAI, HAMI)
#: Allocations that give a pod a fraction of a GPU.
FRACTIONAL = (KAI, HAMI)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Parts of a pod and its manifests that request GPUs."""

    #: Device limits of the container, by resource name; in place of those of the device plugin.
    limits: Mapping[str, str]
    container: Mapping[str, Any] = field(default_factory=dict)  #: Further fields of the container's resources.
    pod: Mapping[str, Any] = field(default_factory=dict)  #: Further fields of the pod's spec.
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    manifests: tuple[Mapping[str, Any], ...] = ()  #: Objects of their own.


def split_replicas(deployment: DeploymentMap) -> DeploymentMap:
    """Return the map with a node for each replica, on a GPU or MIG instance that the cluster divides.

    Raises `InputError` for replicas that share a MIG instance, which KAI Scheduler and HAMi do not divide, or a worker,
    and for CPUs.
    """
    nodes = []
    for name, _, gpu, partition, replica in replica_names(deployment):
        if is_cpu(gpu):
            raise InputError("a CPU has no fractions that a GPU scheduler gives", "export the map to k8s")
        if partition.mig is not None and len(partition.replicas) > 1:
            raise InputError(
                f"{replica.model} shares a MIG instance, and this scheduler divides whole GPUs only",
                "export the map to k8s or k8s-dra",
            )
        if any(replica.turns and other.turns == replica.turns for other in partition.replicas if other is not replica):
            raise InputError(
                f"{replica.model} shares a worker, and this scheduler gives each replica a pod",
                "export the map to k8s or k8s-dra, or place with --isolate",
            )
        single = partition.model_copy(update={"replicas": (replica,), "unshared": partition.mig is None})
        nodes.append(Node(name=name, gpus=(gpu.model_copy(update={"partitions": (single,)}),)))
    return deployment.model_copy(update={"nodes": tuple(nodes)})


def allocate(target: str, name: str, node: Node, replicas: Mapping[str, tuple[Gpu, Partition, Replica]]) -> Allocation:
    """Return the allocation of a node's pod.

    Parameters
    ----------
    target : str
        One of `ALLOCATIONS`.
    name : str
        Name of the pod's Deployment.
    node : Node
        Node of the map that the pod serves.
    replicas : mapping of str to tuple of Gpu, Partition and Replica
        For fractional allocations: the replica of each node as the map places it, with its share.
    """
    devices = [device for gpu in node.gpus for device in list_device_names(gpu)]
    if target == DRA:
        return _claim_devices(name, devices)
    if target in FRACTIONAL and devices == ["nvidia.com/gpu"]:
        _, _, replica = replicas[node.name]
        if target == KAI and replica.sm_share_pct >= 100.0:
            return _schedule_by_kai({"nvidia.com/gpu": "1"}, {})  # it admits fractions below 1 only
        return _request_kai_fraction(replica) if target == KAI else _request_hami_fraction(replica)
    allocation = Allocation({device: str(devices.count(device)) for device in sorted(set(devices))})
    return allocation if target != KAI else _schedule_by_kai(allocation.limits, {})


def planned_replicas(deployment: DeploymentMap) -> dict[str, tuple[Gpu, Partition, Replica]]:
    """Return the replicas of a map by the names of the nodes that `split_replicas` makes of them."""
    return {name: (gpu, part, replica) for name, _, gpu, part, replica in replica_names(deployment)}


def describe_allocation(target: str, planned: Mapping[str, tuple[Gpu, Partition, Replica]]) -> list[str]:
    """Return remarks on shares that the target does not keep as planned."""
    replicas = [replica for _, part, replica in planned.values() if part.mig is None]
    if not replicas:
        return []
    notes = []
    if any(replica.sm_share_pct % 1 for replica in replicas):
        notes.append("shares are rounded down to whole percents, which the scheduler counts in")
    if target == KAI:
        notes.append(
            "KAI Scheduler divides the memory of a GPU and not its SMs: pods beside one another are not held to shares"
        )
    return [*notes, "queue default-queue of KAI Scheduler: change the label for another"] if target == KAI else notes


def _claim_devices(name: str, devices: list[str]) -> Allocation:
    """Return claims on whole GPUs and MIG instances from NVIDIA's DRA driver."""
    if not devices:
        return Allocation({})
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "labels": {"app": "gpuprof"}},
        "spec": {"spec": {"devices": {"requests": list(_request_devices(devices))}}},
    }
    return Allocation(
        limits={},
        container={"claims": [{"name": "gpus"}]},
        pod={"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": name}]},
        manifests=(template,),
    )


def _request_devices(devices: list[str]) -> Iterator[dict[str, Any]]:
    for number, device in enumerate(devices):
        kind = device.removeprefix("nvidia.com/")
        exactly: dict[str, Any] = {"deviceClassName": "gpu.nvidia.com"}
        if kind != "gpu":
            # The plugin writes a dot where the driver's profile has a plus: 1g.10gb.me is 1g.10gb+me.
            head, _, suffix = kind.removeprefix("mig-").partition("gb")
            profile = f"{head}gb{suffix.replace('.', '+', 1)}"
            expression = f"device.attributes['gpu.nvidia.com'].profile == '{profile}'"
            exactly = {"deviceClassName": "mig.nvidia.com", "selectors": [{"cel": {"expression": expression}}]}
        yield {"name": f"device-{number}", "exactly": exactly}


def _request_kai_fraction(replica: Replica) -> Allocation:
    """Return the annotation for a fraction of a GPU, which KAI Scheduler counts in memory."""
    return _schedule_by_kai({}, {"gpu-fraction": f"{math.floor(replica.sm_share_pct) / 100:g}"})


def _schedule_by_kai(limits: Mapping[str, str], annotations: Mapping[str, str]) -> Allocation:
    return Allocation(
        limits=limits,
        pod={"schedulerName": "kai-scheduler"},
        labels={"kai.scheduler/queue": "default-queue"},
        annotations=annotations,
    )


def _request_hami_fraction(replica: Replica) -> Allocation:
    """Return the limits of a part of a GPU's SMs and memory, which HAMi enforces in the container."""
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpucores": f"{math.floor(replica.sm_share_pct)}"}
    memory = replica.memory_limit_bytes or replica.predicted.memory_bytes
    if memory is not None:
        limits["nvidia.com/gpumem"] = str(-(-memory // 2**20))
    return Allocation(limits)
