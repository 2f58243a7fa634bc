"""A deployment map as manifests of Kubernetes and KServe: a pod for each node, which runs ``gpuprof serve``.

A pod requests whole GPUs and MIG instances (strategy ``mixed``) from the device plugin or by dynamic resource
allocation (DRA), and shares them by MPS daemons of its own. The plugin's own MPS sharing is not used: it gives all pods
equal parts of a GPU, and does not divide MIG devices. KAI Scheduler and HAMi divide GPUs themselves: there each replica
has a pod. The manifests are templates in ``templates/``.

A map has the utilisation of each worker process and, for models measured on a CPU, their host memory. The other
requests of processor time and memory are assumptions, and marked so in the texts.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import yaml

from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, Partition, Replica
from gpuprof.domain.number_format import GIB
from gpuprof.domain.plural import count_of
from gpuprof.errors import InputError
from gpuprof.export.bundle import (
    Bundle,
    UniqueNames,
    client_models,
    fill_text,
    is_cpu,
    read_template,
    replica_names,
    slug,
    start_node_bundle,
)
from gpuprof.serving.server_settings import ServerSettings

#: Router and machine process: an assumption.
_SERVER_CORES = 1.0
#: Memory of router, machine process and their imports, and 1 GiB for tensors in flight (``serve --buffer-mb``): an
#: assumption.
_SERVER_BYTES = GIB // 4 + GIB
#: Memory of a worker process without its model, an assumption; on a GPU it holds the runtime's libraries and CUDA's
#: context.
_CPU_PROCESS_BYTES, _GPU_PROCESS_BYTES = GIB // 16, 2 * GIB
#: Memory of a model over the size of its file, where only this size is known: weights, and as much for activations.
_FILE_FACTOR = 2
#: Memory limit over the request, where limits are required: a limit that is too low would kill the process.
_LIMIT_FACTOR = 2


@dataclass(frozen=True, slots=True)
class PodResources:
    """The resource requests of a pod."""

    cores: float
    memory_bytes: int
    cpu_limit: int | None  #: Cores that the map divides; None for a map of GPUs only.
    most_cores: int  #: Maximum number of cores busy at once.
    source: str  #: Sources of ``cores`` and ``memory_bytes``.

    def requirements(self, devices: Mapping[str, str], limited: bool = False) -> dict[str, Any]:
        """Return the resources of a container, as texts, which Kubernetes keeps as they are.

        ``devices``: limits of devices by resource name; ``limited``: whether processor and memory need limits, since
        something would set others.
        """
        limits = dict(devices)
        if self.cpu_limit is not None or limited:
            limits["cpu"] = str(self.cpu_limit or self.most_cores)
        if limited:
            limits["memory"] = _format_mebibytes(_LIMIT_FACTOR * self.memory_bytes)
        return {"requests": {"cpu": self.cpu, "memory": self.memory}, "limits": dict(sorted(limits.items()))}

    @property
    def cpu(self) -> str:
        """CPU time in the notation of Kubernetes."""
        return f"{math.ceil(10 * self.cores - 1e-9) * 100}m" if self.cores % 1 else f"{self.cores:.0f}"

    @property
    def memory(self) -> str:
        """Memory in the notation of Kubernetes."""
        return _format_mebibytes(self.memory_bytes)


def ask_machine(node: Node, file_bytes: Mapping[str, int]) -> PodResources:
    """Return the resource requests of a node's pod. ``file_bytes``: size of the existing files of each model."""
    cores = sum(int(match[1]) for gpu in node.gpus if (match := re.fullmatch(r"cpu-.*?(\d+)c", gpu.device)))
    replicas = [(gpu, replica) for gpu in node.gpus for part in gpu.partitions for replica in part.replicas]
    processes = sum(replica.processes for _, replica in replicas)
    # A thread that waits for a GPU does so awake, in CUDA's default: its core is busy for as long as the batch runs.
    # Processes of unknown utilization count as busy.
    utilizations = [(replica.predicted.utilization, replica.processes) for _, replica in replicas]
    busy = math.fsum((1.0 if part is None else min(1.0, part)) * count for part, count in utilizations)
    workers = sum(
        item.processes * (_CPU_PROCESS_BYTES if is_host(gpu) else _GPU_PROCESS_BYTES) for gpu, item in replicas
    )
    models = sum(_find_model_bytes(gpu, replica, file_bytes) for gpu, replica in replicas)
    cores_from = (
        "the cores that the map divides"
        if cores
        else f"{_SERVER_CORES:g} core for the router (assumed), {busy:.2g} for {count_of(processes, 'worker process')} "
        "(busy as the map plans; that each takes a core while a batch runs is assumed)"
    )
    memory_from = ", ".join(
        f"{size / GIB:.3g} GiB for {part}"
        for size, part in (
            (_SERVER_BYTES, "router and buffers (assumed)"),
            (workers, "worker processes (assumed)"),
            (models, "models (as the map has it, else assumed from their files)"),
        )
    )
    return PodResources(
        cores=float(cores) or _SERVER_CORES + busy,
        memory_bytes=_SERVER_BYTES + workers + models,
        cpu_limit=cores or None,
        most_cores=cores or math.ceil(2 * _SERVER_CORES) + processes,
        source=f"processor: {cores_from}; memory: {memory_from}",
    )


def _find_model_bytes(gpu: Gpu, replica: Replica, file_bytes: Mapping[str, int]) -> int:
    """Return the host memory of a replica's model in all its processes."""
    memory_bytes, size = replica.predicted.memory_bytes, file_bytes.get(replica.model)
    if is_cpu(gpu) and memory_bytes is not None:
        return memory_bytes
    if size is not None:  # on a GPU, weights pass through the host's memory while they are loaded
        return (_FILE_FACTOR if is_cpu(gpu) else 1) * size * replica.processes
    return 0 if is_host(gpu) else memory_bytes or 0


def is_host(gpu: Gpu) -> bool:
    """Return whether processes run on the machine's CPU, or only simulate a device by sleeping."""
    return is_cpu(gpu) or gpu.device.startswith("sim:")


def list_device_names(gpu: Gpu) -> Iterator[str]:
    """Yield the resource names of the GPU or its used MIG instances in the device plugin; none for a CPU."""
    if is_host(gpu):
        return
    instances = [part.mig.profile for part in gpu.partitions if part.mig is not None and part.replicas]
    yield from (f"nvidia.com/mig-{profile.replace('+', '.')}" for profile in instances)
    if not instances:
        yield "nvidia.com/gpu"


def _format_mebibytes(count: int) -> str:
    return f"{-(-count // 2**20)}Mi"


DEVICE_PLUGIN, DRA, KAI, HAMI, KSERVE = "k8s", "k8s-dra", "k8s-kai", "k8s-hami", "kserve"
ALLOCATIONS = (DEVICE_PLUGIN, DRA, KAI, HAMI)
#: Devices of a claim at most: AllocationResultsMaxSize of k8s.io/api/resource/v1.
_LARGEST_CLAIM = 32
#: Allocations that give a pod a fraction of a GPU.
FRACTIONAL = (KAI, HAMI)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Parts of a pod and its manifests that request GPUs, for one allocation method."""

    #: Device limits of the container, by resource name; in place of those of the device plugin.
    limits: Mapping[str, str]
    container: Mapping[str, Any] = field(default_factory=dict)  #: Further fields of the container's resources.
    pod: Mapping[str, Any] = field(default_factory=dict)  #: Further fields of the pod's spec.
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    manifests: tuple[Mapping[str, Any], ...] = ()  #: Objects of their own.


def split_replicas(deployment: DeploymentMap) -> DeploymentMap:
    """Return the map with a separate node for each replica, on a GPU or MIG instance that the cluster divides.

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
    """Return the allocation of the pod of ``node``, whose Deployment is called ``name``; ``target``: of `ALLOCATIONS`.

    ``replicas``: for fractional allocations the replica of each node as the map places it, with its share.
    """
    devices = [device for gpu in node.gpus for device in list_device_names(gpu)]
    if target == DRA and devices:
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
    """Return remarks on planned shares that the target does not enforce."""
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
    parts = [devices[start : start + _LARGEST_CLAIM] for start in range(0, len(devices), _LARGEST_CLAIM)]
    claims = {f"gpus-{number}": list(_request_devices(part)) for number, part in enumerate(parts)}
    templates = {claim: f"{name}-{claim}" for claim in claims}
    return Allocation(
        limits={},
        container={"claims": [{"name": claim} for claim in claims]},
        pod={"resourceClaims": [{"name": key, "resourceClaimTemplateName": name} for key, name in templates.items()]},
        manifests=tuple(
            _fill("claim.yaml", name=templates[claim], requests=requests) for claim, requests in claims.items()
        ),
    )


def _request_devices(devices: list[str]) -> Iterator[dict[str, Any]]:
    for number, (device, count) in enumerate(Counter(devices).items()):
        kind = device.removeprefix("nvidia.com/")
        exactly: dict[str, Any] = {"deviceClassName": "gpu.nvidia.com", "count": count}
        if kind != "gpu":
            # The plugin writes a dot where the driver's profile has a plus: 1g.10gb.me is 1g.10gb+me.
            head, _, suffix = kind.removeprefix("mig-").partition("gb")
            profile = f"{head}gb{suffix.replace('.', '+', 1)}"
            expression = f"device.attributes['gpu.nvidia.com'].profile == '{profile}'"
            exactly |= {"deviceClassName": "mig.nvidia.com", "selectors": [{"cel": {"expression": expression}}]}
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


Manifest = dict[str, Any]
HTTP_PORT = ServerSettings().port
GRPC_PORT = HTTP_PORT + 1
SECRET, VOLUME_CLAIM = "gpuprof-server", "gpuprof-models"
#: Kubernetes keeps no larger object.
_LARGEST_MAP_BYTES = 1_000_000


def kubernetes(deployment: DeploymentMap, image: str, base: Path, target: str = DEVICE_PLUGIN) -> Bundle:
    """Return manifests of a server for each node, a Service for each model and shared objects, and the models' files.

    The map's paths are those in the volume, and its GPUs are numbered from 0. Raises `InputError` when the image is not
    a single name, the map is too large for Kubernetes, or the scheduler of the target cannot divide GPUs as the map
    does. ``target``: one of `gpuprof.export.kubernetes.ALLOCATIONS`, or ``"kserve"``.
    """
    if image.split() != [image]:
        raise InputError(f"--image must name one image without spaces but got {image!r}", "as in registry/gpuprof:0.1")
    planned = planned_replicas(deployment) if target in FRACTIONAL else {}
    divided = split_replicas(deployment) if target in FRACTIONAL else deployment
    bundle, pod_map = start_node_bundle(divided, base, "/models")
    text = pod_map.to_json()
    if (size := len(text.encode())) > _LARGEST_MAP_BYTES:
        raise InputError(
            f"the map has {size:,} bytes, and Kubernetes keeps {_LARGEST_MAP_BYTES:,} in a ConfigMap",
            "place fewer nodes in a map",
        )
    file_bytes = _measure_files(bundle, pod_map)
    resources = {node.name: ask_machine(node, file_bytes) for node in pod_map.nodes}
    # Room for as much again as the models have now.
    gibibytes = max(1, -(-2 * sum(path.stat().st_size for path in bundle.models.values()) // GIB))
    manifests = _fill("shared.yaml", map=text, storage=f"{gibibytes}Gi")
    labels, services = _label_nodes(pod_map), _name_services(pod_map)
    for node in pod_map.nodes:
        name_of_server = f"gpuprof-{labels[node.name]}"
        allocation = allocate(target, name_of_server, node, planned)
        serves = {f"gpuprof.serves/{services[model]}": "true" for model in client_models(pod_map, node)}
        values: dict[str, Any] = {
            "name": name_of_server,
            "labels": {"app": "gpuprof", "gpuprof/node": labels[node.name], **serves, **allocation.labels},
            "annotations": {"gpuprof/map-sha256": hashlib.sha256(text.encode()).hexdigest(), **allocation.annotations},
        }
        # A scheduler of fractions chooses the machine; elsewhere the map's nodes are machines with a label.
        selector = {} if target in FRACTIONAL else {"gpuprof.node": labels[node.name]}
        pod = {"node": node.name, "node_selector": selector, "image": image}
        manifests += [*allocation.manifests, _make_server(target, values, pod, resources[node.name], allocation)]
    manifests += [_fill("service.yaml", name=name, serves=f"gpuprof.serves/{name}") for name in services.values()]
    manifest = "kserve.yaml" if target == KSERVE else "gpuprof.yaml"
    bundle.files[manifest] = yaml.dump_all(manifests, Dumper=_ReadableDumper, sort_keys=False, allow_unicode=True)
    bundle.files["README.md"] = _write_readme(pod_map, resources, manifest, target)
    bundle.notes += _note_uneven_services(deployment) + describe_allocation(target, planned)
    bundle.notes.append("the processor time and memory that pods request are assumptions in part: README.md says which")
    return bundle


def _make_server(
    target: str, values: dict[str, Any], pod: dict[str, Any], resources: PodResources, allocation: Allocation
) -> Manifest:
    """Return the manifest of a node's server: a Deployment, or an InferenceService of KServe."""
    # KServe would limit a container without limits to one core and 2 GiB.
    requirements = resources.requirements(allocation.limits, limited=target == KSERVE) | dict(allocation.container)
    pod |= {"resources": requirements, "container": "kserve-container" if target == KSERVE else "serve"}
    spec = _fill("pod.yaml", **pod) | dict(allocation.pod)
    if target != KSERVE:
        deployed: Manifest = _fill("deployment.yaml", **values, node_label=values["labels"]["gpuprof/node"], pod=spec)
        return deployed
    # Knative would scale the one server of a node, and allow a single port.
    values["annotations"] = {"serving.kserve.io/deploymentMode": "RawDeployment"} | values["annotations"]
    service: Manifest = _fill("inference_service.yaml", **values)
    service["spec"]["predictor"] |= spec
    return service


def _fill(template: str, /, **values: object) -> Any:
    """Return a template filled with these values in JSON, which is also valid YAML."""
    texts = {key: json.dumps(value) for key, value in values.items()}
    return yaml.safe_load(Template(read_template(template)).substitute(texts, http_port=HTTP_PORT, grpc_port=GRPC_PORT))


class _ReadableDumper(yaml.SafeDumper):
    """Writes multi-line texts, such as the map, as YAML blocks that people can read and compare."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return a text as YAML, as a block if it has several lines."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_ReadableDumper.add_representer(str, _ReadableDumper.represent_str)


def _measure_files(bundle: Bundle, deployment: DeploymentMap) -> dict[str, int]:
    """Return the bytes of each model's files, including its external data, for existing files."""
    paths = {name: model.path for name, model in deployment.models.items()}
    folders = {name: Path(path).parent for name, path in paths.items() if path is not None}
    sizes = {
        name: sum(file.stat().st_size for path, file in bundle.models.items() if folder in Path("/", path).parents)
        for name, folder in folders.items()
    }
    return {name: size for name, size in sizes.items() if size}


def _label_nodes(deployment: DeploymentMap) -> dict[str, str]:
    """Return a label of its own for each node, which its server is called by, too.

    KServe makes labels of the server's name, "isvc.gpuprof-…-predictor", and a label has 63 letters at most.
    """
    names = UniqueNames()
    return {node.name: names.add(slug(node.name)[:36].rstrip("-")) for node in deployment.nodes}


def _name_services(deployment: DeploymentMap) -> dict[str, str]:
    names = UniqueNames()
    models = {model for node in deployment.nodes for model in client_models(deployment, node)}
    return {model: names.add(f"m-{slug(model)[:40]}".rstrip("-")) for model in sorted(models)}


def _note_uneven_services(deployment: DeploymentMap) -> list[str]:
    """Return a remark on each model planned at unequal rates on its nodes: a Service sends all of them equally many."""
    rates: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for node, _, _, replica in deployment.places():
        rates[replica.model][node.name] += replica.rate_rps
    return [
        f"the Service of {model} sends each node the same, and the map plans "
        + ", ".join(f"{rate:.3g}/s on {node}" for node, rate in by_node.items())
        + ": split it by weights in your gateway, or place it on equal nodes"
        for model, by_node in rates.items()
        if len(by_node) > 1 and max(by_node.values()) > 1.1 * min(by_node.values())
    ]


def _write_readme(deployment: DeploymentMap, resources: Mapping[str, PodResources], manifest: str, target: str) -> str:
    nodes = "\n".join(
        f"       kubectl label node YOUR-NODE gpuprof.node={name}  # {node}"
        for node, name in _label_nodes(deployment).items()
    )
    services = "\n".join(f"| {model} | {name} |" for model, name in _name_services(deployment).items())
    requests = "\n".join(f"| {node} | {pod.cpu} | {pod.memory} | {pod.source} |" for node, pod in resources.items())
    texts = {
        "manifest": manifest,
        "preparation": fill_text(f"{DEVICE_PLUGIN if target == KSERVE else target}.md", nodes=nodes).rstrip(),
        "services": services,
        "requests": requests,
    }
    return fill_text("kubernetes.md", secret=SECRET, volume=VOLUME_CLAIM, **texts)
