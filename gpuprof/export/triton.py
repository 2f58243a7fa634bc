"""NVIDIA's Triton Inference Server: a map as model repositories, and a repository as the input of a plan.

Triton reads ``MODEL/configs/NAME.pbtxt`` in place of ``MODEL/config.pbtxt`` when started with
``--model-config-name=NAME``: the planned configurations stand beside the present ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuprof.domain.demand import Demand
from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, Partition, Replica
from gpuprof.errors import InputError, install_hint, refuse_unwritable, unknown_name
from gpuprof.export.bundle import (
    Bundle,
    fill_text,
    folder_name,
    is_cpu,
    model_file,
    model_files,
    public_name,
    replica_names,
    slug,
)
from gpuprof.graph.dims import batch_axes
from gpuprof.graph.file import read_onnx


def triton(deployment: DeploymentMap, base: Path) -> Bundle:
    """Return a model repository for each replica, and the environment of its server.

    All models of a Triton server have the same share, so each replica has its own server, whose model instances are the
    replica's processes. Raises `InputError` when the map has a merged model, whose members Triton cannot name, or a
    model has inputs or outputs other than tensors.
    """
    if merges := [name for name, model in deployment.models.items() if model.members]:
        raise InputError(
            f"triton cannot serve the merge {min(merges)}: it has no queue for several models",
            "place without --merge, or export it to k8s, kserve or ray-serve, which run gpuprof serve",
        )
    bundle = Bundle()
    for name, node, gpu, partition, replica in replica_names(deployment):
        public = public_name(deployment, replica.model)
        folder = folder_name(public.name)
        if folder != public.name:
            _add_note(
                bundle, f"clients of Triton ask for {public.name} as {folder}: a repository has folders for names"
            )
        file = model_file(deployment, replica.model, base)
        version = f"{name}/{folder}/{public.version}"
        if file is None:
            _add_note(bundle, f"the file of {replica.model} is not here: put it at {version}/model.onnx")
        else:
            _require_tensors(file, replica.model)
            bundle.models[f"{version}/model.onnx"] = file
            bundle.models |= {f"{version}/{data}": path for data, path in model_files(file).items()}
        batched = file is None or has_leading_batch(file)
        if not batched and replica.batch > 1:
            _add_note(
                bundle,
                f"Triton serves {replica.model} without batches, which the map has ({replica.batch}): "
                "its inputs and outputs do not all begin with a free batch dimension",
            )
        bundle.files[f"{name}/{folder}/config.pbtxt"] = _write_config(folder, replica, gpu, batched)
        environment = _make_replica_environment(node, gpu, partition, replica)
        bundle.files[f"{name}/server.env"] = "".join(f"{key}={value}\n" for key, value in environment.items())
    bundle.files["README.md"] = _write_readme(deployment)
    return bundle


def _write_readme(deployment: DeploymentMap) -> str:
    """Return the instructions for starting the servers: their places, and features of the map that Triton lacks."""
    rows = [
        f"| {name} | {node.name} | {gpu.index} | {_format_mig(partition)} | {_format_share(gpu, partition, replica)} "
        f"| {folder_name(public_name(deployment, replica.model).name)} | {replica.rate_rps:g} |"
        for name, node, gpu, partition, replica in replica_names(deployment)
    ]
    return fill_text("triton.md", rows="\n".join(rows))


def _format_mig(partition: Partition) -> str:
    return "–" if partition.mig is None else f"{partition.mig.profile} at {partition.mig.start}"


def _format_share(gpu: Gpu, partition: Partition, replica: Replica) -> str:
    turns = f", by turns {replica.turns}" if replica.turns else ""
    if is_cpu(gpu):
        return f"{replica.sm_share_pct:g}% of the cores{turns}"
    return "none" if partition.unshared else f"{replica.sm_share_pct:g}%{turns}"


def has_leading_batch(file: Path) -> bool:
    """Return whether each input and output begins with a free batch dimension, as Triton's batcher needs.

    Raises `InputError` when the file is no ONNX model.
    """
    onnx_file = read_onnx(file)
    graph = onnx_file.model.graph
    # A graph lists its large weights as inputs, too.
    inputs = {value.name: _format_dims(value) for value in onnx_file.inputs}
    outputs = [_format_dims(value) for value in graph.output]
    axes = batch_axes(inputs)
    return (
        set(axes) == set(inputs) and set(axes.values()) == {0} and all(o and not isinstance(o[0], int) for o in outputs)
    )


def _require_tensors(file: Path, model: str) -> None:
    """Refuse a model with sequences or maps, which Triton's backend for ONNX Runtime does not load."""
    graph = read_onnx(file).model.graph
    for value in (*graph.input, *graph.output):
        kind = str(value.type.WhichOneof("value")).removesuffix("_type")
        if kind not in ("tensor", "None"):
            raise InputError(
                f"triton cannot serve {model}: {value.name} is of kind {kind}, and it takes tensors alone",
                'export the model without, of scikit-learn with options={"zipmap": False}; or export the map to k8s',
            )


def _format_dims(value: object) -> tuple[int | str | None, ...]:
    shape = value.type.tensor_type.shape  # type: ignore[attr-defined]
    return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in shape.dim)


def _write_config(name: str, replica: Replica, gpu: Gpu, batched: bool) -> str:
    """Return the model's configuration: batches are formed where a batch holds more than one request."""
    batching = (
        "dynamic_batching {\n"
        f"  preferred_batch_size: [ {replica.batch} ]\n"
        f"  max_queue_delay_microseconds: {round(replica.max_wait_ms * 1000)}\n"
        "}\n"
    )
    return (
        f'name: "{name}"\n'
        'backend: "onnxruntime"\n'
        f"max_batch_size: {replica.batch if batched else 0}\n"
        f"{batching if batched and replica.batch > 1 else ''}"
        "instance_group [\n"
        f"  {{ count: {replica.processes} kind: {'KIND_CPU' if is_cpu(gpu) else 'KIND_GPU'} }}\n"
        "]\n"
    )


def _add_note(bundle: Bundle, note: str) -> None:
    if note not in bundle.notes:
        bundle.notes.append(note)


def _make_replica_environment(node: Node, gpu: Gpu, partition: Partition, replica: Replica) -> dict[str, str]:
    """Return the environment of a replica's process: its GPU, its MPS daemon and its share; empty on a CPU."""
    if is_cpu(gpu):
        return {}
    slot = "" if partition.mig is None else f"-slot{partition.mig.start}"
    environment = {"CUDA_VISIBLE_DEVICES": str(gpu.index)} if partition.mig is None else {}
    environment["CUDA_MPS_PIPE_DIRECTORY"] = f"/tmp/nvidia-mps-{slug(node.name)}-gpu{gpu.index}{slot}"
    if not partition.unshared:
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{replica.sm_share_pct:g}"
    if replica.memory_limit_bytes:
        environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={-(-replica.memory_limit_bytes // 2**20)}M"
    return environment


CONFIG = "config.pbtxt"
_RUNTIME = ("onnxruntime", "onnxruntime_onnx")


@dataclass(frozen=True, slots=True)
class TritonModel:
    """A model of a repository that ONNX Runtime executes."""

    name: str  #: Name for clients.
    file: Path  #: ONNX file of the newest version.
    config: Any  #: Triton's protobuf message; only the name where the repository has no ``config.pbtxt``.


@dataclass(frozen=True, slots=True)
class TritonRepository:
    """The models of a Triton model repository, the steps of its ensembles, and why other models cannot be planned."""

    folder: Path
    models: Mapping[str, TritonModel]
    left_out: Mapping[str, str]
    ensembles: Mapping[str, tuple[str, ...]]

    def write(self, configurations: Mapping[str, str]) -> None:
        """Write configurations by their path below the repository. Raises `InputError` when that is impossible."""
        for name, text in configurations.items():
            file = self.folder / name
            with refuse_unwritable(file):
                file.parent.mkdir(exist_ok=True)
                file.write_text(text, encoding="utf-8")


def read_repository(folder: Path) -> TritonRepository:
    """Read a model repository.

    Raises `InputError` when the folder holds no model, or a configuration cannot be parsed.
    """
    models: dict[str, TritonModel] = {}
    left_out: dict[str, str] = {}
    ensembles: dict[str, tuple[str, ...]] = {}
    if not folder.is_dir():
        raise InputError(f"there is no Triton repository {folder}", "name the directory given to --model-repository")
    for entry in sorted(path for path in folder.iterdir() if path.is_dir()):
        config = _read_config(entry)
        if config.platform == "ensemble":
            ensembles[config.name] = _order_steps(config)
            continue
        versions = sorted(int(path.name) for path in entry.iterdir() if path.is_dir() and path.name.isdecimal())
        if not versions:
            if (entry / CONFIG).exists():
                left_out[config.name] = "it has no version"
            continue
        file = entry / str(versions[-1]) / (config.default_model_filename or "model.onnx")
        runtime = config.backend or config.platform
        if runtime and runtime not in _RUNTIME:
            left_out[config.name] = f"{runtime} executes it, and gpuprof plans models of ONNX Runtime"
        elif not file.exists():
            left_out[config.name] = f"it has no {file.relative_to(entry)}"
        else:
            models[config.name] = TritonModel(config.name, file, config)
    if not models:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise InputError(
            f"{folder} has no model that can be planned" + (f" ({reasons})" if reasons else ""),
            "a model is MODEL/VERSION/model.onnx, with MODEL/config.pbtxt",
        )
    return TritonRepository(folder, models, left_out, ensembles)


def _order_steps(config: Any) -> tuple[str, ...]:
    """Return the models of an ensemble in an order in which each has its inputs; parallel steps one after the other.

    Raises `InputError` when a step needs a tensor that no other makes.
    """
    ready = {tensor.name for tensor in config.input}
    waiting, ordered = list(config.ensemble_scheduling.step), []
    while waiting:
        step = next((step for step in waiting if ready.issuperset(step.input_map.values())), None)
        if step is None:
            tensor = min(set(waiting[0].input_map.values()) - ready)
            raise InputError(
                f"the ensemble {config.name} has no step that makes {tensor!r} for {waiting[0].model_name}"
            )
        ready.update(step.output_map.values())
        waiting.remove(step)
        ordered.append(step.model_name)
    return tuple(ordered)


def _read_config(entry: Path) -> Any:
    """Return the configuration of a model's directory, named after the directory unless it names itself."""
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError:
        raise InputError(
            "reading a Triton repository needs Triton's protobuf messages", install_hint("triton")
        ) from None
    config = model_config_pb2.ModelConfig()
    path = entry / CONFIG
    if path.is_file():
        try:
            text_format.Parse(path.read_text(encoding="utf-8"), config)
        except (text_format.ParseError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not a model configuration of Triton: {error}") from None
    config.name = config.name or entry.name
    return config


def name_files(demands: Sequence[Demand], repository: TritonRepository) -> tuple[Demand, ...]:
    """Return the demands with the repository's files; an ensemble is a chain of its models.

    Raises `InputError` when a demand names a model that the repository lacks or that cannot be planned.
    """
    demands_with_files = []
    for demand in demands:
        name = demand.source_model or demand.model
        steps = demand.steps or repository.ensembles.get(name, (name,))
        for step in steps:
            if step in repository.left_out:
                what = name if step == name else f"{name} cannot be planned, since {step}"
                raise InputError(f"{what} cannot be planned: {repository.left_out[step]}")
            if step not in repository.models:
                raise unknown_name("model of the repository", step, [*repository.models, *repository.ensembles])
        file = ">".join(str(repository.models[step].file) for step in steps)
        source = ">".join(steps) if name in repository.ensembles else demand.source_model
        demands_with_files.append(replace(demand, file=file, source_model=source))
    return tuple(demands_with_files)


def write_configurations(deployment: DeploymentMap, repository: TritonRepository) -> dict[str, str]:
    """Return the planned configurations by their path below the repository.

    Each node of the map has a configuration of each of its models, ``MODEL/configs/NODE.pbtxt``: the largest planned
    batch, the batches of its replicas as preferred sizes, their longest wait, and an instance for each process on its
    GPU. All other fields are those of the present configuration.
    """
    from google.protobuf import text_format

    files = {}
    for node in deployment.nodes:
        for model in repository.models.values():
            replicas = [
                (gpu.index, replica)
                for gpu in node.gpus
                for part in gpu.partitions
                for replica in part.replicas
                if model.name in (deployment.models[replica.model].source_model, replica.model)
            ]
            if replicas:
                config = _plan_config(model, node, replicas)
                folder = model.file.parent.parent.name
                files[f"{folder}/configs/{node.name}.pbtxt"] = text_format.MessageToString(config)
    return files


def _plan_config(model: TritonModel, node: Node, replicas: Sequence[tuple[int, Replica]]) -> Any:
    config = type(model.config)()
    config.CopyFrom(model.config)
    if not config.platform:
        config.backend = config.backend or _RUNTIME[0]
    config.ClearField("instance_group")
    batches = sorted({replica.batch for _, replica in replicas})
    is_batched = has_leading_batch(model.file)
    config.max_batch_size = batches[-1] if is_batched else 0
    is_dynamic = config.WhichOneof("scheduling_choice") in (None, "dynamic_batching")
    if is_dynamic:
        config.ClearField("dynamic_batching")
    if is_dynamic and is_batched and batches[-1] > 1:
        config.dynamic_batching.preferred_batch_size.extend(batch for batch in batches if batch > 1)
        longest_ms = max(replica.max_wait_ms for _, replica in replicas)
        config.dynamic_batching.max_queue_delay_microseconds = round(longest_ms * 1000)
    on_cpu = {gpu.index for gpu in node.gpus if is_cpu(gpu)}
    counts: Counter[int] = Counter()
    for index, replica in replicas:
        counts[index] += replica.processes
    for index, count in sorted(counts.items()):
        group = config.instance_group.add(count=count)
        group.kind = group.KIND_CPU if index in on_cpu else group.KIND_GPU
        if index not in on_cpu:
            group.gpus.append(index)
    return config


def describe_limits(deployment: DeploymentMap) -> list[str]:
    """Return remarks on parts of the plan that one Triton server a node does not keep."""
    shares = {
        f"{gpu.device} {gpu.index} of {node.name}"
        for node, gpu, partition, _ in deployment.places()
        if not is_cpu(gpu) and (partition.mig is not None or len(partition.replicas) > 1)
    }
    if not shares:
        return []
    return [
        "a server gives all its models one share of a GPU, and the plan divides "
        f"{min(shares)}: gpuprof export --to triton makes a server for each replica"
    ]
