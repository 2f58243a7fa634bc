"""Tables of the kernel database: a dataclass per table, from which its Arrow schema is derived.

Every row belongs to a run (``run_id``). Column names carry their units. None (null) means not measured, zero means
measured as zero. A batch has ``batch`` requests; a share is ``sm_share_pct`` percent of the device, or of its MIG
instance ``mig_profile``. ``dims`` gives the sizes of a model's free dimensions other than the batch, as
``"height=224,width=224"``; null: no such dimensions, or not recorded. Figures of models, ops, kernels and co-locations
belong to a runtime (``runtime``: ``"onnxruntime"``, ``"pytorch"``), a way of execution (``execution``: ``"fused"``,
``"eager"``) and the arithmetic of most FLOPs (``precision``: ``"float32"``, ``"tf32"``, …); null: unknown.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:  # imported on use: not needed without a database
    import pyarrow as pa

#: Version of the tables below, stored in every file; `gpuprof.kernel_db.store` upgrades older files.
SCHEMA_VERSION = 6
VERSION_KEY = b"gpuprof.kernel_db"


@dataclass(frozen=True, slots=True)
class RunRow:
    """Provenance of a run: a workload measured once, by a collector, under a set of conditions."""

    run_id: str  #: Sorts by time of start.
    started_at: datetime  #: Start time with a time zone.
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
    #: Neighbours, as written by `gpuprof.kernel_db.schema.workload_label` and joined by ``" + "``.
    beside: str | None = None
    duration_s: float | None = None  #: Wall-clock time that measuring took.
    host: str | None = None
    driver: str | None = None
    clocks_policy: str | None = None  #: Clock policy: ``"locked:1410"``, ``"base"``, ``"none"``.
    #: ``runtime``, ``runtime_version``, ``provider``, ``precision``: ``"onnxruntime"``, its version, execution
    #: provider, type of the arithmetic (``"float32"``).
    runtime: str | None = None
    runtime_version: str | None = None
    provider: str | None = None
    precision: str | None = None
    collector_version: str | None = None
    gpuprof_version: str | None = None
    command: str | None = None  #: Command line that started the run.
    settings: str | None = None  #: JSON object of further measurement settings: session options, threads, arena.
    #: ``source``, ``source_sha256``: File and its hash, for a run that was imported; None: measured by gpuprof itself.
    source: str | None = None
    source_sha256: str | None = None
    #: Caveats for readers of these figures: nodes not tied to ops, rows without a match.
    notes: str | None = None
    dims: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A device as seen by a run: its data; for a CPU, the ceilings measured under a share.

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
    #: JSON list of pairs, ascending: size of a repeatedly read and written working set in bytes, and its bytes per
    #: second.
    reread_bytes_per_s: str | None = None
    l2_bytes: int | None = None
    compute_capability: str | None = None
    max_power_w: float | None = None
    idle_power_w: float | None = None
    #: ``pcie_bytes_per_s``, ``pcie_d2h_bytes_per_s``: Rate of copies of a mebibyte or more, host to device and device
    #: to host.
    pcie_bytes_per_s: float | None = None
    pcie_d2h_bytes_per_s: float | None = None
    #: Kind of host memory copied: ``"pinned"`` or ``"pageable"``; None: unknown to the tool.
    pcie_memory: str | None = None
    #: ``request_ms``, ``request_ms_per_mib``: Time that serving adds to a request outside the model, and more for each
    #: MiB of its inputs.
    request_ms: float | None = None
    request_ms_per_mib: float | None = None
    handover_ms: float | None = None  #: Part of `request_ms` that delays the worker's next batch.
    #: ``host_ms``, ``host_ms_per_mib``: CPU time of router, machine process and client for a request, and more for each
    #: MiB of its inputs.
    host_ms: float | None = None
    host_ms_per_mib: float | None = None
    host_ms_busy: float | None = None  #: The same as `host_ms`, but at 600 requests/s instead of 60.
    measured: bool = False  #: Rates are measured; False: read from a data sheet.
    source: str | None = None  #: Method of measurement, or data sheet.


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model at a batch size under a share of a device: latency, throughput and resource use.

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
    #: Concurrent copies in the share; latencies are of a single copy, ``throughput_rps`` of all.
    processes: int = 1
    model_sha256: str | None = None
    model_path: str | None = None
    #: The confidence interval of the median latency is within 2%; None: unknown (imported).
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
    #: Peak memory of a process, loading included, above an idle process with the runtime loaded (Mreq).
    memory_peak_bytes: int | None = None
    memory_held_bytes: int | None = None  #: The same after warm-up, once loading has released its memory.
    weight_bytes: int | None = None  #: Weights of the model, part of the above.
    input_bytes: int | None = None  #: Bytes of a batch's inputs.
    flops: int | None = None
    #: SMs granted to each process; under MPS, the SMs of its percentage.
    client_sms: int | None = None
    #: CPU time used, percent of the share's cores, with batches running back to back.
    cpu_utilization_pct: float | None = None
    #: Time that threads were ready but waited for a core that other programs had, percent of the share's cores.
    cpu_wait_pct: float | None = None
    power_w: float | None = None
    idle_power_w: float | None = None
    clock_mhz: float | None = None
    #: ``max_occupancy_pct``, ``wavg_occupancy_pct``, ``wavg_sm_util_pct``: The three metrics of Creq: maximum achieved
    #: occupancy, its time-weighted average (WAO), time-weighted SM utilisation (WSM); thesis section 5.3.
    max_occupancy_pct: float | None = None
    wavg_occupancy_pct: float | None = None
    wavg_sm_util_pct: float | None = None
    #: Column of ``kernels`` behind the occupancies: ``"achieved_occupancy_pct"`` (counted) or
    #: ``"launch_occupancy_pct"`` (estimated from launches); null: unknown. WSM is always computed from launches.
    occupancy_source: str | None = None
    #: ``l2_pct``, ``dram_pct``: Mean use of the L2 cache's and the DRAM's bandwidth, percent of peak.
    l2_pct: float | None = None
    dram_pct: float | None = None
    #: ``h2d_bytes``, ``d2h_bytes``: Bytes copied to and from the device per batch.
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    kernel_count: int | None = None
    #: Part of a batch's time in which the device waits for launches (iGniter's scheduling delay).
    dispatch_ms: float | None = None
    #: ``node_time_ms``, ``untied_time_ms``: Sum of the mean times of the nodes executed by the runtime, and its part
    #: not tied to any op of the model. ``latency_mean_ms`` beyond this sum is the runtime's own time.
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
    position: int  #: Position in the topological order of the model's graph.
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
    #: Nodes of the model fused with this op by the runtime; their common time stands at the op with the most FLOPs.
    fused: int = 1
    #: ``duration_mean_ns``, ``duration_p50_ns``, ``duration_min_ns``: Time of an execution; None: no executed node
    #: could be tied to this op.
    duration_mean_ns: int | None = None
    duration_p50_ns: int | None = None
    duration_min_ns: int | None = None
    repeats: int | None = None
    runtime: str | None = None
    execution: str | None = None
    precision: str | None = None
    note: str | None = None  #: Names of the nodes fused into this op, or of the op into which this node was fused.
    dims: str | None = None


@dataclass(frozen=True, slots=True)
class KernelRow:
    """An execution of a kernel; on a CPU, the runtime's execution of a node."""

    run_id: str
    model: str
    device: str
    batch: int
    name: str  #: Demangled name as reported by the tool.
    position: int  #: Launch order within a repeat.
    repeat: int = 0  #: Number of the model's execution.
    sm_share_pct: float = 100.0
    mig_profile: str | None = None
    #: ``op_signature``, ``op_type``, ``op_name``: Node that launched the kernel; None: could not be tied.
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
    #: For a grid smaller than the device, far below the counted figure, which excludes idle SMs.
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
    #: Source after joining a timeline with counters: ``"both"``, or ``"timeline"`` or ``"counters"`` for a kernel in
    #: only one source.
    joined: str | None = None


@dataclass(frozen=True, slots=True)
class ColocationRow:
    """A workload measured together with others on a device; all rows of the group share its ``run_id``."""

    run_id: str
    device: str
    group: int  #: Number of the group within the run.
    member: int  #: Position in the group; the first is the requested workload.
    model: str
    batch: int
    beside: str  #: Neighbours, as written by `workload_label` and joined by ``" + "``.
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
    #: Mean latency of the same workload alone, if measured in the same run.
    solo_latency_mean_ms: float | None = None
    client_sms: int | None = None  #: See ``models``.
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


#: Lower bounds of columns, valid for every measurement: a smaller value means a damaged or forged file.
LEAST: Mapping[str, int] = types.MappingProxyType({"batch": 1, "processes": 1, "repeat": 0, "position": 0})


def find_impossible(rows: pa.Table) -> str | None:
    """Return a description of the first impossible value, such as a batch below one; None: all values are possible."""
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
    rows = list(rows)  # column by column: a dictionary per row takes ten times as long
    columns = [pa.array([getattr(row, field.name) for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def from_arrow(table: str, content: pa.Table) -> list[Row]:
    """Return the rows of an Arrow table of ``table`` as dataclasses; columns unknown to them are left out."""
    row_type = TABLES[table]
    columns = [name for name in content.column_names if name in {field.name for field in fields(row_type)}]
    return [row_type(**row) for row in content.select(columns).to_pylist()]


def model_at_dims(model: str, dims: str | None) -> str:
    """Return the name of a model at the sizes of a row: ``"bert[seq=64]"``, or the plain name without sizes."""
    return f"{model}[{dims}]" if dims else model


def workload_label(model: str, batch: int, sm_share_pct: float, mig_profile: str | None, processes: int) -> str:
    """Return ``"resnet50:8:50%"``, with suffix ``"x2"`` for two processes, as stored in ``beside`` columns."""
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
