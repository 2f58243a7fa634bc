"""Bundle of an export: texts, model files to link or copy, names, and the map for the servers of the export."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, Partition, PublicName, Replica
from gpuprof.graph.file import read_onnx

#: Maximum length of a generated name, which must fit into a label with a number.
_LONGEST_NAME = 50


@dataclass(slots=True)
class Bundle:
    """An export."""

    files: dict[str, str] = field(default_factory=dict)  #: Texts, by their path below the folder of the export.
    #: Files of models by the same kind of path, to be linked or copied.
    models: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  #: Remarks for the deployment.


def fill_text(name: str, **values: object) -> str:
    """Return a template with the values in its braces."""
    return read_template(name).format(**values)


def read_template(name: str) -> str:
    """Return the text of a template."""
    return (files("gpuprof") / "export" / "templates" / name).read_text(encoding="utf-8")


class UniqueNames:
    """Generator of unique names; a repeated name gets a number."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._times: Counter[str] = Counter()

    def add(self, name: str) -> str:
        """Return ``name``, or ``name-2``, ``name-3`` …, whichever is unused."""
        free = name
        while free in self._given:
            self._times[name] += 1
            free = f"{name}-{self._times[name] + 1}"
        self._given.add(free)
        return free


def replica_names(deployment: DeploymentMap) -> Iterator[tuple[str, Node, Gpu, Partition, Replica]]:
    """Yield the replicas with a name for each that Kubernetes and file systems accept."""
    names = UniqueNames()
    for node, gpu, partition, replica in deployment.places():
        name = names.add(slug(f"{node.name}-gpu{gpu.index}-{replica.model}")[:_LONGEST_NAME].rstrip("-"))
        yield name, node, gpu, partition, replica


def public_name(deployment: DeploymentMap, model: str) -> PublicName:
    """Return the public name and version of ``model``, a name in the map or for clients."""
    entry = deployment.models.get(model) or deployment.requested.get(model)
    return PublicName.of(model, None if entry is None else entry.path)


def model_file(deployment: DeploymentMap, model: str, base: Path) -> Path | None:
    """Return a model's file, in the map's folder ``base`` or at its own path; None if neither exists."""
    entry = deployment.models.get(model)
    if entry is None or entry.path is None:
        return None
    return next((path.absolute() for path in (base / entry.path, Path(entry.path)) if path.is_file()), None)


def model_files(path: Path) -> dict[str, Path]:
    """Return the external data files of a model by their names relative to the model, which must be kept.

    Raises `InputError` when the file is no ONNX model, or one of its data files is missing.
    """
    return {name: path.parent / name for name in read_onnx(path).external}


def is_cpu(gpu: Gpu) -> bool:
    """Return whether the device is a machine's CPU, by its name's prefix."""
    return gpu.device.startswith("cpu")


def slug(text: str) -> str:
    """Return ``text`` in lower-case letters, digits and dashes.

    Examples
    --------
    >>> slug("BERT base/v2")
    'bert-base-v2'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def folder_name(name: str) -> str:
    """Return the folder name of a model: its name without letters that a folder cannot have."""
    return re.sub(r"[^\w.+-]", "_", name).lstrip(".") or "_"


def start_node_bundle(deployment: DeploymentMap, base: Path, root: str) -> tuple[Bundle, DeploymentMap]:
    """Return a bundle with the models' files, and the map for its servers, with GPUs numbered from 0 on each node.

    ``base``: folder of the map, which is searched first for model files; ``root``: path of the bundle's ``models/`` on
    the servers, which starts the paths in the map: ``"/models"``, or ``"models"`` relative to the map.
    """
    bundle = Bundle()
    models = {
        name: entry.model_copy(update={"path": _add_model(bundle, deployment, name, base, root)})
        for name, entry in deployment.models.items()
    }
    nodes = tuple(_number_gpus_from_0(node) for node in deployment.nodes if client_models(deployment, node))
    return bundle, deployment.model_copy(update={"models": models, "nodes": nodes})


def client_models(deployment: DeploymentMap, node: Node) -> list[str]:
    """Return the names for clients of the models that a node serves: the members of its merged models."""
    node_models = {replica.model for gpu in node.gpus for part in gpu.partitions for replica in part.replicas}
    return sorted(client for client, model in deployment.serving.items() if model in node_models)


def _add_model(bundle: Bundle, deployment: DeploymentMap, model: str, base: Path, root: str) -> str | None:
    """Add a model's file to the bundle and return its path for the servers."""
    entry = deployment.models[model]
    if entry.path is None or entry.path.startswith("null:"):
        return entry.path
    public = public_name(deployment, model)
    folder = f"{folder_name(public.name)}/{public.version}"
    file = model_file(deployment, model, base)
    name = Path(entry.path).name
    if file is None:
        bundle.notes.append(f"the file of {model} is not here: put {name} into models/{folder}/")
    else:
        bundle.models[f"models/{folder}/{name}"] = file
        bundle.models |= {f"models/{folder}/{data}": path for data, path in model_files(file).items()}
    return f"{root}/{folder}/{name}"


def _number_gpus_from_0(node: Node) -> Node:
    """Return the node with its GPUs numbered from 0: its servers see only the assigned GPUs."""
    used_gpus = [gpu for gpu in node.gpus if any(partition.replicas for partition in gpu.partitions)]
    numbers: Counter[bool] = Counter()
    gpus = []
    for gpu in sorted(used_gpus, key=lambda used_gpu: used_gpu.index):
        gpus.append(gpu.model_copy(update={"index": numbers[is_cpu(gpu)]}))
        numbers[is_cpu(gpu)] += 1
    return node.model_copy(update={"gpus": tuple(gpus)})
