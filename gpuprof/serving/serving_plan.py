"""From a deployment map to workers: who serves what, with which share of which device of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.cpu_share import CpuSlice, own_cores, plan_slices
from gpuprof.deployment import DeploymentMap, Gpu, Node, Partition, Replica
from gpuprof.errors import InputError, UnavailableError, unknown_name
from gpuprof.runtimes import ORT_CUDA
from gpuprof.serving.gpu_places import find_gpu, local_places
from gpuprof.serving.launcher import WorkerOrder
from gpuprof.serving.mps import GpuShare, needs_mps
from gpuprof.serving.replica import ReplicaPlan
from gpuprof.serving.runtime import NULL_PREFIX, null_bytes
from gpuprof.serving.shadow_plan import Spare, Standby
from gpuprof.serving.simulated_link import SIMULATED_PROVIDER
from gpuprof.session import gpu_provider

_CPU_PREFIX = "cpu"
SIMULATED_PREFIX = "sim:"


@dataclass(frozen=True, slots=True)
class PlannedReplica:
    """A replica and the orders of its workers, one for each process; ``standby`` may take over from them."""

    model: str
    plan: ReplicaPlan
    orders: tuple[WorkerOrder, ...]
    standby: Standby | None = None


def plan_workers(
    deployment: DeploymentMap,
    base: Path,
    group: str,
    node: str | None = None,
    *,
    simulated: bool = False,
    shadow_pct: float = 0.0,
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
    shadow_pct : float
        How much more of its device, where so much is left, a standby of each replica has; 0: no standbys.

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
    placed = list(_placed(nodes, simulated))
    spare = Spare([(place, mig, replica.sm_share_pct) for place, mig, replica, _ in placed], own_cores())
    for place, mig, replica, part in placed:
        find = _simulated_path if part is None else model_path
        path = find(deployment, replica.model, base)
        number = counts.get(replica.model, 0)
        counts[replica.model] = number + 1
        name = f"{replica.model}/{number}"
        order = _order(replica, path, part, f"{group}-{name}")
        plan = _plan(replica, name, place, mig)
        standby = spare.standby(plan, order, replica.processes, shadow_pct) if shadow_pct else None
        planned.append(PlannedReplica(replica.model, plan, (order,) * replica.processes, standby))
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


_Part = CpuSlice | _GpuPart | None


def _placed(nodes: Sequence[Node], simulated: bool) -> Iterator[tuple[str, str, Replica, _Part]]:
    """Yield each replica with its place, its MIG instance and its part of this machine; None: it is simulated."""
    for node in nodes:
        for gpu in node.gpus:
            place = f"{node.name}/{gpu.device}:{gpu.index}"
            for partition, replica, part in _shares(gpu, simulated):
                mig = "" if partition.mig is None else f"{partition.mig.profile}@{partition.mig.start}"
                yield place, mig, replica, part


def _shares(gpu: Gpu, simulated: bool) -> Iterator[tuple[Partition, Replica, _Part]]:
    """Yield each replica of a device with its part of it."""
    placed = [(partition, replica) for partition in gpu.partitions for replica in partition.replicas]
    if simulated or gpu.device.startswith(SIMULATED_PREFIX):
        yield from ((partition, replica, None) for partition, replica in placed)
    elif gpu.device.startswith(_CPU_PREFIX):
        slices = _cpu_shares(gpu, [replica for _, replica in placed])
        yield from ((partition, replica, part) for (partition, replica), part in zip(placed, slices, strict=True))
    else:
        yield from _gpu_shares(gpu)


def _cpu_shares(gpu: Gpu, placed: Sequence[Replica]) -> tuple[CpuSlice, ...]:
    """Return the part of this machine's cores of each replica of a CPU."""
    if gpu.index:
        raise UnavailableError(f"the map uses {gpu.index + 1} CPUs of one node, but this machine is one")
    return plan_slices([replica.sm_share_pct for replica in placed], own_cores())


def _gpu_shares(gpu: Gpu) -> Iterator[tuple[Partition, Replica, _GpuPart]]:
    """Yield each replica of a GPU with what each of its processes may use."""
    local = find_gpu(gpu, local_places())
    for partition in gpu.partitions:
        uuid = local.place(partition.mig)
        each = [replica.sm_share_pct / replica.processes for replica in partition.replicas]
        with_mps = needs_mps([pct for pct, r in zip(each, partition.replicas, strict=True) for _ in range(r.processes)])
        for replica, pct in zip(partition.replicas, each, strict=True):
            yield partition, replica, _GpuPart(GpuShare(uuid, pct, replica.memory_limit_bytes), with_mps)


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
            provider=gpu_provider() or ORT_CUDA,
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


def _plan(replica: Replica, name: str, place: str, mig: str) -> ReplicaPlan:
    return ReplicaPlan(
        name=name,
        batch=replica.batch,
        max_wait_ms=replica.max_wait_ms,
        latency_ms=_latency_ms(replica),
        rate_rps=replica.rate_rps,
        place=place,
        mig=mig,
        share_pct=replica.sm_share_pct,
    )


def _latency_ms(replica: Replica) -> tuple[float, ...]:
    """Return the predicted time of a batch of 1, 2, …; in proportion where the map has only the full one."""
    if replica.batch_latency_ms:
        return _filled(replica.batch_latency_ms, replica.batch)
    full_ms = replica.predicted.latency_ms
    return tuple(full_ms * (0.5 + 0.5 * rows / replica.batch) for rows in range(1, replica.batch + 1))


def _filled(latency_ms: Sequence[float], batch: int) -> tuple[float, ...]:
    return (*latency_ms[:batch], *[latency_ms[-1]] * (batch - len(latency_ms)))
