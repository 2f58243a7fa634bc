"""Writes a deployment map in the words of other tools."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, Partition, Replica
from gpuprof.errors import InputError, unknown_name

Files = dict[str, str]


def export(deployment: DeploymentMap, target: str, image: str | None = None) -> Files:
    """Return the files to write, by their names relative to the output directory.

    Parameters
    ----------
    deployment : DeploymentMap
    target : {"json", "mig-parted", "triton", "k8s"}
    image : str, optional
        Container image that serves the models, which ``k8s`` needs.

    Raises
    ------
    InputError
        For an unknown target, a missing image, or a map that the target has no words for.
    """
    writers: dict[str, Callable[[DeploymentMap], Files]] = {
        "json": lambda one: {"map.json": one.to_json()},
        "mig-parted": mig_parted,
        "triton": triton,
        "k8s": lambda one: kubernetes(one, image),
    }
    if target not in writers:
        raise unknown_name("export", target, sorted(writers))
    if deployment.merges and target in ("triton", "k8s"):
        raise InputError(
            f"{target} cannot serve the merge {min(deployment.merges)}: it has no queue for several models",
            "place without --merge",
        )
    return writers[target](deployment)


def mig_parted(deployment: DeploymentMap) -> Files:
    """Return one file with a configuration for each node, as ``nvidia-mig-parted apply`` reads it.

    It holds counts of instances and not their starts: the driver places them, in general as the map does. Processors
    are left out.

    Raises
    ------
    InputError
        When the map has no GPU.
    """
    lines = ["version: v1", "mig-configs:"]
    names = _Names()
    for node in deployment.nodes:
        gpus = [gpu for gpu in node.gpus if not _is_cpu(gpu)]
        if gpus:
            lines.append(f"  {names.unique(_slug(node.name))}:")
        for gpu in gpus:
            counts = Counter(partition.mig.profile for partition in gpu.partitions if partition.mig is not None)
            lines.append(f"    - devices: [{gpu.index}]")
            lines.append(f"      mig-enabled: {'true' if counts else 'false'}")
            if counts:
                lines.append("      mig-devices:")
                lines += [f'        "{profile}": {count}' for profile, count in sorted(counts.items())]
            else:
                lines.append("      mig-devices: {}")
    if len(lines) == 2:
        raise InputError("the map has no GPU that could be cut into MIG instances", "export it to triton or json")
    return {"mig-parted.yaml": "\n".join(lines) + "\n"}


def triton(deployment: DeploymentMap) -> Files:
    """Return a Triton model repository for each replica, and the environment of the server that serves it.

    Triton gives all models of a server the same share, so a server stands for a replica. The files of the models
    are not copied: ``model.path`` says where each is to be linked as ``1/model.onnx``.
    """
    files: Files = {}
    for name, node, gpu, partition, replica in _replicas(deployment):
        files[f"{name}/{_slug(replica.model)}/config.pbtxt"] = _config(replica, gpu)
        files[f"{name}/server.env"] = "".join(
            f"{key}={value}\n" for key, value in _environment(node, gpu, partition, replica).items()
        )
        path = deployment.models[replica.model].path
        if path:
            files[f"{name}/{_slug(replica.model)}/1/model.path"] = str(Path(path).absolute()) + "\n"
    return files


def kubernetes(deployment: DeploymentMap, image: str | None) -> Files:
    """Return one manifest with a Deployment for each replica.

    Replicas in MIG instances ask for the instance's resource, the others for the device, which they share through
    MPS with a share of their own in the environment (the device plugin alone would give all the same). Clients reach
    the MPS daemon of their device through its pipe directory on the host and the host's shared memory.
    """
    if not image:
        raise InputError("a Kubernetes manifest needs a container image", "name it with --image")
    documents = []
    for name, node, gpu, partition, replica in _replicas(deployment):
        labels = {"app": "gpuprof", "gpuprof/model": _label(replica.model), "gpuprof/replica": name}
        documents.append(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": name, "labels": labels},
                "spec": {
                    "replicas": 1,
                    "selector": {"matchLabels": {"gpuprof/replica": name}},
                    "template": {"metadata": {"labels": labels}, "spec": _pod(image, node, gpu, partition, replica)},
                },
            }
        )
    # JSON is YAML, and a List takes any number of objects.
    content = {"apiVersion": "v1", "kind": "List", "items": documents}
    return {"gpuprof.yaml": json.dumps(content, indent=1) + "\n"}


def _pod(image: str, node: Node, gpu: Gpu, partition: Partition, replica: Replica) -> dict[str, object]:
    """Return the pod of one replica."""
    environment = _environment(node, gpu, partition, replica)
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # the device plugin decides that
    container: dict[str, object] = {
        "name": "server",
        "image": image,
        "args": ["--model", replica.model, "--batch", str(replica.batch), "--processes", str(replica.processes)],
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "resources": {},
    }
    if _is_cpu(gpu):
        return {"containers": [container]}
    pipes = environment["CUDA_MPS_PIPE_DIRECTORY"]
    container["resources"] = {"limits": {_resource(partition): 1}}
    container["volumeMounts"] = [{"name": "mps", "mountPath": pipes}]
    return {"hostIPC": True, "containers": [container], "volumes": [{"name": "mps", "hostPath": {"path": pipes}}]}


def _resource(partition: Partition) -> str:
    """Return the extended resource that the device plugin offers (strategy "mixed"); a plus is none of its letters."""
    if partition.mig is None:
        return "nvidia.com/gpu"
    return "nvidia.com/mig-" + partition.mig.profile.replace("+", ".")


def _replicas(deployment: DeploymentMap) -> Iterator[tuple[str, Node, Gpu, Partition, Replica]]:
    """Yield the replicas with a name for each that Kubernetes and file systems accept."""
    names = _Names()
    for node, gpu, partition, replica in deployment.places():
        name = names.unique(_slug(f"{node.name}-gpu{gpu.index}-{replica.model}")[:50].rstrip("-"))
        yield name, node, gpu, partition, replica


class _Names:
    """Gives every name once; what was given before gets a number."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._times: Counter[str] = Counter()

    def unique(self, name: str) -> str:
        """Return ``name``, or ``name-2``, ``name-3`` … whichever was not given yet."""
        free = name
        while free in self._given:
            self._times[name] += 1
            free = f"{name}-{self._times[name] + 1}"
        self._given.add(free)
        return free


def _environment(node: Node, gpu: Gpu, partition: Partition, replica: Replica) -> dict[str, str]:
    """Return what a CUDA process of the replica reads before it starts."""
    if _is_cpu(gpu):
        return {}
    slot = "" if partition.mig is None else f"-slot{partition.mig.start}"
    environment = {"CUDA_VISIBLE_DEVICES": str(gpu.index)} if partition.mig is None else {}
    environment["CUDA_MPS_PIPE_DIRECTORY"] = f"/tmp/nvidia-mps-{_slug(node.name)}-gpu{gpu.index}{slot}"
    environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{replica.sm_share_pct:g}"
    if replica.memory_limit_bytes:
        environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={-(-replica.memory_limit_bytes // 2**20)}M"
    return environment


def _config(replica: Replica, gpu: Gpu) -> str:
    return (
        f'name: "{_slug(replica.model)}"\n'
        'platform: "onnxruntime_onnx"\n'
        f"max_batch_size: {replica.batch}\n"
        "dynamic_batching {\n"
        f"  preferred_batch_size: [ {replica.batch} ]\n"
        f"  max_queue_delay_microseconds: {round(replica.max_wait_ms * 1000)}\n"
        "}\n"
        "instance_group [\n"
        f"  {{ count: {replica.processes} kind: {'KIND_CPU' if _is_cpu(gpu) else 'KIND_GPU'} }}\n"
        "]\n"
    )


def _is_cpu(gpu: Gpu) -> bool:
    """Whether the device is a machine's processor, whose names begin so."""
    return gpu.device.startswith("cpu")


def _slug(text: str) -> str:
    """Return ``text`` in lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def _label(text: str) -> str:
    """Return ``text`` as the value of a label, which Kubernetes limits to 63 characters."""
    return _slug(text)[:63].rstrip("-")
