"""A deployment map as manifests of Kubernetes and KServe: a pod for each node, which runs ``gpuprof serve`` there.

A pod asks the device plugin for whole GPUs and MIG instances (strategy ``mixed``), and shares them by MPS daemons of
its own. The plugin's own MPS sharing is not used: it gives all pods the same part of a GPU, and none of a MIG device.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpuprof.domain.deployment import DeploymentMap, Node
from gpuprof.errors import InputError
from gpuprof.placement.bundle import Bundle, UniqueNames, fill_text, label, slug
from gpuprof.placement.node_bundle import served_models, start_node_bundle
from gpuprof.placement.pod_resources import PodResources, ask_machine

Manifest = dict[str, Any]
HTTP_PORT, GRPC_PORT = 8000, 8001
SECRET, VOLUME_CLAIM, CONFIG_MAP = "gpuprof-server", "gpuprof-models", "gpuprof-map"
#: Kubernetes keeps no larger object.
_LARGEST_MAP_BYTES = 1_000_000
#: Tensors on their way are in shared memory: 1 GiB unless ``serve --buffer-mb`` says otherwise, and some to spare.
_SHARED_MEMORY = "2Gi"
_MODELS, _SECRETS, _CONFIGURATION = "/models", "/etc/gpuprof/secret", "/etc/gpuprof/map"
#: The user of the Containerfile: pods must run as one that is not root.
_USER = 10001
_DRAIN_S = 30


def kubernetes(deployment: DeploymentMap, image: str, base: Path) -> Bundle:
    """Return the manifests of a Deployment for each node and a Service for each model, and the models' files.

    Raises `InputError` when the image is not one name, or the map is larger than Kubernetes keeps.
    """
    bundle, podded, asked = _start_bundle(deployment, image, base)
    names = UniqueNames()
    manifests = [_make_config_map(podded), _make_volume_claim(bundle)]
    for node in podded.nodes:
        name = names.add(f"gpuprof-{slug(node.name)[:40]}")
        manifests.append(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": name, "labels": {"app": "gpuprof"}},
                "spec": {
                    "replicas": 1,
                    "strategy": {"type": "Recreate"},  # two pods cannot hold the node's GPUs at once
                    "selector": {"matchLabels": {"app": "gpuprof", "gpuprof/node": label(node.name)}},
                    "template": {
                        "metadata": {
                            "labels": _make_pod_labels(podded, node),
                            "annotations": _make_annotations(podded),
                        },
                        "spec": _make_pod(node, image, asked[node.name].requirements()),
                    },
                },
            }
        )
    return _finish_bundle(bundle, podded, manifests, asked, "gpuprof.yaml")


def kserve(deployment: DeploymentMap, image: str, base: Path) -> Bundle:
    """Return the manifests of an InferenceService of KServe for each node, and the models' files.

    Raises `InputError` as `kubernetes` does.
    """
    bundle, podded, asked = _start_bundle(deployment, image, base)
    names = UniqueNames()
    manifests = [_make_config_map(podded), _make_volume_claim(bundle)]
    for node in podded.nodes:
        # KServe itself would limit a container without limits to one core and 2 GiB.
        resources = asked[node.name].requirements(limited=True)
        manifests.append(
            {
                "apiVersion": "serving.kserve.io/v1beta1",
                "kind": "InferenceService",
                "metadata": {
                    "name": names.add(f"gpuprof-{slug(node.name)[:40]}"),
                    "labels": {"app": "gpuprof"},
                    # Knative would scale the one server of a node, and allow a single port.
                    "annotations": {"serving.kserve.io/deploymentMode": "RawDeployment", **_make_annotations(podded)},
                },
                "spec": {
                    "predictor": {
                        "minReplicas": 1,
                        "maxReplicas": 1,
                        "deploymentStrategy": {"type": "Recreate"},
                        "labels": _make_pod_labels(podded, node),
                        **_make_pod(node, image, resources, container="kserve-container"),
                    }
                },
            }
        )
    return _finish_bundle(bundle, podded, manifests, asked, "kserve.yaml")


def _finish_bundle(
    bundle: Bundle,
    deployment: DeploymentMap,
    manifests: Sequence[Manifest],
    asked: Mapping[str, PodResources],
    name: str,
) -> Bundle:
    """Add the manifests with a Service a model, which KServe makes for nodes alone, and how to deploy them."""
    services = [_make_service(model) for model in _name_services(deployment).values()]
    bundle.files[name] = _to_yaml([*manifests, *services])
    bundle.files["README.md"] = _write_readme(deployment, asked, name)
    bundle.notes += _note_uneven_services(deployment)
    bundle.notes.append("the processor time and memory that pods request are assumptions in part: README.md says which")
    return bundle


class _ReadableDumper(yaml.SafeDumper):
    """Writes texts of several lines, such as the map, as blocks that people can read and compare."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return a text as a block where it has several lines."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_ReadableDumper.add_representer(str, _ReadableDumper.represent_str)


def _to_yaml(manifests: Sequence[Mapping[str, Any]]) -> str:
    return yaml.dump_all(manifests, Dumper=_ReadableDumper, sort_keys=False, allow_unicode=True)


def _start_bundle(
    deployment: DeploymentMap, image: str, base: Path
) -> tuple[Bundle, DeploymentMap, dict[str, PodResources]]:
    """Return a bundle with the models' files, the map as pods see it, and what the pod of each node asks for.

    In the map, paths are those in the volume, and GPUs are numbered from 0.
    """
    if image.split() != [image]:
        raise InputError(f"--image must name one image without spaces but got {image!r}", "as in registry/gpuprof:0.1")
    bundle, podded = start_node_bundle(deployment, base, _MODELS)
    size = len(podded.to_json())
    if size > _LARGEST_MAP_BYTES:
        raise InputError(
            f"the map has {size:,} bytes, and Kubernetes keeps {_LARGEST_MAP_BYTES:,} in a ConfigMap",
            "place fewer nodes in a map",
        )
    file_bytes = _measure_files(bundle, podded)
    return bundle, podded, {node.name: ask_machine(node, file_bytes) for node in podded.nodes}


def _measure_files(bundle: Bundle, deployment: DeploymentMap) -> dict[str, int]:
    """Return the bytes of each model's files, those of its external data too, where they are here."""
    paths = {name: model.path for name, model in deployment.models.items()}
    paths |= {name: merge.path for name, merge in deployment.merges.items()}
    folders = {name: Path(path).parent for name, path in paths.items() if path is not None}
    sizes = {
        name: sum(file.stat().st_size for path, file in bundle.models.items() if folder in Path("/", path).parents)
        for name, folder in folders.items()
    }
    return {name: size for name, size in sizes.items() if size}


def _make_annotations(deployment: DeploymentMap) -> dict[str, str]:
    """Return annotations that make pods restart when the map changes."""
    return {"gpuprof/map-sha256": hashlib.sha256(deployment.to_json().encode()).hexdigest()}


def _make_pod_labels(deployment: DeploymentMap, node: Node) -> dict[str, str]:
    services = _name_services(deployment)
    serves = {f"gpuprof.serves/{services[model]}": "true" for model in served_models(node)}
    return {"app": "gpuprof", "gpuprof/node": label(node.name), **serves}


def _name_services(deployment: DeploymentMap) -> dict[str, str]:
    names = UniqueNames()
    served = {model for node in deployment.nodes for model in served_models(node)}
    return {model: names.add(f"m-{slug(model)[:40]}".rstrip("-")) for model in sorted(served)}


def _make_pod(node: Node, image: str, resources: Manifest, container: str = "serve") -> Manifest:
    arguments = ["serve", f"{_CONFIGURATION}/map.json", "--node", node.name, "--host", "0.0.0.0"]
    arguments += ["--port", str(HTTP_PORT), "--grpc-port", str(GRPC_PORT), "--drain-s", str(_DRAIN_S)]
    arguments += [
        "--token-file",
        f"{_SECRETS}/token",
        "--tls-cert",
        f"{_SECRETS}/tls.crt",
        "--tls-key",
        f"{_SECRETS}/tls.key",
    ]
    mounts = {"map": _CONFIGURATION, "secret": _SECRETS, "models": _MODELS}
    return {
        "nodeSelector": {"gpuprof.node": label(node.name)},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        # Longer than the server drains, so that the kubelet does not end it in the middle.
        "terminationGracePeriodSeconds": 2 * _DRAIN_S,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": container,
                "image": image,
                "command": ["gpuprof"],
                "args": arguments,
                "ports": [{"name": "http", "containerPort": HTTP_PORT}, {"name": "grpc", "containerPort": GRPC_PORT}],
                "resources": resources,
                **_make_probes(),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "readOnlyRootFilesystem": True,
                },
                "volumeMounts": [
                    *({"name": name, "mountPath": path, "readOnly": True} for name, path in mounts.items()),
                    {"name": "shm", "mountPath": "/dev/shm"},
                    {"name": "tmp", "mountPath": "/tmp"},
                ],
            }
        ],
        "volumes": [
            {"name": "map", "configMap": {"name": CONFIG_MAP}},
            {"name": "secret", "secret": {"secretName": SECRET, "defaultMode": 0o440}},
            {"name": "models", "persistentVolumeClaim": {"claimName": VOLUME_CLAIM, "readOnly": True}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def _make_probes() -> Manifest:
    """Return the probes; both addresses answer without the token."""

    def probe(path: str, **timing: int) -> Manifest:
        return {"httpGet": {"path": path, "port": "http", "scheme": "HTTPS"}, **timing}

    return {
        # Ten minutes for all models to be loaded, before which a pod must not be ended as dead.
        "startupProbe": probe("/v2/health/ready", periodSeconds=5, failureThreshold=120),
        "readinessProbe": probe("/v2/health/ready", periodSeconds=5, failureThreshold=2),
        "livenessProbe": probe("/v2/health/live", periodSeconds=10, failureThreshold=6),
    }


def _make_service(name: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {"app": "gpuprof"}},
        "spec": {
            "selector": {"app": "gpuprof", f"gpuprof.serves/{name}": "true"},
            "ports": [
                # Named by its protocol, too, without which servers of Kubernetes 1.20 apply no Service themselves.
                {"name": name, "protocol": "TCP", "port": port, "targetPort": name}
                for name, port in (("http", HTTP_PORT), ("grpc", GRPC_PORT))
            ],
        },
    }


def _make_config_map(deployment: DeploymentMap) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": CONFIG_MAP, "labels": {"app": "gpuprof"}},
        "data": {"map.json": deployment.to_json()},
    }


def _make_volume_claim(bundle: Bundle) -> Manifest:
    """Return the claim of a volume for the models, with room for as much again."""
    gibibytes = max(1, -(-2 * sum(path.stat().st_size for path in bundle.models.values()) // 2**30))
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": VOLUME_CLAIM, "labels": {"app": "gpuprof"}},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": f"{gibibytes}Gi"}}},
    }


def _note_uneven_services(deployment: DeploymentMap) -> list[str]:
    """Return a remark on each model that nodes serve at unequal rates: a Service sends all of them the same."""
    rates: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for node, _, _, replica in deployment.places():
        for model, rate_rps in replica.rates().items():
            rates[model][node.name] += rate_rps
    return [
        f"the Service of {model} sends each node the same, and the map plans "
        + ", ".join(f"{rate:.3g}/s on {node}" for node, rate in by_node.items())
        + ": split it by weights in your gateway, or place it on equal nodes"
        for model, by_node in rates.items()
        if len(by_node) > 1 and max(by_node.values()) > 1.1 * min(by_node.values())
    ]


def _write_readme(deployment: DeploymentMap, asked: Mapping[str, PodResources], manifest: str) -> str:
    nodes = "\n".join(
        f"       kubectl label node YOUR-NODE gpuprof.node={label(node.name)}" for node in deployment.nodes
    )
    services = "\n".join(f"| {model} | {name} |" for model, name in _name_services(deployment).items())
    requests = "\n".join(
        f"| {node} | {one.cpu} | {one.memory} | processor: {one.cores_from}; memory: {one.memory_from} |"
        for node, one in asked.items()
    )
    texts = {"manifest": manifest, "nodes": nodes, "services": services, "requests": requests}
    return fill_text("kubernetes.md", secret=SECRET, volume=VOLUME_CLAIM, **texts)
