"""Turns a deployment map into replicas and the orders of their workers, each with its model and share of a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

from gpuprof.domain.deployment import DeployedModel, DeploymentMap, Gpu, Node, PublicName, Replica, read_map
from gpuprof.domain.number_format import ROUNDING
from gpuprof.errors import InputError, UnavailableError, unknown_name
from gpuprof.graph.merged_model import read_merged
from gpuprof.machine.gpu import find_gpu
from gpuprof.rules.cpu_slices import CpuSlice, plan_shared_slices, unassigned_cores
from gpuprof.rules.turns import held_shares, list_firsts, require_turns
from gpuprof.runtime.gpu_probe import gpu_provider
from gpuprof.runtime.providers import ORT_CUDA
from gpuprof.serving.machine.orders import GpuShare, MachineParts, WorkerOrder, needs_mps
from gpuprof.serving.router.router import PlannedMember
from gpuprof.serving.router.served_replica import ReplicaPlan
from gpuprof.serving.router.worker import SIMULATED_PROVIDER
from gpuprof.serving.worker.runtime import NULL_PREFIX, null_bytes

_CPU_PREFIX = "cpu"
SIMULATED_PREFIX = "sim:"
NO_PARTS: Mapping[str, MachineParts] = MappingProxyType({})


#: Additional percent of the device for a standby, as far as available: iGniter's largest error.
SHADOW_PCT = 10.0


@dataclass(frozen=True, slots=True)
class Claim:
    """The resources that a standby takes when it is activated: a core, or a percentage of a GPU or MIG instance."""

    resource: str
    #: ``amount``, ``spare``: Amount that the standby takes, and amount that the plan leaves unused.
    amount: float
    spare: float


@dataclass(frozen=True, slots=True)
class Standby:
    """Standby workers of a replica."""

    plan: ReplicaPlan
    orders: tuple[WorkerOrder, ...]
    claims: tuple[Claim, ...]


class SpareResources:
    """The resources that a plan leaves free, on each device and MIG instance.

    ``placed``: place, MIG instance, share in percent and number of turns of every replica; ``cores``: of this
    machine.
    """

    def __init__(self, placed: Sequence[tuple[str, str, float, int]], cores: Sequence[int]) -> None:
        self._cores = cores
        shares: dict[tuple[str, str], list[tuple[float, int]]] = {}
        for place, mig, share, turns in placed:
            shares.setdefault((place, mig), []).append((share, turns))
        self._shares = {where: held_shares(turn_shares) for where, turn_shares in shares.items()}

    def standby(self, plan: ReplicaPlan, order: WorkerOrder, processes: int, extra_pct: float) -> Standby | None:
        """Return a standby with ``extra_pct`` more of the device, or with all that is left; None if too little is."""
        shares = self._shares[plan.place, plan.mig]
        left_pct = 100.0 - sum(shares)
        extra_pct = min(extra_pct, left_pct)
        if extra_pct < ROUNDING:
            return None
        larger = replace(plan, name=f"{plan.name}-shadow", share_pct=plan.share_pct + extra_pct)
        if order.gpu is not None and order.gpu.active_pct is not None:
            gpu = replace(order.gpu, active_pct=order.gpu.active_pct + extra_pct / processes)
            claims: tuple[Claim, ...] = (Claim(gpu.uuid, extra_pct, left_pct),)
            order = replace(order, gpu=gpu)
        elif order.provider == SIMULATED_PROVIDER:
            faster = tuple(ms * plan.share_pct / larger.share_pct for ms in order.latency_ms)
            claims = (Claim(f"{plan.place}/{plan.mig}", extra_pct, left_pct),)
            order = replace(order, latency_ms=faster)
            larger = replace(larger, latency_ms=faster)
        else:
            order, claims = self._on_more_cores(order, extra_pct, shares)
        return Standby(larger, (order,) * processes, claims)

    def _on_more_cores(
        self, order: WorkerOrder, extra_pct: float, shares: Sequence[float]
    ) -> tuple[WorkerOrder, tuple[Claim, ...]]:
        """Return a worker's order with a larger CPU share, preferably on cores that it already uses."""
        spare = unassigned_cores(shares, self._cores)
        extra = extra_pct * len(self._cores) / 100.0
        claims: list[Claim] = []
        part = CpuSlice(order.cores, order.quota_cores)
        for core in sorted(spare, key=lambda core: (core not in order.cores, -spare[core])):
            amount = min(extra - sum(claim.amount for claim in claims), spare[core])
            if amount > ROUNDING:
                claims.append(Claim(f"{order.node} core {core}".lstrip(), amount, spare[core]))
                part = CpuSlice(tuple(sorted({*part.cores, core})), part.amount_cores + amount)
        if len(part.cores) - part.amount_cores < ROUNDING:
            part = CpuSlice(part.cores)
        quota = None if part.quota_cores is None else round(part.quota_cores, 6)
        return replace(order, cores=part.cores, quota_cores=quota, threads=part.threads), tuple(claims)


@dataclass(frozen=True, slots=True)
class PlannedReplica:
    """A replica and the orders of its workers, one per process; ``standby`` may replace them.

    ``members`` are the models of a merged model, whose requests it serves under their names.
    """

    model: str
    plan: ReplicaPlan
    orders: tuple[WorkerOrder, ...] = ()
    standby: Standby | None = None
    members: tuple[PlannedMember, ...] = ()
    fault: InputError | None = None  #: The reason why the replica has no orders.


@dataclass(frozen=True, slots=True)
class MapSource:
    """A map, and the directory searched first for its model files."""

    deployment: DeploymentMap
    base: Path

    @classmethod
    def read_map(cls, path: Path) -> MapSource:
        """Read the map at ``path``. Raises `InputError` as `gpuprof.domain.deployment.read_map` does."""
        return cls(read_map(path), path.absolute().parent)


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the workers of maps: at the start, for ``gpuprof apply``, and when a machine is replaced by another."""

    group: str  #: Prefix of the control groups' names, unique to this server.
    node: str | None = None  #: This machine's node in the map; None: the only node.
    #: True if nothing is computed and batches take their predicted time, on all nodes. A device whose name starts with
    #: ``sim:`` is simulated anyway.
    simulated: bool = False
    shadow_pct: float = 0.0  #: Additional percent of its device for a standby, as far as available; 0: no standbys.
    cluster: bool = False  #: True if the map's nodes are machines of a cluster.
    apply_mig: bool = False  #: True if GPUs are partitioned into the MIG instances of the map.
    allow_changed: bool = False  #: True if model files may differ from the planned files.

    def nodes(self, source: MapSource) -> dict[str, dict[str, list[tuple[str, int]]]]:
        """Return the nodes of a map whose machines must be connected before its workers can be planned.

        For each node: the MIG instances to create, by number of the GPU; none unless ``apply_mig``. Raises `InputError`
        when this machine's node in the map is ambiguous.
        """
        if self.cluster:
            nodes = [
                node
                for node in source.deployment.nodes
                if not self.simulated
                and any(
                    p.replicas for g in node.gpus if not g.device.startswith(SIMULATED_PREFIX) for p in g.partitions
                )
            ]
        elif self.apply_mig and not self.simulated:
            nodes = [chosen_node(source.deployment, self.node)]
        else:
            return {}
        return {node.name: mig_layouts(node) if self.apply_mig else {} for node in nodes}

    def plan(self, source: MapSource, parts: Mapping[str, MachineParts] = NO_PARTS) -> tuple[PlannedReplica, ...]:
        """Return the replicas of one node of a map on this machine, or of all nodes on the machines of a cluster.

        A replica whose model file is missing has a fault instead of orders. Raises `InputError` when the node is
        unknown, models are time-sliced, or the shares exceed the device; `UnavailableError` when a machine lacks a
        device of the map.
        ``parts``: cores and GPUs of each machine of `nodes`.
        """
        deployment, has_machines = source.deployment, self.cluster or bool(parts)
        require_turns(deployment)
        uses_all_nodes = self.cluster or (self.node is None and (self.simulated or has_machines))
        nodes = deployment.nodes if uses_all_nodes else (chosen_node(deployment, self.node),)
        here = MachineParts(()) if has_machines else MachineParts.here()
        builder = _OrderBuilder(self, source)
        planned: list[PlannedReplica] = []
        for node in nodes:
            machine = parts.get(node.name, here)
            placed = list(_assign_parts(node, machine, self.simulated))
            planned += builder.replicas(placed, machine, node.name if has_machines else "")
        if not planned:
            raise InputError("the map places no replica on this node", "nothing can be served from it")
        return tuple(planned)


def _public_names(deployment: DeploymentMap) -> dict[str, PublicName]:
    """Return the public name and version of each model that clients can ask for; no two may be equal."""
    names: dict[str, PublicName] = {}
    owners: dict[PublicName, str] = {}
    for model, entry in deployment.requested.items():
        names[model] = public = PublicName.of(model, entry.path)
        if owners.setdefault(public, model) != model:
            raise InputError(
                f"{model!r} and {owners[public]!r} are both version {public.version} of {public.name!r}",
                "rename one of them: clients could not tell them apart",
            )
    return names


@dataclass(frozen=True, slots=True)
class _GpuPart:
    """Part of a GPU for each process of a replica, and its MPS percentage."""

    share: GpuShare
    with_mps: bool


_Part = CpuSlice | _GpuPart | None
_Placed = tuple[str, str, Replica, _Part]


class _OrderBuilder:
    """Turns the replicas of the nodes into orders, node by node."""

    def __init__(self, planner: Planner, source: MapSource) -> None:
        self._planner, self._deployment, self._base = planner, source.deployment, source.base
        self._public_names = _public_names(source.deployment)
        self._counts: Counter[str] = Counter()

    def replicas(self, placed: Sequence[_Placed], machine: MachineParts, node: str) -> Iterator[PlannedReplica]:
        """Yield the replicas of a node; ``node`` names the machine of their workers."""
        shares = [(place, mig, replica.sm_share_pct, replica.turns) for place, mig, replica, _ in placed]
        spare = SpareResources(shares, machine.cores)
        planned = [self._plan_replica(*place, spare, node) for place in placed]
        yield from (_join_worker(replica, turns, planned) for replica, turns in planned)

    def _plan_replica(
        self, place: str, mig: str, replica: Replica, part: _Part, spare: SpareResources, node: str
    ) -> tuple[PlannedReplica, str]:
        """Return a replica with the name of its worker, empty for a replica with processes of its own."""
        model = self._deployment.models.get(replica.model)
        if model is None:
            text = f"the map places {replica.model!r}, which is not among its models"
            raise InputError(text, "gpuprof place writes a whole map")
        name = f"{replica.model}/{self._counts[replica.model]}"
        self._counts[replica.model] += 1
        plan = ReplicaPlan(
            name=name,
            batch=replica.batch,
            max_wait_ms=replica.max_wait_ms,
            latency_ms=_latency_ms(replica),
            rate_rps=replica.rate_rps,
            place=place,
            mig=mig,
            share_pct=replica.sm_share_pct,
        )
        try:
            order = self._make_order(replica, part, f"{self._planner.group}-{name}", node)
            members = _plan_members(model, Path(order.path))
        except InputError as fault:
            return PlannedReplica(replica.model, plan, fault=fault), ""
        turns = f"{self._planner.group}-{place}-{mig}-turns{replica.turns}" if replica.turns else ""
        extra_pct = 0.0 if turns else self._planner.shadow_pct  # a worker has no standby
        standby = spare.standby(plan, order, replica.processes, extra_pct) if extra_pct else None
        return PlannedReplica(replica.model, plan, (order,) * replica.processes, standby, members), turns

    def _make_order(self, replica: Replica, part: _Part, group: str, node: str) -> WorkerOrder:
        model = self._deployment.models[replica.model]
        try:
            path = model_path(self._deployment, replica.model, self._base)
        except InputError:
            if part is not None or model.members:
                raise  # simulation needs no file, but to tell apart the tensors of merged models
            path = ""
        public = self._public_names.get(replica.model, PublicName(replica.model))
        sha256 = "" if self._planner.allow_changed else model.sha256 or ""
        order = WorkerOrder(public.name, public.version, path, replica.batch, node=node, sha256=sha256)
        if isinstance(part, _GpuPart):
            return replace(order, provider=gpu_provider() or ORT_CUDA, gpu=part.share, with_mps=part.with_mps)
        if part is None:
            times_ms, cv = _latency_ms(replica), replica.predicted.latency_cv
            return replace(order, provider=SIMULATED_PROVIDER, group=group, latency_ms=times_ms, latency_cv=cv)
        return replace(order, threads=part.threads, cores=part.cores, quota_cores=part.quota_cores, group=group)


def _join_worker(replica: PlannedReplica, turns: str, planned: Sequence[tuple[PlannedReplica, str]]) -> PlannedReplica:
    """Return a replica whose orders have the name, number of models, memory and quota of its shared worker.

    The name includes the worker's models and settings, since a worker with other models is another process.
    """
    if not turns or replica.fault is not None:
        return replica
    mates = [mate for mate, name in planned if name == turns and mate.fault is None]
    contents = [
        (replace(mate.plan, name="", rate_rps=0.0), *(replace(order, group="") for order in mate.orders))
        for mate in mates
    ]
    name = f"{turns}-{sha256(repr(contents).encode()).hexdigest()[:8]}"
    order = replica.orders[0]
    gpus = [mate.orders[0].gpu for mate in mates]
    limits = [None if gpu is None else gpu.memory_bytes for gpu in gpus]
    gpu = order.gpu and replace(order.gpu, memory_bytes=None if None in limits else sum(filter(None, limits)))
    return replace(replica, orders=(replace(order, turns=name, group=name, mates=len(mates), gpu=gpu),))


def model_path(deployment: DeploymentMap, model: str, base: Path) -> str:
    """Return the file of a model of the map, or its ``null:SIZE``.

    Raises `InputError` when the map does not name the file, or the file does not exist.
    """
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


def mig_layouts(node: Node) -> dict[str, list[tuple[str, int]]]:
    """Return the planned MIG instances of a node's GPUs, as profile and first slice, by number of the GPU."""
    return {
        str(gpu.index): [(part.mig.profile, part.mig.start) for part in gpu.partitions if part.mig is not None]
        for gpu in node.gpus
        if not gpu.device.startswith(SIMULATED_PREFIX) and any(part.mig is not None for part in gpu.partitions)
    }


def chosen_node(deployment: DeploymentMap, name: str | None) -> Node:
    """Return the node of a map with this name; None: the only node.

    Raises `InputError` when there is no such node, or several nodes and no name.
    """
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


def _assign_parts(node: Node, machine: MachineParts, simulated: bool) -> Iterator[_Placed]:
    """Yield each replica with its place, its MIG instance and its cores or GPU part; None if simulated."""
    for gpu in node.gpus:
        placed = [(partition, replica) for partition in gpu.partitions for replica in partition.replicas]
        parts: Iterable[_Part]
        if simulated or gpu.device.startswith(SIMULATED_PREFIX):
            parts = [None] * len(placed)
        elif not gpu.device.startswith(_CPU_PREFIX):
            parts = _assign_gpu_shares(gpu, machine)
        elif gpu.index:
            raise UnavailableError(
                f"the map uses {gpu.index + 1} CPUs of one node, but this machine is one", "plan with --gpus cpu:1"
            )
        else:
            parts = plan_shared_slices([(replica.sm_share_pct, replica.turns) for _, replica in placed], machine.cores)
        for (partition, replica), part in zip(placed, parts, strict=True):
            mig = "" if partition.mig is None else f"{partition.mig.profile}@{partition.mig.start}"
            yield f"{node.name}/{gpu.device}:{gpu.index}", mig, replica, part


def _assign_gpu_shares(gpu: Gpu, machine: MachineParts) -> Iterator[_GpuPart]:
    """Yield the part of the GPU for each process of each replica."""
    local = find_gpu(gpu, machine.gpus)
    for partition in gpu.partitions:
        uuid = local.find_uuid(partition.mig)
        pcts = [replica.sm_share_pct / replica.processes for replica in partition.replicas]
        firsts = list_firsts([replica.turns for replica in partition.replicas])
        with_mps = needs_mps(
            [
                pct
                for pct, replica, is_first in zip(pcts, partition.replicas, firsts, strict=True)
                for _ in range(replica.processes if is_first else 0)
            ]
        )
        for replica, pct in zip(partition.replicas, pcts, strict=True):
            held_pct = None if partition.unshared else pct
            yield _GpuPart(GpuShare(uuid, held_pct, replica.memory_limit_bytes), with_mps)


def _latency_ms(replica: Replica) -> tuple[float, ...]:
    """Return the predicted times of batches of 1, 2, …; a straight line if the map only has the full batch."""
    if times := replica.batch_latency_ms:
        return (*times[: replica.batch], *[times[-1]] * (replica.batch - len(times)))
    full_ms = replica.predicted.latency_ms
    # Half of the time is assumed to be independent of the rows, until the router has measured batches.
    return tuple(full_ms * (0.5 + 0.5 * rows / replica.batch) for rows in range(1, replica.batch + 1))


def _plan_members(model: DeployedModel, file: Path) -> tuple[PlannedMember, ...]:
    """Return the models of a merged model with their tensors; empty for any other model.

    Raises `InputError` when the file is not merged, or lacks a model.
    """
    if not model.members:
        return ()
    merged = read_merged(file)
    if merged is None:
        raise InputError(f"cannot read {file}: it is not a merged model", "place with --merge again")
    return tuple(
        PlannedMember(PublicName.of(name, entry.path), entry.slo_ms, merged.member(name))
        for name, entry in model.members.items()
    )
