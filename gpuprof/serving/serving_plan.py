"""From a deployment map to workers: who serves what, with which share of which device of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.cpu_share import CpuSlice, own_cores, plan_slices
from gpuprof.deployment import DeploymentMap, Gpu, Node, Replica
from gpuprof.errors import InputError, UnavailableError, unknown_name
from gpuprof.serving.launcher import WorkerOrder
from gpuprof.serving.replica import ReplicaPlan
from gpuprof.serving.runtime import NULL_PREFIX, null_bytes

_CPU_PREFIX = "cpu"


@dataclass(frozen=True, slots=True)
class PlannedReplica:
    """A replica and the orders of its workers, one for each process."""

    model: str
    plan: ReplicaPlan
    orders: tuple[WorkerOrder, ...]


def plan_workers(
    deployment: DeploymentMap, base: Path, group: str, node: str | None = None
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

    Raises
    ------
    InputError
        When a model has no file, the node is not there, or the shares are more than the device.
    UnavailableError
        When this machine lacks a device of the map.
    """
    chosen = _node(deployment, node)
    planned: list[PlannedReplica] = []
    counts: dict[str, int] = {}
    for gpu in chosen.gpus:
        for replica, part in _cpu_shares(gpu):
            number = counts.get(replica.model, 0)
            counts[replica.model] = number + 1
            path = model_path(deployment, replica.model, base)
            name = f"{replica.model}/{number}"
            order = _order(replica, path, part, f"{group}-{name}")
            place = f"{chosen.name}/{gpu.device}:{gpu.index}"
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


def _cpu_shares(gpu: Gpu) -> list[tuple[Replica, CpuSlice]]:
    """Return each replica of a CPU with its part of this machine's cores."""
    if not gpu.device.startswith(_CPU_PREFIX):
        raise UnavailableError(f"the map uses {gpu.device}, which this machine does not have", "see gpuprof doctor")
    if gpu.index:
        raise UnavailableError(f"the map uses {gpu.index + 1} CPUs of one node, but this machine is one")
    placed = [replica for partition in gpu.partitions for replica in partition.replicas]
    slices = plan_slices([replica.sm_share_pct for replica in placed], own_cores())
    return list(zip(placed, slices, strict=True))


def _order(replica: Replica, path: str, part: CpuSlice, group: str) -> WorkerOrder:
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
