"""A deployment map as model repositories of NVIDIA's Triton Inference Server."""

from __future__ import annotations

from pathlib import Path

from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, Partition, Replica
from gpuprof.errors import InputError
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
from gpuprof.graph.batch_axes import batch_axes
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
