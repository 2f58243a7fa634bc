"""A deployment map as manifests of Kubernetes and KServe: a pod for each node, which runs ``gpuprof serve``.

A pod requests whole GPUs and MIG instances (strategy ``mixed``) from the device plugin or by DRA, and shares them by
MPS daemons of its own. The plugin's own MPS sharing is not used: it gives all pods equal parts of a GPU, and does not
divide MIG devices. KAI Scheduler and HAMi divide GPUs themselves: there each replica has a pod.
The manifests are templates in ``templates/``.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from typing import Any

import yaml

from gpuprof.domain.deployment import DeploymentMap, Node
from gpuprof.errors import InputError
from gpuprof.export.bundle import (
    Bundle,
    UniqueNames,
    client_models,
    fill_text,
    label,
    read_template,
    slug,
    start_node_bundle,
)
from gpuprof.export.gpu_allocation import (
    DEVICE_PLUGIN,
    FRACTIONAL,
    Allocation,
    allocate,
    describe_allocation,
    planned_replicas,
    split_replicas,
)
from gpuprof.export.pod_resources import PodResources, ask_machine

Manifest = dict[str, Any]
HTTP_PORT, GRPC_PORT = 8000, 8001
SECRET, VOLUME_CLAIM = "gpuprof-server", "gpuprof-models"
#: Kubernetes keeps no larger object.
_LARGEST_MAP_BYTES = 1_000_000


def kubernetes(deployment: DeploymentMap, image: str, base: Path, target: str = DEVICE_PLUGIN) -> Bundle:
    """Return the manifests of a Deployment for each node and a Service for each model, and the models' files.

    Raises `InputError` when the image is not a single name, the map is too large for Kubernetes, or the scheduler of
    the target cannot divide GPUs as the map does. ``target``: one of `gpuprof.export.gpu_allocation.ALLOCATIONS`.
    """

    def make_server(
        values: Mapping[str, Any], pod: Mapping[str, Any], resources: PodResources, allocation: Allocation
    ) -> Manifest:
        requirements = resources.requirements(allocation.limits) | dict(allocation.container)
        pod_manifest = _fill("pod.yaml", **pod, container="serve", resources=requirements) | dict(allocation.pod)
        deployed: Manifest = _fill("deployment.yaml", **values, pod=pod_manifest)
        return deployed

    return _write_bundle(deployment, image, base, "gpuprof.yaml", make_server, target)


def kserve(deployment: DeploymentMap, image: str, base: Path) -> Bundle:
    """Return the manifests of an InferenceService of KServe for each node, and the models' files.

    Raises `InputError` as `kubernetes` does.
    """

    def make_server(
        values: Mapping[str, Any], pod: Mapping[str, Any], resources: PodResources, allocation: Allocation
    ) -> Manifest:
        # KServe would limit a container without limits to one core and 2 GiB.
        limits = resources.requirements(allocation.limits, limited=True)
        # Knative would scale the one server of a node, and allow a single port.
        mode = {"serving.kserve.io/deploymentMode": "RawDeployment"}
        annotations = {**mode, **values["annotations"]}
        service: Manifest = _fill("inference_service.yaml", **{**values, "annotations": annotations})
        service["spec"]["predictor"] |= _fill("pod.yaml", **pod, container="kserve-container", resources=limits)
        return service

    return _write_bundle(deployment, image, base, "kserve.yaml", make_server)


def _write_bundle(
    deployment: DeploymentMap,
    image: str,
    base: Path,
    name: str,
    make_server: Callable[[Mapping[str, Any], Mapping[str, Any], PodResources, Allocation], Manifest],
    target: str = DEVICE_PLUGIN,
) -> Bundle:
    """Return the manifests of every node's server, of a Service for each model, and of shared objects.

    The map's paths are those in the volume, and its GPUs are numbered from 0.
    """
    if image.split() != [image]:
        raise InputError(f"--image must name one image without spaces but got {image!r}", "as in registry/gpuprof:0.1")
    planned = planned_replicas(deployment) if target in FRACTIONAL else {}
    divided = split_replicas(deployment) if target in FRACTIONAL else deployment
    bundle, pod_map = start_node_bundle(divided, base, "/models")
    text = pod_map.to_json()
    if len(text) > _LARGEST_MAP_BYTES:
        raise InputError(
            f"the map has {len(text):,} bytes, and Kubernetes keeps {_LARGEST_MAP_BYTES:,} in a ConfigMap",
            "place fewer nodes in a map",
        )
    file_bytes = _measure_files(bundle, pod_map)
    resources = {node.name: ask_machine(node, file_bytes) for node in pod_map.nodes}
    # Room for as much again as the models have now.
    gibibytes = max(1, -(-2 * sum(path.stat().st_size for path in bundle.models.values()) // 2**30))
    manifests = _fill("shared.yaml", map=text, storage=f"{gibibytes}Gi")
    names, services = UniqueNames(), _name_services(pod_map)
    for node in pod_map.nodes:
        name_of_server = names.add(f"gpuprof-{slug(node.name)[:40]}")
        allocation = allocate(target, name_of_server, node, planned)
        values = {
            "name": name_of_server,
            "labels": _make_pod_labels(pod_map, services, node) | dict(allocation.labels),
            "annotations": {"gpuprof/map-sha256": hashlib.sha256(text.encode()).hexdigest(), **allocation.annotations},
            "node_label": label(node.name),
        }
        # A scheduler of fractions chooses the machine; elsewhere the map's nodes are machines with a label.
        selector = {} if target in FRACTIONAL else {"gpuprof.node": label(node.name)}
        pod = {"node": node.name, "node_selector": selector, "image": image}
        manifests += [*allocation.manifests, make_server(values, pod, resources[node.name], allocation)]
    manifests += [_fill("service.yaml", name=name, serves=f"gpuprof.serves/{name}") for name in services.values()]
    bundle.files[name] = yaml.dump_all(manifests, Dumper=_ReadableDumper, sort_keys=False, allow_unicode=True)
    bundle.files["README.md"] = _write_readme(pod_map, resources, name, target)
    bundle.notes += _note_uneven_services(deployment) + describe_allocation(target, planned)
    bundle.notes.append("the processor time and memory that pods request are assumptions in part: README.md says which")
    return bundle


def _fill(template: str, /, **values: object) -> Any:
    """Return a template filled with these values in JSON, which is also valid YAML."""
    texts = {key: json.dumps(value) for key, value in values.items()}
    return yaml.safe_load(Template(read_template(template)).substitute(texts, http_port=HTTP_PORT, grpc_port=GRPC_PORT))


class _ReadableDumper(yaml.SafeDumper):
    """Writes texts of several lines, such as the map, as blocks that people can read and compare."""

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


def _make_pod_labels(deployment: DeploymentMap, services: Mapping[str, str], node: Node) -> dict[str, str]:
    serves = {f"gpuprof.serves/{services[model]}": "true" for model in client_models(deployment, node)}
    return {"app": "gpuprof", "gpuprof/node": label(node.name), **serves}


def _name_services(deployment: DeploymentMap) -> dict[str, str]:
    names = UniqueNames()
    models = {model for node in deployment.nodes for model in client_models(deployment, node)}
    return {model: names.add(f"m-{slug(model)[:40]}".rstrip("-")) for model in sorted(models)}


def _note_uneven_services(deployment: DeploymentMap) -> list[str]:
    """Return a remark on each model that nodes serve at unequal rates: a Service sends all of them the same."""
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
        f"       kubectl label node YOUR-NODE gpuprof.node={label(node.name)}" for node in deployment.nodes
    )
    services = "\n".join(f"| {model} | {name} |" for model, name in _name_services(deployment).items())
    requests = "\n".join(
        f"| {node} | {pod.cpu} | {pod.memory} | processor: {pod.cores_from}; memory: {pod.memory_from} |"
        for node, pod in resources.items()
    )
    texts = {
        "manifest": manifest,
        "preparation": fill_text(f"{target}.md", nodes=nodes).rstrip(),
        "services": services,
        "requests": requests,
    }
    return fill_text("kubernetes.md", secret=SECRET, volume=VOLUME_CLAIM, **texts)
