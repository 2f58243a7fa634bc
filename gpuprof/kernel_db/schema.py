"""Tables of the kernel database: one dataclass a table, from which its Arrow schema is derived.

Every row hangs on a run by ``run_id``. Units are in the names of columns. None (null) means not measured, zero
means measured as zero. A batch has ``batch`` requests; a share is ``sm_share_pct`` percent of the device, or of
its MIG instance ``mig_profile``. ``dims`` says at which sizes of its free dimensions beside the batch a model ran, as
``"height=224,width=224"``; null: it has none, or they were not recorded. Figures of models, ops, kernels and
co-locations are of one runtime (``runtime``: ``"onnxruntime"``, ``"pytorch"``), one way to execute (``execution``:
``"fused"``, ``"eager"``) and the arithmetic of most FLOPs (``precision``: ``"float32"``, ``"tf32"``, …); null: not
known.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:  # imported where it is used: whoever has no database does without
    import pyarrow as pa

#: Version of the tables below, kept in every file; `gpuprof.kernel_db.migration` brings older files up to it.
SCHEMA_VERSION = 5
VERSION_KEY = b"gpuprof.kernel_db"
#: Stands for the model in rows of ops that were measured by themselves, for all models that have them.
PER_OP = "(per op)"


@dataclass(frozen=True, slots=True)
class RunRow:
    """Provenance of one run: one workload measured once, by one collector, under one set of conditions."""

    run_id: str  #: Sorts by time of start.
    started_at: datetime  #: With a time zone.
    #: ``device``, ``host``, ``driver``: Device by its name in the catalogue (a CPU: by `gpuprof.machine.cpu`),
    #: host's name, driver's version.
    device: str
    collector: str
    model: str
    model_sha256: str | None = None
    model_path: str | None = None
    #: ``batch``, ``dims``, ``sm_share_pct``, ``mig_profile``, ``processes``: The workload.
    batch: int | None = None
    sm_share_pct: float | None = None
    mig_profile: str | None = None
    processes: int | None = None
    #: What ran beside it, as `gpuprof.kernel_db.schema.workload_label` writes it, joined by ``" + "``.
    beside: str | None = None
    duration_s: float | None = None  #: Wall-clock time that measuring took.
    host: str | None = None
    driver: str | None = None
    clocks_policy: str | None = None  #: How the clocks were held: ``"locked:1410"``, ``"base"``, ``"none"``.
    #: ``runtime``, ``runtime_version``, ``provider``, ``precision``: ``"onnxruntime"``, its version, execution
    #: provider, type of the arithmetic (``"float32"``).
    runtime: str | None = None
    runtime_version: str | None = None
    provider: str | None = None
    precision: str | None = None
    collector_version: str | None = None
    gpuprof_version: str | None = None
    command: str | None = None  #: The command line that asked for it.
    settings: str | None = None  #: JSON object of what else decides the figures: session options, threads, arena.
    #: ``source``, ``source_sha256``: File and its hash, for a run that was imported; None: measured by gpuprof itself.
    source: str | None = None
    source_sha256: str | None = None
    #: What a reader must know of these figures: nodes that could not be tied, rows that did not match.
    notes: str | None = None
    dims: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A device as a run saw it: its numbers, for a CPU the ceilings measured under a share of it.

    Attributes
    ----------
    float32_flops_per_s and its like : float or None
        Peak rate by type of arithmetic.
    """

    run_id: str
    device: str
    kind: str
    compute_units: int | None = None
    sm_share_pct: float = 100.0  #: Share under which the ceilings were measured; 100: the whole device.
    clock_mhz: float | None = None
    float32_flops_per_s: float | None = None
    tfloat32_flops_per_s: float | None = None
    float16_flops_per_s: float | None = None
    bfloat16_flops_per_s: float | None = None
    int8_flops_per_s: float | None = None
    float8_flops_per_s: float | None = None
    float4_flops_per_s: float | None = None
    float64_flops_per_s: float | None = None
    dram_bytes: int | None = None
    dram_bytes_per_s: float | None = None
    #: JSON list of pairs, ascending: so many bytes, read and written again and again, at so many bytes per second.
    reread_bytes_per_s: str | None = None
    l2_bytes: int | None = None
    compute_capability: str | None = None
    max_power_w: float | None = None
    idle_power_w: float | None = None
    #: ``pcie_bytes_per_s``, ``pcie_d2h_bytes_per_s``: What copies of a mebibyte or more from the host to the device
    #: achieved, and those back.
    pcie_bytes_per_s: float | None = None
    pcie_d2h_bytes_per_s: float | None = None
    #: Of which host memory: ``"pinned"`` or ``"pageable"``; None: the tool does not say.
    pcie_memory: str | None = None
    #: ``request_ms``, ``request_ms_per_mib``: Time that serving adds to a request outside the model, and more for each
    #: MiB of its inputs.
    request_ms: float | None = None
    request_ms_per_mib: float | None = None
    handover_ms: float | None = None  #: Of it, for which the worker is kept from the next batch.
    #: ``host_ms``, ``host_ms_per_mib``: CPU time of router, machine process and client for a request, and more for each
    #: MiB of its inputs.
    host_ms: float | None = None
    host_ms_per_mib: float | None = None
    host_ms_busy: float | None = None  #: The former at 600 requests/s, where `host_ms` is at 60.
    measured: bool = False  #: Whether the rates are measured, or read from a data sheet.
    source: str | None = None  #: How they were measured, or where they were read.


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model at one batch size under one share of one device: its latency and throughput, and the resources it uses.

    Attributes
    ----------
    latency_mean_ms and its like : float or None
        Time of one batch, alone in its process, without queueing.
    """

    run_id: str
    model: str
    device: str
    batch: int
    sm_share_pct: float = 100.0
    mig_profile: str | None = None
    #: Copies that ran at once in the share; latencies are of one of them, ``throughput_rps`` of all.
    processes: int = 1
    model_sha256: str | None = None
    model_path: str | None = None
    #: Whether the confidence interval of the median latency is within 2%; None: not known (imported).
    stable: bool | None = None
    repeats: int | None = None  #: Batches timed.
    latency_mean_ms: float | None = None
    latency_std_ms: float | None = None
    latency_p50_ms: float | None = None
    latency_p95_ms: float | None = None
    latency_p99_ms: float | None = None
    #: ``latency_paused_mean_ms``, ``latency_paused_std_ms``: Time of a batch that follows a pause, three times as
    #: long as itself on average (in older databases: as long as itself), with inputs that no cache holds.
    latency_paused_mean_ms: float | None = None
    latency_paused_std_ms: float | None = None
    latency_p50_low_ms: float | None = None
    latency_p50_high_ms: float | None = None
    throughput_rps: float | None = None
    #: Peak memory of one process above an idle one with the runtime loaded (Mreq); loading is included.
    memory_peak_bytes: int | None = None
    memory_held_bytes: int | None = None  #: The same after warm-up, when what loading needed has been given back.
    weight_bytes: int | None = None  #: Weights of the model, part of the above.
    input_bytes: int | None = None  #: Inputs of one batch.
    flops: int | None = None
    #: SMs of a GPU that each process was given: under MPS the part that its percentage is.
    client_sms: int | None = None
    #: CPU time taken, percent of the share's cores, while batches ran back to back.
    cpu_utilization_pct: float | None = None
    power_w: float | None = None
    idle_power_w: float | None = None
    clock_mhz: float | None = None
    #: ``max_occupancy_pct``, ``wavg_occupancy_pct``, ``wavg_sm_util_pct``: The three metrics of Creq: maximum achieved
    #: occupancy, its time-weighted average (WAO), time-weighted SM utilisation (WSM); thesis section 5.3.
    max_occupancy_pct: float | None = None
    wavg_occupancy_pct: float | None = None
    wavg_sm_util_pct: float | None = None
    #: Column of ``kernels`` that the occupancies stand on: ``"achieved_occupancy_pct"`` (counted) or
    #: ``"launch_occupancy_pct"`` (estimated from launches); null: not known. WSM always stands on launches.
    occupancy_source: str | None = None
    #: ``l2_pct``, ``dram_pct``: Mean use of the L2 cache's and the DRAM's bandwidth, percent of peak.
    l2_pct: float | None = None
    dram_pct: float | None = None
    #: ``h2d_bytes``, ``d2h_bytes``: Copied to and from the device for one batch.
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    kernel_count: int | None = None
    #: Part of one batch's time in which the device waits for launches (iGniter's scheduling delay).
    dispatch_ms: float | None = None
    #: ``node_time_ms``, ``untied_time_ms``: Sum of the mean times of the nodes that the runtime executed, and the part
    #: of it that belongs to no op of the model. What ``latency_mean_ms`` has beyond is the runtime's own.
    node_time_ms: float | None = None
    untied_time_ms: float | None = None
    runtime: str | None = None
    execution: str | None = None
    precision: str | None = None
    error: str | None = None  #: Why the figures are missing; the attempt is remembered.
    dims: str | None = None


@dataclass(frozen=True, slots=True)
class OpRow:
    """A node of a model and its time under the run's conditions."""

    run_id: str
    model: str
    device: str
    batch: int
    position: int  #: In the topological order of the model's graph; 0 in a per-op run.
    name: str
    op_type: str
    signature: str  #: `gpuprof.domain.model.Op.signature`: equal signatures cost the same.
    sm_share_pct: float = 100.0
    mig_profile: str | None = None
    model_sha256: str | None = None
    shapes: str | None = None  #: ``"1x3x224x224,64x3x7x7->1x64x112x112"``.
    dtype: str | None = None
    attributes: str | None = None  #: JSON object of the node's attributes.
    flops: int | None = None
    bytes_read: int | None = None
    bytes_written: int | None = None
    weight_bytes: int | None = None
    #: Nodes of the model that the runtime ran as one; the time is of all, and stands at the one with the most FLOPs.
    fused: int = 1
    #: ``duration_mean_ns``, ``duration_p50_ns``, ``duration_min_ns``: Of one execution; None: the runtime did not
    #: execute a node that could be tied to this one.
    duration_mean_ns: int | None = None
    duration_p50_ns: int | None = None
    duration_min_ns: int | None = None
    repeats: int | None = None
    runtime: str | None = None
    execution: str | None = None
    precision: str | None = None
    note: str | None = None  #: Which other nodes were fused into it, or where this one went.
    dims: str | None = None


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One execution of one kernel; on a CPU a kernel is the execution of a node by the runtime."""

    run_id: str
    model: str
    device: str
    batch: int
    name: str  #: Demangled, as the tool gave it.
    position: int  #: Order of launch within one repeat.
    repeat: int = 0  #: Which execution of the model it belongs to.
    sm_share_pct: float = 100.0
    mig_profile: str | None = None
    #: ``op_signature``, ``op_type``, ``op_name``: The node that caused it; None: it could not be tied to one.
    op_signature: str | None = None
    op_type: str | None = None
    op_name: str | None = None
    start_ns: int | None = None  #: Since the first kernel of the run.
    duration_ns: int | None = None
    process_id: int | None = None
    stream_id: int | None = None
    grid_x: int | None = None
    grid_y: int | None = None
    grid_z: int | None = None
    block_x: int | None = None
    block_y: int | None = None
    block_z: int | None = None
    registers_per_thread: int | None = None
    static_shared_bytes: int | None = None
    dynamic_shared_bytes: int | None = None
    achieved_occupancy_pct: float | None = None  #: Counted: warps per active cycle of an SM, percent of its most.
    #: Estimated from the launch: warps of the grid, percent of all SMs' warps, at most ``theoretical_occupancy_pct``.
    #: Of a grid smaller than the device it is far below the counted figure, which leaves idle SMs out.
    launch_occupancy_pct: float | None = None
    theoretical_occupancy_pct: float | None = None  #: Most that registers, shared memory and block size allow.
    waves_per_sm: float | None = None
    #: ``sm_throughput_pct``, ``sm_active_pct``, ``dram_throughput_pct``, ``l2_throughput_pct``, ``l2_hit_pct``:
    #: Counters, percent of peak per elapsed cycle.
    sm_throughput_pct: float | None = None
    sm_active_pct: float | None = None
    dram_throughput_pct: float | None = None
    l2_throughput_pct: float | None = None
    l2_hit_pct: float | None = None
    dram_read_bytes: int | None = None
    dram_write_bytes: int | None = None
    instruction_count: int | None = None
    runtime: str | None = None
    execution: str | None = None
    precision: str | None = None
    #: Where a timeline and counters were joined: ``"both"``, ``"timeline"`` or ``"counters"`` for a kernel that only
    #: one of them has.
    joined: str | None = None


@dataclass(frozen=True, slots=True)
class ColocationRow:
    """One of several workloads that ran at once on one device; all rows of the group have its ``run_id``."""

    run_id: str
    device: str
    group: int  #: Which group of the run.
    member: int  #: Position in the group; the first is the one that was asked about.
    model: str
    batch: int
    beside: str  #: The others, as `workload_label` writes them, joined by ``" + "``.
    sm_share_pct: float = 100.0
    mig_profile: str | None = None
    processes: int = 1
    model_sha256: str | None = None
    stable: bool | None = None
    repeats: int | None = None
    latency_mean_ms: float | None = None
    latency_std_ms: float | None = None
    latency_p50_ms: float | None = None
    latency_p95_ms: float | None = None
    latency_p99_ms: float | None = None
    throughput_rps: float | None = None
    #: The same workload's mean latency alone, where it was measured in the same run.
    solo_latency_mean_ms: float | None = None
    client_sms: int | None = None  #: As in ``models``.
    power_w: float | None = None
    clock_mhz: float | None = None
    l2_pct: float | None = None
    dram_pct: float | None = None
    dispatch_ms: float | None = None
    runtime: str | None = None
    execution: str | None = None
    precision: str | None = None
    error: str | None = None
    dims: str | None = None


Row = RunRow | DeviceRow | ModelRow | OpRow | KernelRow | ColocationRow

#: Table → the dataclass of its rows.
TABLES: Mapping[str, type[Row]] = types.MappingProxyType(
    {
        "runs": RunRow,
        "devices": DeviceRow,
        "models": ModelRow,
        "ops": OpRow,
        "kernels": KernelRow,
        "colocations": ColocationRow,
    }
)


@cache
def arrow_schema(table: str) -> pa.Schema:
    """Return the Arrow schema of ``table``: a column for each field of its dataclass, and the version."""
    import pyarrow as pa

    row_type = TABLES[table]
    hints = get_type_hints(row_type)
    columns = [_arrow_field(field.name, hints[field.name]) for field in fields(row_type)]
    return pa.schema(columns, metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()})


#: What a column holds at least, whatever was measured: anything less is a damaged or forged file.
LEAST: Mapping[str, int] = types.MappingProxyType({"batch": 1, "processes": 1, "repeat": 0, "position": 0})


def find_impossible(rows: pa.Table) -> str | None:
    """Return in words the first value that no measurement can give, such as a batch below one; None: there is none."""
    import pyarrow.compute as pc

    for name, least in LEAST.items():
        if name in rows.column_names and rows.num_rows:
            smallest = pc.min(rows.column(name)).as_py()
            if smallest is not None and smallest < least:
                return f"{name} must be at least {least} but is {smallest}"
    return None


def to_arrow(table: str, rows: Iterable[Row]) -> pa.Table:
    """Return ``rows`` as an Arrow table with the schema of ``table``."""
    import pyarrow as pa

    schema = arrow_schema(table)
    rows = list(rows)  # column by column: a dictionary for each row takes ten times as long
    columns = [pa.array([getattr(row, field.name) for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def from_arrow(table: str, content: pa.Table) -> list[Row]:
    """Return the rows of an Arrow table of ``table`` as dataclasses; columns unknown to them are left out."""
    row_type = TABLES[table]
    known = [name for name in content.column_names if name in {field.name for field in fields(row_type)}]
    return [row_type(**row) for row in content.select(known).to_pylist()]


def model_at_dims(model: str, dims: str | None) -> str:
    """Return the name by which a model at the sizes of a row goes: ``"bert[seq=64]"``, alone where there are none."""
    return f"{model}[{dims}]" if dims else model


def workload_label(model: str, batch: int, sm_share_pct: float, mig_profile: str | None, processes: int) -> str:
    """Return ``"resnet50:8:50%"``, with ``"x2"`` behind it for two processes, as ``beside`` columns hold it."""
    share = f"{sm_share_pct:g}%" if mig_profile is None else f"{mig_profile}/{sm_share_pct:g}%"
    return f"{model}:{batch}:{share}" + (f"x{processes}" if processes > 1 else "")


def _arrow_field(name: str, hint: Any) -> pa.Field:
    import pyarrow as pa

    arrow = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    arrow[datetime] = pa.timestamp("us", "UTC")
    if get_origin(hint) in (types.UnionType, Union):
        kind = next(part for part in get_args(hint) if part is not type(None))
        return pa.field(name, arrow[kind])
    return pa.field(name, arrow[hint], nullable=False)
