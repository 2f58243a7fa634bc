"""Shared by exports whose servers run ``gpuprof serve MAP --node NODE``: the map as these servers see it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gpuprof.domain.deployment import DeploymentMap, Node
from gpuprof.placement.bundle import Bundle, folder_name, is_cpu, model_file, model_files, public_name


def start_node_bundle(deployment: DeploymentMap, base: Path, root: str) -> tuple[Bundle, DeploymentMap]:
    """Return a bundle with the models' files, and the map as its servers see it: paths below ``root``, GPUs from 0.

    ``base``: folder of the map: files of models are looked for there first; ``root``: where servers find the bundle's
    ``models/``, ``"/models"`` or, beside the map, ``"models"``.
    """
    bundle = Bundle()
    models = {
        name: one.model_copy(update={"path": _add_model(bundle, deployment, name, base, root)})
        for name, one in deployment.models.items()
    }
    merges = {
        name: one.model_copy(update={"path": _add_model(bundle, deployment, name, base, root)})
        for name, one in deployment.merges.items()
    }
    nodes = tuple(_number_gpus_from_0(node) for node in deployment.nodes if served_models(node))
    return bundle, deployment.model_copy(update={"models": models, "merges": merges, "nodes": nodes})


def served_models(node: Node) -> list[str]:
    """Return the models that a node answers for, those within merges too."""
    return sorted(
        {name for gpu in node.gpus for part in gpu.partitions for one in part.replicas for name in one.rates()}
    )


def _add_model(bundle: Bundle, deployment: DeploymentMap, model: str, base: Path, root: str) -> str | None:
    """Add a model's file to the bundle and return its path for the servers."""
    known = deployment.models.get(model) or deployment.merges[model]
    if known.path is None or known.path.startswith("null:"):
        return known.path
    public = public_name(deployment, model)
    folder = f"{folder_name(public.name)}/{public.version}"
    file = model_file(deployment, model, base)
    name = Path(known.path).name
    if file is None:
        bundle.notes.append(f"the file of {model} is not here: put {name} into models/{folder}/")
    else:
        bundle.models[f"models/{folder}/{name}"] = file
        bundle.models |= {f"models/{folder}/{data}": path for data, path in model_files(file).items()}
    return f"{root}/{folder}/{name}"


def _number_gpus_from_0(node: Node) -> Node:
    """Return the node with its GPUs numbered from 0: servers see only those that they were given."""
    used = [gpu for gpu in node.gpus if any(partition.replicas for partition in gpu.partitions)]
    numbers: Counter[bool] = Counter()
    gpus = []
    for gpu in sorted(used, key=lambda one: one.index):
        gpus.append(gpu.model_copy(update={"index": numbers[is_cpu(gpu)]}))
        numbers[is_cpu(gpu)] += 1
    return node.model_copy(update={"gpus": tuple(gpus)})
