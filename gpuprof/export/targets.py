"""Exports a deployment map to the formats of other tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import yaml

from gpuprof.domain.deployment import DeploymentMap, Gpu
from gpuprof.errors import InputError, unknown_name
from gpuprof.export.bundle import Bundle, UniqueNames, is_cpu, slug
from gpuprof.export.kubernetes import ALLOCATIONS, KSERVE, kubernetes
from gpuprof.export.mps import mps
from gpuprof.export.ray_serve import ray_serve
from gpuprof.export.triton import triton
from gpuprof.rules.turns import require_turns
from gpuprof.serving.edge.edge import EdgeSettings, render_bootstrap

_HEAD = """\
# Envoy in front of `gpuprof serve MAP --token-file FILE` on the same machine (127.0.0.1:8000).
# To be replaced: the token (twice), the paths of certificate and key, and the ports 8443 (HTTPS) and 8444 (gRPC).
# Streams of gRPC (ModelStreamInfer, reflection) need the edge that `gpuprof serve --grpc-port` starts itself.
"""
_SETTINGS = EdgeSettings(
    {"socket_address": {"address": "127.0.0.1", "port_value": 8000}},
    host="0.0.0.0",
    http_port=8443,
    grpc_port=8444,
    certificate="/etc/envoy/chain.pem",
    private_key="/etc/envoy/key.pem",
    token="REPLACE-THIS-TOKEN",
)


def envoy() -> Bundle:
    """Return the single file ``envoy.yaml``, which is the same for every map."""
    return Bundle({"envoy.yaml": _HEAD + render_bootstrap(_SETTINGS)})


_TARGETS = ["envoy", "json", *ALLOCATIONS, KSERVE, "mig-parted", "mps", "ray-serve", "triton"]


def check_target(target: str, image: str | None) -> None:
    """Check that the target exists, and has the image that it needs.

    Raises `InputError` for an unknown target, or a missing image.
    """
    if target not in _TARGETS:
        raise unknown_name("export", target, _TARGETS)
    if target in {*ALLOCATIONS, KSERVE} and not image:
        raise InputError(
            "a manifest needs a container image with gpuprof", "build the Containerfile, name it with --image"
        )


def export(deployment: DeploymentMap, target: str, image: str | None = None, base: Path = Path()) -> Bundle:
    """Return the files with which another tool runs the map.

    Raises `InputError` for an unknown target, a missing image, or a map that the target cannot express. ``image``:
    container image with gpuprof, for ``kserve`` and the targets of Kubernetes; ``base``: folder of the map, where model
    files are looked for first.
    """
    check_target(target, image)
    if target in {*ALLOCATIONS, KSERVE, "ray-serve"}:
        require_turns(deployment)  # they run gpuprof's workers
    if target in {*ALLOCATIONS, KSERVE}:
        return kubernetes(deployment, image or "", base, target)
    writers: dict[str, Callable[[], Bundle]] = {
        "envoy": envoy,
        "json": lambda: Bundle({"map.json": deployment.to_json()}),
        "mig-parted": lambda: mig_parted(deployment),
        "mps": lambda: mps(deployment),
        "ray-serve": lambda: ray_serve(deployment, base),
        "triton": lambda: triton(deployment, base),
    }
    return writers[target]()


def mig_parted(deployment: DeploymentMap) -> Bundle:
    """Return one file with a configuration for each node, for ``nvidia-mig-parted apply``.

    The file holds counts of instances and not their starts: the driver places them, in general like the map. CPUs are
    left out. Raises `InputError` when the map has no GPU.
    """
    names, configurations = UniqueNames(), dict[str, list[dict[str, object]]]()
    for node in deployment.nodes:
        if gpus := [gpu for gpu in node.gpus if not is_cpu(gpu)]:
            configurations[names.add(slug(node.name))] = [_configure_gpu(gpu) for gpu in gpus]
    if not configurations:
        raise InputError("the map has no GPU that could be cut into MIG instances", "export it to triton or json")
    document = {"version": "v1", "mig-configs": configurations}
    return Bundle({"mig-parted.yaml": yaml.safe_dump(document, sort_keys=False)})


def _configure_gpu(gpu: Gpu) -> dict[str, object]:
    counts = Counter(partition.mig.profile for partition in gpu.partitions if partition.mig is not None)
    return {"devices": [gpu.index], "mig-enabled": bool(counts), "mig-devices": dict(sorted(counts.items()))}
