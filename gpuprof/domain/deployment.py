"""The deployment map: placement and share of each replica, with predictions; its JSON files and their schema."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from gpuprof.domain.file_access import read_input, write_atomically
from gpuprof.domain.host_work import NO_HOST_WORK, HostWork
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import parse_mix
from gpuprof.errors import InputError, refuse_unwritable

SCHEMA = "gpuprof.deployment/1"
#: Largest batch size.
LARGEST_BATCH = 65_536


def _require_name(name: str) -> str:
    if not name.strip() or not name.isprintable():
        raise ValueError(f"{name!r} is no name: it must be of characters that can be seen")
    return name


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Percent = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Interval = tuple[float, float]
#: A printable name: names appear in terminals, addresses and file names.
Name = Annotated[str, AfterValidator(_require_name)]


def find_duplicate(values: Iterable[str | int]) -> str | None:
    """Return the first value that occurs more than once, None where all are distinct."""
    return next((str(value) for value, count in Counter(values).items() if count > 1), None)


class _MapElement(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    #: Fields omitted from the JSON where empty, so that maps without them stay as before these fields existed.
    omitted_if_empty: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _omit_empty(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if value or key not in self.omitted_if_empty}


_Milliseconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
#: Time slice in milliseconds; simulations with shorter slices would take too long.
_TimeSlice = Annotated[float, Field(gt=0.01, lt=1e9, allow_inf_nan=False)]


class PlannedDevices(_MapElement):
    """Devices of a kind available to the plan; without ``count`` as many as needed.

    ``price_per_hour`` is present if it differed from the catalogue's.
    """

    omitted_if_empty = ("price_per_hour",)

    device: Annotated[str, Field(pattern=r"\S")]
    count: _Count | None = None
    price_per_hour: Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)] | None = None


class PlannedWith(_MapElement):
    """The settings, costs and sources of a plan.

    ``estimator`` is the name of the estimator of times; ``premise`` its assumption, if any, on which assumed times
    depend; ``arrivals`` the arrival process or trace, None for Poisson. ``precision`` and ``runtime`` apply to models
    without measurements on a GPU, None for their own types and ONNX Runtime; ``host_us`` is the host's time per launch,
    None for the runtime's usual time. ``found_by`` names the method that found the map, ``stopped_by`` the reason for
    an early end of the search. The other settings are those of `gpuprof.placement.problem.Options`.
    """

    version: Annotated[int, Field(ge=1, le=1)] = 1
    estimator: str = "database"
    premise: str | None = None
    arrivals: str | None = None
    fleet: tuple[PlannedDevices, ...] = ()
    confidence: Annotated[float, Field(ge=0, lt=1)] | None = None
    latency_budget: Annotated[float, Field(gt=0, le=1)] | None = None
    overhead_ms: _Milliseconds = 0.0
    max_batch: _Count = 256
    max_processes: _Count | None = None
    isolate: bool = False
    no_mig: bool = False
    no_mps: bool = False
    time_slice_ms: _TimeSlice | None = None
    host: HostWork = NO_HOST_WORK
    precision: str | None = None
    runtime: str | None = None
    host_us: Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)] | None = None
    slo_sha256: str | None = None
    database_sha256: str | None = None
    found_by: str | None = None
    stopped_by: str | None = None

    @field_validator("fleet")
    @classmethod
    def _require_distinct_devices(cls, fleet: tuple[PlannedDevices, ...]) -> tuple[PlannedDevices, ...]:
        names = [entry.device for entry in fleet]
        if len(set(names)) < len(names):
            raise ValueError("a device stands in the fleet more than once")
        return fleet

    @model_serializer(mode="wrap")
    def _omit_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit unknown values, and options that are off."""
        return {key: value for key, value in write(self).items() if value is not None and value is not False}


class RequiredCompute(_MapElement):
    """Creq in percent of the device by ``metric``, with which the policy planned; ``source``: profiled or predicted."""

    metric: str
    pct: NonNegative
    interval_pct: Interval | None = None
    source: str


class RequiredMemory(_MapElement):
    """Mreq in bytes of all processes together; plans use the upper end of predicted values."""

    bytes: NonNegative
    interval_bytes: Interval | None = None
    source: str


class ReplicaPrediction(_MapElement):
    """Prediction of a replica at its rate; intervals are 90%, null where the error is unknown.

    ``memory_bytes`` is the sum over all processes; ``creq`` and ``mreq`` are present if the policy used them.
    ``throughput_rps`` is the rate of full batches; ``overlapped_ms`` of a batch can overlap with the preceding batch.
    """

    omitted_if_empty = ("creq", "mreq", "overlapped_ms")

    latency_ms: NonNegative
    latency_ms_interval: Interval | None = None
    latency_cv: NonNegative = 0.0
    pause_factor: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)] = 1.0
    pause_cv: NonNegative | None = None
    p50_ms: NonNegative | None = None
    p95_ms: NonNegative | None = None
    p99_ms: NonNegative | None = None
    p99_ms_interval: Interval | None = None
    overlapped_ms: NonNegative = 0.0
    throughput_rps: NonNegative
    throughput_rps_interval: Interval | None = None
    goodput_rps: NonNegative
    goodput_rps_interval: Interval | None = None
    utilization: NonNegative | None = None
    memory_bytes: Annotated[int, Field(ge=0)] | None = None
    source: str = ""
    creq: RequiredCompute | None = None
    mreq: RequiredMemory | None = None


class Replica(_MapElement):
    """One server of a model.

    ``sm_share_pct`` is the part of the partition for all ``processes`` together; ``rate_rps`` is the planned rate;
    ``batch_latency_ms`` is the predicted mean time of a batch of 1, 2, … ``batch`` requests, for the router and the
    simulator.

    Replicas of a partition with the same number of ``turns`` above 0 are the models of one worker: a process with one
    share and one context, which runs one batch at a time, in order of dispatch. Their batch times are without the
    waits for other batches, and the memory of the context is part of the first replica's. With ``time_slice_ms``,
    their batches run at once, as in Triton: in rotation, each for up to so long.
    """

    omitted_if_empty = ("turns", "time_slice_ms")

    model: str
    batch: Annotated[int, Field(ge=1, le=LARGEST_BATCH)]
    processes: Annotated[int, Field(ge=1, le=4096)] = 1
    sm_share_pct: Percent = 100.0
    memory_limit_bytes: Annotated[int, Field(ge=0)] | None = None
    max_wait_ms: NonNegative = 0.0
    rate_rps: NonNegative
    batch_latency_ms: tuple[NonNegative, ...] | None = None
    predicted: ReplicaPrediction
    turns: Annotated[int, Field(ge=0, le=4096)] = 0
    time_slice_ms: _TimeSlice | None = None


class MigInstance(_MapElement):
    """A MIG instance: its profile and the memory slice that it starts at."""

    profile: str
    start: Annotated[int, Field(ge=0)]


class Partition(_MapElement):
    """A MIG instance, or with ``mig`` null the whole device, and the replicas that share it.

    If ``unshared``, MPS restricts no replica to a share: all may use all SMs at the same time. If ``oversubscribed``,
    shares are ceilings that may add up to more than the device: replicas contend for its SMs.
    """

    omitted_if_empty = ("unshared", "oversubscribed")

    mig: MigInstance | None = None
    replicas: tuple[Replica, ...] = ()
    unshared: bool = False
    oversubscribed: bool = False


class Gpu(_MapElement):
    """One device of a node."""

    index: Annotated[int, Field(ge=0, le=65535)]
    device: str
    partitions: tuple[Partition, ...]


class Node(_MapElement):
    """A machine."""

    name: Name
    gpus: tuple[Gpu, ...]

    @field_validator("gpus")
    @classmethod
    def _require_distinct_indexes(cls, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        if twin := find_duplicate(gpu.index for gpu in gpus):
            raise ValueError(f"two devices have the index {twin}")
        return gpus


class ModelPrediction(_MapElement):
    """Prediction of a model over all its replicas."""

    goodput_rps: NonNegative
    p50_ms: NonNegative | None = None
    p95_ms: NonNegative | None = None
    p99_ms: NonNegative | None = None


class RequestedModel(_MapElement):
    """Demand for a model under its name for clients.

    ``source_model`` is the name in the kernel database, if different: several services may run one model. ``dims`` are
    the sizes of free dimensions in requests, or their distribution, as in slo.csv.
    """

    omitted_if_empty: ClassVar[tuple[str, ...]] = ("dims",)

    path: str | None = None
    sha256: str | None = None
    source_model: Name | None = None
    rate_rps: Positive
    slo_ms: Positive
    percentile: Annotated[float, Field(gt=0, lt=100)] = 99.0
    dims: str | None = None

    @field_validator("dims")
    @classmethod
    def _check_dims(cls, dims: str | None) -> str | None:
        try:
            return None if dims is None else str(parse_mix(dims))
        except InputError as error:
            raise ValueError(str(error)) from None


class DeployedModel(RequestedModel):
    """A model of the map.

    With ``members``, the file holds several models as one graph (USHER §3.4), planned and run as one model with the
    sum of their rates and the shortest of their SLOs. Clients use the members' names, which are also their names in the
    file. Sharing weights saves ``saved_weight_bytes`` relative to a copy for each member.
    """

    omitted_if_empty = ("dims", "members", "saved_weight_bytes")

    predicted: ModelPrediction | None = None
    members: dict[Name, RequestedModel] = Field(default_factory=dict)
    saved_weight_bytes: Annotated[int, Field(ge=0)] = 0

    @property
    def file(self) -> ModelFile:
        """The model's file, and the models in it."""
        return ModelFile(self.path, self.sha256, self.members, self.saved_weight_bytes)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Path of a model's file and its hash at profiling; the models in a merged file, and the weights they share."""

    path: str | None = None
    sha256: str | None = None
    members: Mapping[str, RequestedModel] = field(default_factory=dict)
    saved_weight_bytes: int = 0


class PlanAtEnds(_MapElement):
    """Plan at one end of the estimates' intervals: devices, a lower bound on their number, and the served requests/s.

    ``gpus`` is null if the search ran out of time.
    """

    gpus: Annotated[int, Field(ge=0)] | None = None
    served_rps: NonNegative
    lower_bound_gpus: Annotated[int, Field(ge=0)] | None = None


class MapPrediction(_MapElement):
    """Prediction of the whole map. Slack and fragmentation: ParvaGPU (SC'24) equations 3 and 4.

    Bounds hold for every map of the same demands on the same fleet; ``moves`` counts the replicas that must be
    started where the map that it was planned from is running. ``at_lower_ends`` and ``at_upper_ends`` tell what the
    same policy makes of the estimates at the ends of their intervals; null where it was not computed.
    """

    omitted_if_empty = ("at_lower_ends", "at_upper_ends")

    gpus: Annotated[int, Field(ge=0)]
    cost_per_hour: NonNegative | None = None
    goodput_rps: NonNegative
    internal_slack: NonNegative | None = None
    external_fragmentation: NonNegative | None = None
    lower_bound_gpus: Annotated[int, Field(ge=0)] | None = None
    lower_bound_cost_per_hour: NonNegative | None = None
    upper_bound_goodput_rps: NonNegative | None = None
    moves: Annotated[int, Field(ge=0)] | None = None
    at_lower_ends: PlanAtEnds | None = None
    at_upper_ends: PlanAtEnds | None = None


class Unplaced(_MapElement):
    """A demand, or the part of its rate, that no place was found for."""

    model: str
    rate_rps: NonNegative
    reason: str


class Chain(_MapElement):
    """Models that answer a request one after the other, under one SLO for the whole chain.

    The SLO of each step is its part of ``slo_ms``, and the rate of the chain is that of each step.
    """

    steps: Annotated[tuple[Name, ...], Field(min_length=2)]
    slo_ms: Positive
    percentile: Annotated[float, Field(gt=0, lt=100)] = 99.0


class DeploymentMap(_MapElement):
    """Everything that ``serve``, ``simulate`` and ``check`` need."""

    omitted_if_empty = ("chains",)

    schema_: Literal["gpuprof.deployment/1"] = Field("gpuprof.deployment/1", alias="schema")
    policy: str
    created: str | None = None
    planned_with: PlannedWith = PlannedWith()
    models: dict[Name, DeployedModel]
    nodes: tuple[Node, ...]
    predicted: MapPrediction
    unplaced: tuple[Unplaced, ...] = ()
    chains: dict[Name, Chain] = Field(default_factory=dict)

    @field_validator("nodes")
    @classmethod
    def _require_distinct_names(cls, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        if twin := find_duplicate(node.name for node in nodes):
            raise ValueError(f"two nodes are called {twin!r}")
        return nodes

    @field_validator("models")
    @classmethod
    def _require_distinct_clients(cls, models: dict[str, DeployedModel]) -> dict[str, DeployedModel]:
        if twin := find_duplicate([*models, *(name for model in models.values() for name in model.members)]):
            raise ValueError(f"two models are called {twin!r}")
        return models

    @model_validator(mode="after")
    def _require_steps(self) -> Self:
        steps = [step for chain in self.chains.values() for step in chain.steps]
        if twin := find_duplicate(steps):
            raise ValueError(f"{twin!r} is two steps of chains: name its services apart")
        if missing := [step for step in steps if step not in self.models]:
            raise ValueError(f"the chains have a step {missing[0]!r}, which is not among the map's models")
        if twin := find_duplicate([*self.chains, *self.requested]):
            raise ValueError(f"a chain and a model are called {twin!r}")
        return self

    @property
    def requested(self) -> dict[str, RequestedModel]:
        """Request for each model by its name for clients: the members in place of a merged model."""
        return {
            client: request
            for name, model in self.models.items()
            for client, request in (model.members or {name: model}).items()
        }

    @property
    def serving(self) -> dict[str, str]:
        """The model of the map that serves each name for clients: its own, or the merged model it is a member of."""
        return {client: name for name, model in self.models.items() for client in (model.members or {name: model})}

    @property
    def traffic(self) -> dict[str, RequestedModel]:
        """The demand of clients by name: `requested`, with each chain in place of its steps."""
        requested = self.requested
        steps = {step for chain in self.chains.values() for step in chain.steps}
        return {name: model for name, model in requested.items() if name not in steps} | {
            name: RequestedModel(
                rate_rps=requested[chain.steps[0]].rate_rps, slo_ms=chain.slo_ms, percentile=chain.percentile
            )
            for name, chain in self.chains.items()
        }

    @property
    def entries(self) -> dict[str, str]:
        """The model of the map that receives the requests of each name in `traffic`: of a chain, its first step."""
        serving = self.serving
        return {name: serving[self.chains[name].steps[0] if name in self.chains else name] for name in self.traffic}

    def places(self) -> Iterator[tuple[Node, Gpu, Partition, Replica]]:
        """Yield every replica with its node, GPU and partition, in the order of the file."""
        for node in self.nodes:
            for gpu in node.gpus:
                for partition in gpu.partitions:
                    for replica in partition.replicas:
                        yield node, gpu, partition, replica

    def change_replicas(self, change: Callable[[Gpu, Partition, Replica], Replica]) -> Self:
        """Return the map with each replica changed, in the order of the file."""
        nodes = []
        for node in self.nodes:
            gpus = []
            for gpu in node.gpus:
                changed = [tuple(change(gpu, part, replica) for replica in part.replicas) for part in gpu.partitions]
                pairs = zip(gpu.partitions, changed, strict=True)
                partitions = tuple(part.model_copy(update={"replicas": replicas}) for part, replicas in pairs)
                gpus.append(gpu.model_copy(update={"partitions": partitions}))
            nodes.append(node.model_copy(update={"gpus": tuple(gpus)}))
        return self.model_copy(update={"nodes": tuple(nodes)})

    def to_json(self) -> str:
        """Return the map as indented JSON with a final newline."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1, ensure_ascii=False) + "\n"


def share_of(partition: Partition, replica: Replica) -> Share:
    """Return the share of a replica in ``partition``."""
    return Share(replica.sm_share_pct, None if partition.mig is None else partition.mig.profile)


_MARK = "@"


@dataclass(frozen=True, slots=True)
class PublicName:
    """Name and version of a model for clients."""

    name: str
    version: str = "1"

    @classmethod
    def of(cls, model: str, path: str | None = None) -> PublicName:
        """Return the name and the version of a model of a map.

        Version 3 of ``resnet50`` is either ``resnet50@3``, or ``resnet50`` from ``…/resnet50/3/model.onnx``, the layout
        of model repositories; other models have version 1. ``model``: name in the map; ``path``: path of the file.

        Examples
        --------
        >>> PublicName.of("resnet50@3")
        PublicName(name='resnet50', version='3')
        >>> PublicName.of("resnet50", "models/resnet50/4/model.onnx").address
        '/v2/models/resnet50/versions/4'
        """
        name, mark, version = model.rpartition(_MARK)
        if mark and name and _is_version(version):
            return cls(name, version)
        folders = PurePath(path or "").parent.parts
        if len(folders) > 1 and folders[-2] == model and _is_version(folders[-1]):
            return cls(model, folders[-1])
        return cls(model)

    @property
    def address(self) -> str:
        """Path of this version in the Open Inference Protocol."""
        return f"/v2/models/{quote(self.name, safe='')}/versions/{quote(self.version, safe='')}"


def model_address(model: str) -> str:
    """Return the address of a map's model: of the version in its name, else of the newest version.

    Examples
    --------
    >>> model_address("resnet50")
    '/v2/models/resnet50'
    """
    public = PublicName.of(model)
    return f"/v2/models/{quote(model, safe='')}" if public.name == model else public.address


def version_order(version: str) -> tuple[int, str]:
    """Return a sort key for versions, from the oldest to the newest.

    Examples
    --------
    >>> sorted(["10", "9", "2"], key=version_order)
    ['2', '9', '10']
    """
    return (int(version), "") if version.isdigit() else (-1, version)


def _is_version(text: str) -> bool:
    # No leading zeros: 3 and 03 would be two addresses of the same version.
    return text.isascii() and text.isdigit() and len(text) < 10 and text == str(int(text))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a deployment map."""
    schema = DeploymentMap.model_json_schema(by_alias=True, mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **schema}


def read_map(path: Path) -> DeploymentMap:
    """Read a deployment map.

    Raises `InputError` when the file is not JSON, has another or a newer schema, or violates the schema.
    """
    try:
        text = read_input(path, "gpuprof place writes a map").decode("utf-8-sig")
        content = json.loads(text, object_pairs_hook=_require_distinct_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}", "gpuprof place writes a map") from None
    return parse_map(content, str(path))


def _require_distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises `ValueError` for a repeated key, whose value depends on the reader."""
    if (twin := find_duplicate(key for key, _ in pairs)) is not None:
        raise ValueError(f"the key {twin!r} occurs in one object twice")
    return dict(pairs)


def parse_map(content: object, where: str) -> DeploymentMap:
    """Return the map in decoded JSON; ``where`` names it in errors. Raises `InputError` as `read_map` does."""
    if not isinstance(content, dict) or not isinstance(content.get("schema"), str):
        raise InputError(f"{where} is not a deployment map: it has no schema", f'its "schema" must be "{SCHEMA}"')
    schema = content["schema"]
    name, _, version = schema.partition("/")
    current_name, _, newest = SCHEMA.partition("/")
    if name != current_name or not version.isdigit():
        raise InputError(f"{where} is not a deployment map: its schema is {schema!r}", f"expected {SCHEMA!r}")
    if int(version) > int(newest):
        raise InputError(f"{where} has schema {schema}, newer than {SCHEMA}", "update gpuprof to read it")
    try:
        # Strict mode: neither ``true`` nor a string of digits is accepted as a number.
        return DeploymentMap.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"{where}: {place}: {first['msg']}", "gpuprof place writes maps that keep the schema"
        ) from None


def write_map(deployment: DeploymentMap, path: Path) -> None:
    """Write the map atomically.

    Raises `InputError` when the directory is not writable.
    """
    with refuse_unwritable(path):
        write_atomically(path, deployment.to_json().encode())
