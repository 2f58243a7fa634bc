"""From a deployment map to workers: who serves what, with which share of which device of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.cpu_share import CpuSlice, own_cores, plan_slices
from gpuprof.deployment import DeploymentMap, Gpu, Node, Replica
from gpuprof.errors import InputError, UnavailableError, unknown_name
from gpuprof.serving.gpu_places import find_gpu, local_places
from gpuprof.serving.launcher import WorkerOrder
from gpuprof.serving.mps import GpuShare, needs_mps
from gpuprof.serving.replica import ReplicaPlan
from gpuprof.serving.runtime import NULL_PREFIX, null_bytes
from gpuprof.serving.simulated_link import SIMULATED_PROVIDER

_CPU_PREFIX = "cpu"
SIMULATED_PREFIX = "sim:"


@dataclass(frozen=True, slots=True)
class PlannedReplica:
    """A replica and the orders of its workers, one for each process."""

    model: str
    plan: ReplicaPlan
    orders: tuple[WorkerOrder, ...]


def plan_workers(
    deployment: DeploymentMap, base: Path, group: str, node: str | None = None, *, simulated: bool = False
) -> tuple[PlannedReplica, ...]:
    """Plan the workers of one node of a map on this machine.

    Parameters
    ----------
    deployment : DeploymentMap
    base : Path
        Directory of the map: model files are looked for there first.
    group : str
        Prefix of the control groups' names, unique to this server.
    node : str or None
        Which node of the map this machine is; None: the only one.
    simulated : bool
        Whether nothing is computed and batches take the time that the map predicts, on all nodes. A device whose
        name starts with ``sim:`` is simulated anyway.

    Raises
    ------
    InputError
        When a model has no file, the node is not there, or the shares are more than the device.
    UnavailableError
        When this machine lacks a device of the map.
    """
    nodes = deployment.nodes if simulated and node is None else (_node(deployment, node),)
    planned: list[PlannedReplica] = []
    counts: dict[str, int] = {}
    for place, replica, part in _placed(nodes, simulated):
        find = _simulated_path if part is None else model_path
        path = find(deployment, replica.model, base)
        number = counts.get(replica.model, 0)
        counts[replica.model] = number + 1
        name = f"{replica.model}/{number}"
        order = _order(replica, path, part, f"{group}-{name}")
        planned.append(PlannedReplica(replica.model, _plan(replica, name, place), (order,) * replica.processes))
    if not planned:
        raise InputError("the map places no replica on this node", "nothing can be served from it")
    return tuple(planned)


def model_path(deployment: DeploymentMap, model: str, base: Path) -> str:
    """Return the file of a model of the map, or its ``null:SIZE``.

    Raises
    ------
    InputError
        When the map does not say it, or the file is not there.
    """
    if model not in deployment.models:
        raise InputError(f"the map places {model!r}, which is not among its models")
    path = deployment.models[model].path
    if path is None:
        raise InputError(f"the map does not say where the file of model {model!r} is", 'add its "path" to the map')
    if path.startswith(NULL_PREFIX):
        null_bytes(path)
        return path
    for candidate in (base / path, Path(path)):
        if candidate.is_file():
            return str(candidate.resolve())
    raise InputError(f"model {model!r}: cannot read {path}: no such file")


def _node(deployment: DeploymentMap, name: str | None) -> Node:
    nodes = {node.name: node for node in deployment.nodes}
    if name is not None:
        if name not in nodes:
            raise unknown_name("node", name, list(nodes))
        return nodes[name]
    if len(nodes) != 1:
        raise InputError(
            f"the map has {len(nodes)} nodes", f"say which of them this machine is: --node {next(iter(nodes), 'NAME')}"
        )
    return next(iter(nodes.values()))


@dataclass(frozen=True, slots=True)
class _GpuPart:
    """Part of a GPU for each process of a replica."""

    share: GpuShare
    with_mps: bool


def _placed(nodes: Sequence[Node], simulated: bool) -> Iterator[tuple[str, Replica, CpuSlice | _GpuPart | None]]:
    """Yield each replica with the name of its place and its part of this machine; None: it is simulated."""
    for node in nodes:
        for gpu in node.gpus:
            place = f"{node.name}/{gpu.device}:{gpu.index}"
            if simulated or gpu.device.startswith(SIMULATED_PREFIX):
                for partition in gpu.partitions:
                    yield from ((place, replica, None) for replica in partition.replicas)
            elif gpu.device.startswith(_CPU_PREFIX):
                yield from ((place, replica, part) for replica, part in _cpu_shares(gpu))
            else:
                yield from ((place, replica, part) for replica, part in _gpu_shares(gpu))


def _cpu_shares(gpu: Gpu) -> list[tuple[Replica, CpuSlice]]:
    """Return each replica of a CPU with its part of this machine's cores."""
    if gpu.index:
        raise UnavailableError(f"the map uses {gpu.index + 1} CPUs of one node, but this machine is one")
    placed = [replica for partition in gpu.partitions for replica in partition.replicas]
    slices = plan_slices([replica.sm_share_pct for replica in placed], own_cores())
    return list(zip(placed, slices, strict=True))


def _gpu_shares(gpu: Gpu) -> Iterator[tuple[Replica, _GpuPart]]:
    """Yield each replica of a GPU with what each of its processes may use."""
    local = find_gpu(gpu, local_places())
    for partition in gpu.partitions:
        uuid = local.place(partition.mig)
        each = [replica.sm_share_pct / replica.processes for replica in partition.replicas]
        with_mps = needs_mps([pct for pct, r in zip(each, partition.replicas, strict=True) for _ in range(r.processes)])
        for replica, pct in zip(partition.replicas, each, strict=True):
            yield replica, _GpuPart(GpuShare(uuid, pct, replica.memory_limit_bytes), with_mps)


def _simulated_path(deployment: DeploymentMap, model: str, base: Path) -> str:
    """Return the model's file if it is here, for its inputs and outputs; simulation does without."""
    try:
        return model_path(deployment, model, base)
    except InputError:
        if model not in deployment.models:
            raise
        return ""


def _order(replica: Replica, path: str, part: CpuSlice | _GpuPart | None, group: str) -> WorkerOrder:
    if isinstance(part, _GpuPart):
        return WorkerOrder(
            model=replica.model,
            version="1",
            path=path,
            batch=replica.batch,
            provider="CUDAExecutionProvider",
            gpu=part.share,
            with_mps=part.with_mps,
        )
    if part is None:
        return WorkerOrder(
            model=replica.model,
            version="1",
            path=path,
            batch=replica.batch,
            provider=SIMULATED_PROVIDER,
            group=group,
            latency_ms=_latency_ms(replica),
            latency_cv=replica.predicted.latency_cv,
        )
    return WorkerOrder(
        model=replica.model,
        version="1",
        path=path,
        batch=replica.batch,
        threads=part.threads,
        cores=part.cores,
        quota_cores=part.quota_cores,
        group=group,
    )


def _plan(replica: Replica, name: str, place: str) -> ReplicaPlan:
    return ReplicaPlan(
        name, replica.batch, replica.max_wait_ms, _latency_ms(replica), rate_rps=replica.rate_rps, place=place
    )


def _latency_ms(replica: Replica) -> tuple[float, ...]:
    """Return the predicted time of a batch of 1, 2, …; in proportion where the map has only the full one."""
    if replica.batch_latency_ms:
        return _filled(replica.batch_latency_ms, replica.batch)
    full_ms = replica.predicted.latency_ms
    return tuple(full_ms * (0.5 + 0.5 * rows / replica.batch) for rows in range(1, replica.batch + 1))


def _filled(latency_ms: Sequence[float], batch: int) -> tuple[float, ...]:
    return (*latency_ms[:batch], *[latency_ms[-1]] * (batch - len(latency_ms)))
