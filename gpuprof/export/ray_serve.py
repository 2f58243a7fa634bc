"""A deployment map as an application of Ray Serve: a deployment for each node, which runs ``gpuprof serve`` there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from gpuprof.domain.deployment import DeploymentMap, Node
from gpuprof.errors import DISTRIBUTION
from gpuprof.export.bundle import Bundle, UniqueNames, fill_text, is_cpu, slug, start_node_bundle
from gpuprof.export.kubernetes import HTTP_PORT
from gpuprof.serving.server_settings import ServerSettings

ROUTER = "router"
#: Prefix of a node's custom resource, which identifies its machine in Ray, as for `serve --engine ray`.
NODE_RESOURCE = "gpuprof:"
_FOLDER = "/srv/gpuprof"
#: Maximum concurrent requests of a deployment: Ray's default is low, but gpuprof's own admission control decides here.
MAX_REQUESTS = ServerSettings().max_connections


def ray_serve(deployment: DeploymentMap, base: Path) -> Bundle:
    """Return the configuration for ``serve deploy``, the map, and the models' files.

    GPUs are numbered from 0 on each node; `gpuprof.pipeline.ray_serve` inserts the numbers that Ray assigns.
    """
    bundle, bundle_map = start_node_bundle(deployment, base, "models")
    names = deployment_names(bundle_map)
    nodes = [_make_node(names[node.name], node) for node in bundle_map.nodes]
    values = {"router": ROUTER, "most": MAX_REQUESTS, "folder": _FOLDER, "port": HTTP_PORT}
    config = yaml.safe_load(fill_text("serve_config.yaml", **values))
    config["applications"][0]["deployments"] += nodes
    bundle.files["serve_config.yaml"] = yaml.safe_dump(config, sort_keys=False)
    bundle.files["map.json"] = bundle_map.to_json()
    bundle.files["README.md"] = _write_readme(bundle_map)
    return bundle


def deployment_names(deployment: DeploymentMap) -> dict[str, str]:
    """Return, for each machine of a deployment map, the name of its Ray Serve deployment."""
    names = UniqueNames()
    names.add(ROUTER)
    return {node.name: names.add(slug(node.name)) for node in deployment.nodes}


def _make_node(name: str, node: Node) -> dict[str, Any]:
    """Return the deployment of a node: a single actor with the GPUs, or the cores, of the map's node."""
    cores = sum(int(match[1]) for gpu in node.gpus if (match := re.fullmatch(r"cpu-.*?(\d+)c", gpu.device)))
    gpus = sum(not is_cpu(gpu) and not gpu.device.startswith("sim:") for gpu in node.gpus)
    return {
        "name": name,
        "num_replicas": 1,
        "max_ongoing_requests": MAX_REQUESTS,
        "ray_actor_options": {
            "num_cpus": float(cores),
            "num_gpus": float(gpus),
            "resources": {f"{NODE_RESOURCE}{node.name}": 1.0},
        },
    }


def _write_readme(deployment: DeploymentMap) -> str:
    starts = "\n".join(
        f"       ray start --address HEAD:6379 --resources '{{\"{NODE_RESOURCE}{node.name}\": 1}}'"
        for node in deployment.nodes
    )
    return fill_text("ray_serve.md", distribution=DISTRIBUTION, folder=_FOLDER, starts=starts, port=HTTP_PORT)
