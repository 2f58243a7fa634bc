"""Published CSV tables with a model in each row: ParvaGPU's, Elvinger's thesis', iGniter's, Triton Model Analyzer's."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuprof.domain.catalogue import devices
from gpuprof.errors import InputError
from gpuprof.kernel_db.importers.source import Source
from gpuprof.kernel_db.schema import ColocationRow, ModelRow, RunRow, workload_label
from gpuprof.kernel_db.store import Run

#: Source, number and cells of a line → columns of ``models``.
ReadRow = Callable[[Source, int, Mapping[str, str]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A form of table, with the columns of its run."""

    collector: str
    notes: str
    header: tuple[str, ...]
    read_row: ReadRow
    device: str | None = None  #: Device of the publication; None: the file does not name its device.
    run: Mapping[str, str] = field(default_factory=dict)

    def recognizes(self, source: Source) -> bool:
        """Return whether ``source`` has the table's header."""
        return source.header() == self.header

    def read_runs(self, source: Source, device: str | None) -> Iterable[Run]:
        """Return the table as a run.

        Raises `InputError` when no device is given or known, or with the line number for an invalid number.
        """
        run = self.make_run(source, device)
        models = [
            ModelRow(run_id=run.run_id, device=run.device, **self.read_row(source, line, row))
            for line, row in source.rows()
        ]
        yield Run(run, models=models)

    def make_run(self, source: Source, device: str | None) -> RunRow:
        """Return the run of the table. Raises `InputError` when no device is given or known."""
        if (name := device or self.device) is None:
            raise InputError(f"{source.path} does not say which device it is of", "say so with --device")
        return source.run(name, self.collector, self.notes, **self.run)


#: MIG size in compute slices → the profile of an A100-80 that ParvaGPU measured.
_MIG_PROFILES = {1: "1g.10gb", 2: "2g.20gb", 3: "3g.40gb", 4: "4g.40gb", 7: "7g.80gb"}


def _read_parvagpu(source: Source, line: int, row: Mapping[str, str]) -> dict[str, Any]:
    size, batch, processes = (
        int(source.require_number(line, row, name)) for name in ("Mig instance", "Batch size", "Workload Number")
    )
    throughput = source.require_number(line, row, "Throughput")
    if size not in _MIG_PROFILES:
        raise InputError(f"{source.path}:{line}: MIG size {size} is none of {', '.join(map(str, _MIG_PROFILES))}")
    columns = {
        "model": source.path.stem,
        "batch": batch,
        "sm_share_pct": 100.0,
        "mig_profile": _MIG_PROFILES[size],
        "processes": processes,
    }
    if not throughput:
        return columns | {"error": "out of memory"}
    latency = source.finer_latency_ms(line, row, "Latency", "Throughput", batch=batch)
    return columns | {"latency_mean_ms": latency, "throughput_rps": throughput * processes}


PARVAGPU = CsvTable(
    "import:parvagpu",
    "latencies are as printed or batch over throughput, whichever has more digits; throughput is published of one "
    "process and multiplied here by their number; 0,0 means out of memory",
    ("Mig instance", "Batch size", "Workload Number", "Throughput", "Latency"),
    _read_parvagpu,
    "a100-80",
)


def _read_thesis(source: Source, line: int, row: Mapping[str, str]) -> dict[str, Any]:
    batch = int(source.require_number(line, row, "batch"))
    memory_pct = source.number(line, row, "mem_capacity_pct")
    memory_bytes = devices()["v100"].dram_bytes
    return {
        "model": row["model"],
        "batch": batch,
        "latency_mean_ms": source.finer_latency_ms(line, row, "latency_s", "throughput_rps", batch=batch),
        "throughput_rps": source.number(line, row, "throughput_rps"),
        "memory_peak_bytes": None if memory_pct is None else round(memory_pct / 100.0 * memory_bytes),
        "max_occupancy_pct": source.number(line, row, "achieved_occupancy_pct"),
        "wavg_occupancy_pct": source.number(line, row, "weighted_achieved_occupancy_pct"),
        "wavg_sm_util_pct": source.number(line, row, "weighted_sm_utilization_pct"),
    }


#: Tables A.1, 5.2 and 6.5: models on a V100 with the three metrics of Creq.
THESIS = CsvTable(
    "import:thesis",
    "latencies are as printed or batch over throughput, whichever has more digits; memory is published as a percentage "
    "of 16 GiB; empty fields are illegible in the published copy",
    (
        *("model", "batch", "latency_s", "throughput_rps", "mem_capacity_pct"),
        *("achieved_occupancy_pct", "weighted_achieved_occupancy_pct", "weighted_sm_utilization_pct"),
    ),
    _read_thesis,
    "v100",
    {"runtime": "pytorch", "runtime_version": "2.4"},
)


def _read_igniter(source: Source, line: int, row: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model": row["model"],
        "batch": int(source.require_number(line, row, "batch")),
        "sm_share_pct": source.require_number(line, row, "mps_share_pct"),
        "latency_mean_ms": source.require_number(line, row, "latency_ms"),
        "l2_pct": source.number(line, row, "l2_utilization_pct"),
        "dram_pct": source.number(line, row, "dram_utilization_pct"),
    }


_PAIRS = (
    *("pair", "model", "batch", "mps_share_pct", "latency_ms", "beside", "beside_batch", "beside_mps_share_pct"),
    *("solo_latency_ms", "l2_utilization_pct", "beside_l2_utilization_pct"),
    *("dram_utilization_pct", "beside_dram_utilization_pct"),
)


class ColocationTable(CsvTable):
    """iGniter's co-location measurements: models alone under MPS shares, and pairs of them."""

    def recognizes(self, source: Source) -> bool:
        """Return whether ``source`` has the header of either table."""
        return source.header() in (self.header, _PAIRS)

    def read_runs(self, source: Source, device: str | None) -> Iterable[Run]:
        """Return a table as a run. Raises `InputError` with the line number for a missing or invalid number."""
        if source.header() == self.header:
            yield from CsvTable.read_runs(self, source, device)
        else:
            run = self.make_run(source, device)
            yield Run(run, colocations=list(_read_pairs(source, run)))


def _read_pairs(source: Source, run: RunRow) -> Iterator[ColocationRow]:
    members: dict[int, int] = defaultdict(int)
    for line, row in source.rows():
        group = int(source.require_number(line, row, "pair"))
        beside_batch = int(source.require_number(line, row, "beside_batch"))
        beside_share = source.require_number(line, row, "beside_mps_share_pct")
        yield ColocationRow(
            run_id=run.run_id,
            device=run.device,
            group=group,
            member=members[group],
            beside=workload_label(row["beside"], beside_batch, beside_share, None, 1),
            solo_latency_mean_ms=source.number(line, row, "solo_latency_ms"),
            **_read_igniter(source, line, row),
        )
        members[group] += 1


IGNITER = ColocationTable(
    "import:igniter",
    "means of trtexec's end-to-end latency under MPS",
    ("model", "batch", "mps_share_pct", "latency_ms", "l2_utilization_pct", "dram_utilization_pct"),
    _read_igniter,
    "v100",
    {"runtime": "tensorrt"},
)

_THROUGHPUT = "Throughput (infer/sec)"
#: Column of the database → the analyzer's name.
_ANALYZED = {
    "throughput_rps": _THROUGHPUT,
    "latency_mean_ms": "Avg Latency (ms)",
    "latency_p95_ms": "p95 Latency (ms)",
    "latency_p99_ms": "p99 Latency (ms)",
    "power_w": "GPU Power Usage (W)",
}
_MEMORY = re.compile(r"(?:Max )?GPU Memory Usage \(MB\)")
_INSTANCES = re.compile(r"(?P<count>\d+)\s*[:/x]")


def _read_analyzed(source: Source, line: int, row: Mapping[str, str]) -> dict[str, Any]:
    memory = next(filter(_MEMORY.fullmatch, row), None)
    memory_mb = source.number(line, row, memory) if memory else None
    # "2:KIND_GPU" or "2/GPU"; without a number, one instance.
    instances = _INSTANCES.match(row.get("Instance Group", ""))
    return {
        "model": row["Model"],
        "batch": int(source.require_number(line, row, "Batch")),
        "processes": int(instances["count"]) if instances else 1,
        "memory_peak_bytes": None if memory_mb is None else round(memory_mb * 1e6),
        **{column: source.number(line, row, name) for column, name in _ANALYZED.items() if name in row},
    }


class AnalyzerTable(CsvTable):
    """Tables of Triton Model Analyzer: of inferences, and of the GPU's metrics over the same time."""

    def recognizes(self, source: Source) -> bool:
        """Return whether ``source`` has the columns common to the analyzer's tables."""
        header = source.header()
        return set(self.header) <= set(header) and (_THROUGHPUT in header or any(map(_MEMORY.fullmatch, header)))


MODEL_ANALYZER = AnalyzerTable(
    "import:model-analyzer",
    "latencies are a client's, queueing at its concurrency included; the batch is the client's; CPU and GPU memory "
    "are the server's",
    ("Model", "Batch"),
    _read_analyzed,
    run={"runtime": "triton"},
)
