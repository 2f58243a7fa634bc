"""NVIDIA's Triton Inference Server: a map as model repositories, and a repository as the input of a plan.

Triton reads ``MODEL/configs/NAME.pbtxt`` in place of ``MODEL/config.pbtxt`` when started with
``--model-config-name=NAME``: the planned configurations stand beside the present ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from gpuprof.machine.cgroup import own_cores
from gpuprof.rules.cpu_slices import CpuSlice, plan_shared_slices


@dataclass(frozen=True, slots=True)
class _Instances:
    """Instances of a model: a replica in its place, and the cores of its share of a CPU."""

    gpu: Gpu
    partition: Partition
    replica: Replica
    cores: CpuSlice | None  #: None on a GPU.

    @property
    def core_range(self) -> str:
        """First and last core, since Triton reads a single range; empty on a GPU."""
        return f"{self.cores.cores[0]}-{self.cores.cores[-1]}" if self.cores else ""

    @property
    def is_whole_cpu(self) -> bool:
        """Whether the share is all cores of a CPU."""
        return self.cores is not None and self.replica.sm_share_pct == 100.0


@dataclass(slots=True)
class _Server:
    """A Triton server with its instances: of one worker, or of all workers of a node."""

    name: str
    node: Node
    has_own_gpu: bool  #: Whether its environment hides all GPUs but that of its worker.
    instances: list[_Instances] = field(default_factory=list)

    @property
    def options(self) -> list[str]:
        """Options of ``tritonserver`` on which the configurations rely.

        Models that share a whole CPU get a common pool of threads: by default each session has its own, whose threads
        spin while they wait, and take the cores from the other sessions. Its threads heed no host policy, so models
        on a part of the cores keep their own pools.
        """
        ranges = sorted({entry.core_range for entry in self.instances} - {""})
        options = [f"--host-policy=cores-{cores},cpu-cores={cores}" for cores in ranges]
        if len(self.instances) > 1 and all(entry.is_whole_cpu for entry in self.instances):
            threads = max(entry.cores.threads for entry in self.instances if entry.cores)
            settings = ("enable-global-threadpool=1", f"intra_op_thread_count={threads}", "inter_op_thread_count=1")
            options += [f"--backend-config=onnxruntime,{setting}" for setting in settings]
        return options

    def write_schedule(self, instances: Sequence[_Instances], is_batched: bool, is_dynamic: bool = True) -> str:
        """Return the fields of a model's configuration that the plan decides: batches, threads and instances.

        ``instances``: of the model; ``is_batched``: whether it takes batches; ``is_dynamic``: whether Triton may form
        them.
        """
        batches = sorted({entry.replica.batch for entry in instances})
        lines = [f"max_batch_size: {batches[-1] if is_batched else 0}"]
        if is_dynamic and is_batched and batches[-1] > 1:
            sizes = ", ".join(str(batch) for batch in batches if batch > 1)
            delay_us = round(1000 * max(entry.replica.max_wait_ms for entry in instances))
            lines.append(
                f"dynamic_batching {{ preferred_batch_size: [ {sizes} ] max_queue_delay_microseconds: {delay_us} }}"
            )
        if threads := max((entry.cores.threads for entry in instances if entry.cores), default=0):
            # By default a session has a thread for each core of the machine.
            lines.append(f'parameters {{ key: "intra_op_thread_count" value {{ string_value: "{threads}" }} }}')
        counts: Counter[str] = Counter()
        for entry in instances:
            counts[self._describe_group(entry)] += entry.replica.processes
        lines += [f"instance_group {{ count: {count} {group} }}" for group, count in counts.items()]
        return _join_lines(lines)

    def _describe_group(self, entry: _Instances) -> str:
        if entry.cores:
            return f'kind: KIND_CPU host_policy: "cores-{entry.core_range}"'
        return f"kind: KIND_GPU gpus: {0 if self.has_own_gpu else entry.gpu.index}"


def _list_servers(deployment: DeploymentMap, by_worker: bool) -> list[_Server]:
    """Return a server for each worker, named after its first replica, or for each node, with its name.

    Raises `InputError` when the shares of a CPU exceed it.
    """
    servers: dict[object, _Server] = {}
    names = replica_names(deployment)
    for node in deployment.nodes:
        for gpu in node.gpus:
            placed = [(number, replica) for number, part in enumerate(gpu.partitions) for replica in part.replicas]
            slices: Sequence[CpuSlice | None] = [None] * len(placed)
            if is_cpu(gpu):
                shares = [(replica.sm_share_pct, replica.turns) for _, replica in placed]
                slices = plan_shared_slices(shares, _number_cores(gpu))
            for position, ((number, replica), cores) in enumerate(zip(placed, slices, strict=True)):
                worker = (node.name, gpu.index, number, replica.turns, 0 if replica.turns else position)
                name, *_ = next(names)
                new = _Server(name if by_worker else node.name, node, has_own_gpu=by_worker)
                server = servers.setdefault(worker if by_worker else node.name, new)
                server.instances.append(_Instances(gpu, gpu.partitions[number], replica, cores))
    return list(servers.values())


def _number_cores(cpu: Gpu) -> Sequence[int]:
    """Return the numbers of a CPU's cores: of this machine if it has as many, else from 0."""
    own, count = own_cores(), re.search(r"-(\d+)c$", cpu.device)
    return own if count is None or len(own) == int(count[1]) else range(int(count[1]))


def triton(deployment: DeploymentMap, base: Path) -> Bundle:
    """Return a model repository for each worker, with the environment and the options of its server.

    All models of a Triton server have the same share, so each worker has its own server: a replica, whose processes are
    the model's instances, or all replicas that take turns. Raises `InputError` when the map has a merged model, whose
    members Triton cannot name, or a model has inputs or outputs other than tensors.
    """
    if merges := [name for name, model in deployment.models.items() if model.members]:
        raise InputError(
            f"triton cannot serve the merge {min(merges)}: it has no queue for several models",
            "place without --merge, or export it to k8s, kserve or ray-serve, which run gpuprof serve",
        )
    bundle, rows = Bundle(), []
    for server in _list_servers(deployment, by_worker=True):
        variables = [f"{key}={value}" for key, value in _make_environment(server).items()]
        bundle.files[f"{server.name}/server.env"] = _join_lines(variables)
        bundle.files[f"{server.name}/server.options"] = _join_lines(server.options)
        for entry in server.instances:
            _add_model(bundle, deployment, base, server, entry)
            rows.append(_describe_row(deployment, server, entry))
    bundle.files["README.md"] = fill_text("triton.md", rows="\n".join(rows))
    return bundle


def _join_lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _add_model(bundle: Bundle, deployment: DeploymentMap, base: Path, server: _Server, entry: _Instances) -> None:
    """Add a replica's model and its configuration to the repository of its server."""
    replica = entry.replica
    public = public_name(deployment, replica.model)
    folder = folder_name(public.name)
    if folder != public.name:
        _add_note(bundle, f"clients of Triton ask for {public.name} as {folder}: a repository has folders for names")
    file = model_file(deployment, replica.model, base)
    version = f"{server.name}/{folder}/{public.version}"
    if file is None:
        _add_note(bundle, f"the file of {replica.model} is not here: put it at {version}/model.onnx")
    else:
        _require_tensors(file, replica.model)
        bundle.models[f"{version}/model.onnx"] = file
        bundle.models |= {f"{version}/{data}": path for data, path in model_files(file).items()}
    is_batched = file is None or has_leading_batch(file)
    if not is_batched and replica.batch > 1:
        _add_note(
            bundle,
            f"Triton serves {replica.model} without batches, which the map has ({replica.batch}): "
            "its inputs and outputs do not all begin with a free batch dimension",
        )
    schedule = server.write_schedule([entry], is_batched)
    bundle.files[f"{server.name}/{folder}/config.pbtxt"] = f'name: "{folder}"\nbackend: "onnxruntime"\n{schedule}'


def _describe_row(deployment: DeploymentMap, server: _Server, entry: _Instances) -> str:
    """Return the row of a replica in the table of servers."""
    partition, replica = entry.partition, entry.replica
    mig = "–" if partition.mig is None else f"{partition.mig.profile} at {partition.mig.start}"
    share = "none" if partition.unshared else f"{replica.sm_share_pct:g}%"
    if entry.cores:
        share += " of the cores"
    folder = folder_name(public_name(deployment, replica.model).name)
    place = f"{server.name} | {server.node.name} | {entry.gpu.index} | {mig}"
    return f"| {place} | {share} | {folder} | {replica.rate_rps:g} |"


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


def _add_note(bundle: Bundle, note: str) -> None:
    if note not in bundle.notes:
        bundle.notes.append(note)


def _make_environment(server: _Server) -> dict[str, str]:
    """Return the environment of a worker's process: its GPU, its MPS daemon and its share; empty on a CPU."""
    first = server.instances[0]
    gpu, partition = first.gpu, first.partition
    if is_cpu(gpu):
        return {}
    slot = "" if partition.mig is None else f"-slot{partition.mig.start}"
    environment = {"CUDA_VISIBLE_DEVICES": str(gpu.index)} if partition.mig is None else {}
    environment["CUDA_MPS_PIPE_DIRECTORY"] = f"/tmp/nvidia-mps-{slug(server.node.name)}-gpu{gpu.index}{slot}"
    if not partition.unshared:
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{first.replica.sm_share_pct:g}"
    if limit_bytes := sum(entry.replica.memory_limit_bytes or 0 for entry in server.instances):
        environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={-(-limit_bytes // 2**20)}M"
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
class TritonEnsemble:
    """An ensemble of a repository: its directory, Triton's protobuf message, and its models in their order."""

    folder: Path
    config: Any
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TritonRepository:
    """The models and ensembles of a Triton model repository, and why other models cannot be planned."""

    folder: Path
    models: Mapping[str, TritonModel]
    left_out: Mapping[str, str]
    ensembles: Mapping[str, TritonEnsemble]

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
    ensembles: dict[str, TritonEnsemble] = {}
    if not folder.is_dir():
        raise InputError(f"there is no Triton repository {folder}", "name the directory given to --model-repository")
    for entry in sorted(path for path in folder.iterdir() if path.is_dir()):
        config = _read_config(entry)
        if config.platform == "ensemble":
            ensembles[config.name] = TritonEnsemble(entry, config, _order_steps(config))
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
    """Return the models of an ensemble, each after the producers of its inputs; parallel steps run one after another.

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
    """Return the configuration in a model's directory; its default name is the directory's."""
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
        ensemble = repository.ensembles.get(name)
        steps = demand.steps or (ensemble.steps if ensemble else (name,))
        for step in steps:
            if step in repository.left_out:
                what = name if step == name else f"{name} cannot be planned, since {step}"
                raise InputError(f"{what} cannot be planned: {repository.left_out[step]}")
            if step not in repository.models:
                raise unknown_name("model of the repository", step, [*repository.models, *repository.ensembles])
        file = ">".join(str(repository.models[step].file) for step in steps)
        source = ">".join(steps) if ensemble else demand.source_model
        demands_with_files.append(replace(demand, file=file, source_model=source))
    return tuple(demands_with_files)


def write_configurations(deployment: DeploymentMap, repository: TritonRepository) -> dict[str, str]:
    """Return the planned configurations, and the options of each node's server, by their path below the repository.

    Each node of the map has a configuration of each of its models, ``MODEL/configs/NODE.pbtxt``: the largest planned
    batch, the batches of its replicas as preferred sizes, their longest wait, threads on a CPU, and an instance for
    each process on its GPU or cores. All other fields are those of the present configuration. Ensembles get the batch
    that all of their models take, since Triton refuses a larger one. ``NODE.options`` has the options of
    ``tritonserver``.
    """
    from google.protobuf import text_format

    files = {}
    for server in _list_servers(deployment, by_worker=False):
        batches: dict[str, int] = {}
        for model in repository.models.values():
            instances = [
                entry
                for entry in server.instances
                if model.name in (deployment.models[entry.replica.model].source_model, entry.replica.model)
            ]
            if instances:
                config = _plan_config(model, server, instances)
                folder = model.file.parent.parent.name
                files[f"{folder}/configs/{server.name}.pbtxt"] = text_format.MessageToString(config)
                batches[model.name] = config.max_batch_size
        for ensemble in repository.ensembles.values():
            limits = [batches[step] for step in ensemble.steps if step in batches]
            if limits and ensemble.config.max_batch_size:
                config = type(ensemble.config)()
                config.CopyFrom(ensemble.config)
                config.max_batch_size = min(config.max_batch_size, *limits)
                files[f"{ensemble.folder.name}/configs/{server.name}.pbtxt"] = text_format.MessageToString(config)
        files[f"{server.name}.options"] = _join_lines([f"--model-config-name={server.name}", *server.options])
    return files


def _plan_config(model: TritonModel, server: _Server, instances: Sequence[_Instances]) -> Any:
    from google.protobuf import text_format

    config = type(model.config)()
    config.CopyFrom(model.config)
    if not config.platform:
        config.backend = config.backend or _RUNTIME[0]
    config.ClearField("instance_group")
    is_dynamic = config.WhichOneof("scheduling_choice") in (None, "dynamic_batching")
    if is_dynamic:
        config.ClearField("dynamic_batching")
    return text_format.Merge(server.write_schedule(instances, has_leading_batch(model.file), is_dynamic), config)


def describe_limits(deployment: DeploymentMap) -> list[str]:
    """Return remarks on parts of the plan that a single Triton server per node does not keep."""
    remarks = set()
    for server in _list_servers(deployment, by_worker=False):
        for entry in server.instances:
            if entry.cores and entry.cores.quota_cores:
                remarks.add(
                    "a server holds models to whole cores, and the plan has parts of a core; "
                    "gpuprof export --to triton makes a server for each worker"
                )
    return sorted(remarks)
