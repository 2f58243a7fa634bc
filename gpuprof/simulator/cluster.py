"""Conversion of a deployment map into the simulator's arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.deployment import DeploymentMap, Gpu, Node, Partition, Replica
from gpuprof.domain.estimate import MOST_VARIATION
from gpuprof.domain.host_work import NO_HOST_WORK, HostWork
from gpuprof.domain.number_format import ROUNDING
from gpuprof.domain.validation import parse_duration
from gpuprof.errors import InputError, unknown_name
from gpuprof.rules.batching import wait_limit_ms
from gpuprof.rules.host_work import cores_of
from gpuprof.rules.turns import find_mean_waits, load_replica
from gpuprof.simulator.state import NS_PER_MS, ClusterArrays, Ints


@dataclass(frozen=True, slots=True)
class Switch:
    """A time at which some replicas start accepting requests, and others stop accepting and finish theirs."""

    at_s: float
    #: ``begin``, ``end``: Positions in `places_of` the map.
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Settings of a simulation."""

    duration_s: float  #: Duration of arrivals; requests then in the system are simulated to their end.
    warmup_s: float = 0.0  #: Requests that arrive before this are not counted.
    seed: int = 0
    #: Whether the router refuses a request expected to miss its SLO if others wait already.
    refuse_hopeless: bool = True
    #: Model → network time of a request to its replica, and of the answer back; default 0.
    legs_ms: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    switches: tuple[Switch, ...] = ()
    absent: tuple[int, ...] = ()  #: Replicas that take no requests until a switch starts them.
    max_in_system: int = 2**22  #: Most requests in the system, a bound on memory; more are turned away.
    #: Batching delay of every batch regardless of the deadline, as in routers without SLOs (Elvinger's thesis, section
    #: 4.3.3). None: each replica's delay in the map, within the deadline.
    batch_timeout_ms: float | None = None
    #: Cost of serving in addition to the batches; the map's batch times already include its ``handover_ms``. Ignored if
    #: replicas start and stop.
    host: HostWork = NO_HOST_WORK


@dataclass(frozen=True, slots=True)
class PlacedInstance:
    """A replica and its node, GPU and partition."""

    node: Node
    gpu: Gpu
    partition: Partition
    replica: Replica

    @property
    def name(self) -> str:
        """``node0/1``, with the MIG instance if any."""
        mig = self.partition.mig
        return f"{self.node.name}/{self.gpu.index}" + ("" if mig is None else f"/{mig.profile}@{mig.start}")


def places_of(deployment: DeploymentMap) -> tuple[PlacedInstance, ...]:
    """Return all replicas, in the order of the file.

    Raises `InputError` when there is no replica, or a replica has a model that the map does not list, a number of batch
    times different from its batch, or a coefficient of variation above `MOST_VARIATION`.
    """
    places = tuple(PlacedInstance(*place) for place in deployment.places())
    if not places:
        raise InputError("the map holds no replicas: nothing could answer a request")
    for place in places:
        replica = place.replica
        if replica.model not in deployment.models:
            raise InputError(
                f"{place.name} serves {replica.model!r}, which the map's models do not list",
                "gpuprof check MAP says more",
            )
        times = replica.batch_latency_ms
        if times is not None and len(times) != replica.batch:
            raise InputError(
                f"{place.name}: {replica.model} must have {replica.batch} batch_latency_ms but has {len(times)}"
            )
        if max(replica.predicted.latency_cv, _pause_cv(replica)) > MOST_VARIATION:
            raise InputError(
                f"{place.name}: the time of {replica.model} is said to vary by more than {MOST_VARIATION:g} times "
                "itself",
                "gpuprof check MAP says more",
            )
    return places


def build_cluster(
    deployment: DeploymentMap, places: Sequence[PlacedInstance], options: SimulationOptions
) -> ClusterArrays:
    """Return the arrays.

    A replica without ``batch_latency_ms`` has its predicted latency for every batch size.
    """
    models = list(deployment.models)
    following, chain = np.full((2, len(models)), -1)
    for row, planned in enumerate(deployment.chains.values(), len(models)):
        positions = [models.index(step) for step in planned.steps]
        chain[positions], following[positions[:-1]] = row, positions[1:]
    replicas = [place.replica for place in places]
    of_model = np.array([models.index(replica.model) for replica in replicas], np.int64)
    turn_ms = _latencies(replicas)
    latency = turn_ms + find_waits(places)[:, None]
    wait_ms = np.array(
        [
            wait_limit_ms(r.max_wait_ms, deployment.models[r.model].slo_ms, row[: r.batch].tolist())
            for r, row in zip(replicas, latency, strict=True)
        ]
    )
    if options.batch_timeout_ms is not None:
        wait_ms = np.full(len(replicas), options.batch_timeout_ms)
    host = NO_HOST_WORK if options.switches or options.absent else options.host
    # Requests to a map of several devices come from other machines.
    replicas_on_host = [place.replica for place in places] if len({place.name for place in places}) == 1 else []
    event, delays, core_start, core_process = _core_arrays(replicas_on_host, host)
    processes = np.array([replica.processes for replica in replicas], np.int64)
    return ClusterArrays(
        slo=_ns([deployment.models[model].slo_ms for model in models]),
        late_part=np.array([1.0 - deployment.models[model].percentile / 100.0 for model in models]),
        following=following,
        chain=chain,
        chain_slo=_ns([planned.slo_ms for planned in deployment.chains.values()]),
        request_leg=_ns([options.legs_ms.get(model, (0.0, 0.0))[0] for model in models]),
        answer_leg=_ns([options.legs_ms.get(model, (0.0, 0.0))[1] for model in models]),
        choice_start=np.concatenate([[0], np.cumsum(np.bincount(of_model, minlength=len(models)))]).astype(np.int64),
        # A stable sort keeps a model's replicas in the order of the map, which breaks ties as in the router.
        choice=np.argsort(of_model, kind="stable").astype(np.int64),
        replica_model=of_model,
        batch=np.array([replica.batch for replica in replicas], np.int64),
        latency_ms=latency,
        turns=_number_turns(places),
        slice_ns=_ns([replica.time_slice_ms or 0.0 for replica in replicas]),
        turn_ms=turn_ms,
        max_wait_ms=wait_ms,
        cv=_drop_least(np.array([replica.predicted.latency_cv for replica in replicas])),
        pause_factor=np.array([replica.predicted.pause_factor for replica in replicas]),
        pause_cv=_drop_least(np.array([_pause_cv(replica) for replica in replicas])),
        first_process=np.concatenate([[0], np.cumsum(processes)]).astype(np.int64),
        process_replica=np.repeat(np.arange(len(replicas)), processes).astype(np.int64),
        refuse_hopeless=options.refuse_hopeless,
        host_event=np.array([event], np.int64),
        host_delay=np.array(delays or [0] * len(replicas), np.int64),
        core_start=core_start,
        core_process=core_process,
    )


def _pause_cv(replica: Replica) -> float:
    pause_cv = replica.predicted.pause_cv
    return replica.predicted.latency_cv if pause_cv is None else pause_cv


def _drop_least(variations: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(variations < ROUNDING, 0.0, variations)  # the gamma shape 1 / cv² would overflow


def _latencies(replicas: Sequence[Replica]) -> NDArray[np.float64]:
    rows = np.zeros((len(replicas), max(replica.batch for replica in replicas)))
    for row, replica in zip(rows, replicas, strict=True):
        row[: replica.batch] = replica.batch_latency_ms or replica.predicted.latency_ms
        row[replica.batch :] = row[replica.batch - 1]
    return rows


def _number_turns(places: Sequence[PlacedInstance]) -> NDArray[np.int64]:
    """Return the map-wide number of each replica's group that takes turns; -1: no turns."""
    numbers: dict[tuple[str, int], int] = {}
    return np.array(
        [
            numbers.setdefault((place.name, place.replica.turns), len(numbers)) if place.replica.turns else -1
            for place in places
        ],
        np.int64,
    )


def find_waits(places: Sequence[PlacedInstance]) -> NDArray[np.float64]:
    """Return the mean wait of each replica for its turn, in milliseconds."""
    partitions = (list(group) for _, group in groupby(places, key=lambda place: id(place.partition)))
    waits_ms = (find_mean_waits([load_replica(place.replica) for place in group]) for group in partitions)
    return np.array([wait_ms for partition in waits_ms for wait_ms in partition])


def _ns(milliseconds: Sequence[float] | NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(np.asarray(milliseconds, np.float64) * NS_PER_MS).astype(np.int64)


def _core_arrays(replicas: Sequence[Replica], host: HostWork) -> tuple[int, list[int], Ints, Ints]:
    """Return the host work per event and its delay of each replica, and each core's processes: offsets and numbers.

    Of a time-sliced worker, the other batches run on its other cores meanwhile, so that it loses a core's time alone.
    ``replicas``: those on the host's own CPU. Without disturbance (other devices, or no replicas) the time is 0 and
    there are no cores. Raises `InputError` when the replicas' shares exceed the machine.
    """
    no_host = 0, list[int](), np.zeros(1, np.int64), np.zeros(0, np.int64)
    if not host.can_disturb or not replicas:
        return no_host
    slices = cores_of([(replica.sm_share_pct, replica.turns) for replica in replicas], host.host_cores)
    first = np.concatenate([[0], np.cumsum([replica.processes for replica in replicas])]).tolist()
    on = [
        [process for i, part in enumerate(slices) if core in part.cores for process in range(first[i], first[i + 1])]
        for core in range(host.host_cores)
    ]
    start = np.concatenate([[0], np.cumsum([len(processes) for processes in on])]).astype(np.int64)
    event = round(host.event_ms * 1e6)
    delays = [
        event // len(part.cores) if replica.time_slice_ms else event
        for replica, part in zip(replicas, slices, strict=True)
    ]
    return event, delays, start, np.array([process for processes in on for process in processes], np.int64)


_FORM = re.compile(r"(?P<node>[^/@]+)(?:/(?P<gpu>\d+))?@(?P<at>[^+]+)(?:\+(?P<lasts>.+))?")


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a GPU or a node."""

    node: str
    gpu: int | None  #: Index of the GPU; None: the whole node.
    at_s: float
    lasts_s: float | None = None  #: Duration; None: no recovery.


def parse_failure(text: str, deployment: DeploymentMap) -> Failure:
    """Read ``node0@30s``, ``node0/1@30s`` or ``node0/1@30s+10s``: GPU 1 of node0 fails for ten seconds.

    Raises `InputError` for another form, or a node or GPU absent from the map.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise InputError(f"cannot read the failure {text!r}", "write node0@30s, node0/1@30s or node0/1@30s+10s")
    nodes = {node.name: node for node in deployment.nodes}
    if match["node"] not in nodes:
        raise unknown_name("node", match["node"], sorted(nodes))
    gpu = None if match["gpu"] is None else int(match["gpu"])
    indices = [entry.index for entry in nodes[match["node"]].gpus]
    if gpu is not None and gpu not in indices:
        raise InputError(
            f"{match['node']} has no GPU {gpu}", f"it has {', '.join(map(str, sorted(indices))) or 'none'}"
        )
    at_s = parse_duration(match["at"], "the time of a failure")
    lasts_s = None if match["lasts"] is None else parse_duration(match["lasts"], "the length of a failure")
    return Failure(match["node"], gpu, at_s, lasts_s)
