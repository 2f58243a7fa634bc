"""Writes SQLite files as ``nsys export`` does: the schema of 2022.4 (3.0.0), and one of 2024 with its new names."""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

VM = 1 << 48
RUNTIME, NVTX, KERNEL, MEMCPY = (
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
)
_KERNEL = [
    "start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "demangledName",
    "shortName", "mangledName", "launchType", "cacheConfig", "registersPerThread", "gridX", "gridY", "gridZ",
    "blockX", "blockY", "blockZ", "staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread",
    "localMemoryTotal", "gridId", "sharedMemoryExecuted", "graphNodeId", "sharedMemoryLimitConfig",
]  # fmt: skip
_NEW_KERNEL = [*_KERNEL, "clusterX", "clusterY", "clusterZ", "somethingNobodyKnows"]
_RUNTIME = ["start", "end", "eventClass", "globalTid", "correlationId", "nameId", "returnValue", "callchainId"]
_MEMCPY = [
    "start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "bytes", "copyKind",
    "srcKind", "dstKind",
]  # fmt: skip
_GPU = ["computeMajor", "computeMinor", "smCount", "totalMemory", "memoryBandwidth", "clockRate", "l2CacheSize"]
_NVTX = [
    "start", "end", "eventType", "rangeId", "category", "color", "text", "globalTid", "endGlobalTid", "textId",
    "domainId",
]  # fmt: skip


@dataclass
class Export:
    """What is to stand in the file; ids are made as kernels are launched."""

    rows: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    strings: dict[str, int] = field(default_factory=dict)

    def add(self, table: str, **row: object) -> None:
        self.rows.setdefault(table, []).append(row)

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def range(
        self, name: str, start: int, end: int | None, pid: int = 7, tid: int = 7, registered: bool = False
    ) -> None:
        named = {"textId": self.string(name)} if registered else {"text": name}
        self.add(NVTX, start=start, end=end, eventType=59, globalTid=_global(pid, tid), domainId=0, **named)

    def kernel(
        self,
        name: str,
        launched: int,
        start: int,
        end: int,
        correlation: int,
        pid: int = 7,
        tid: int = 7,
        grid: tuple[int, int, int] = (80, 1, 1),
        block: tuple[int, int, int] = (256, 1, 1),
        **more: object,
    ) -> None:
        """A kernel and the call that launched it."""
        self.call(launched, correlation, pid, tid)
        shape = dict(zip(("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"), (*grid, *block), strict=True))
        self.add(
            KERNEL,
            start=start,
            end=end,
            contextId=1,
            streamId=7,
            correlationId=correlation,
            globalPid=_global(pid, 0),
            demangledName=self.string(f"void {name}(float*)"),
            shortName=self.string(name),
            **{"deviceId": 0, "registersPerThread": 32, "staticSharedMemory": 0, "dynamicSharedMemory": 0}
            | shape
            | more,
        )

    def call(self, start: int, correlation: int, pid: int = 7, tid: int = 7) -> None:
        self.add(
            RUNTIME,
            start=start,
            end=start + 2,
            globalTid=_global(pid, tid),
            correlationId=correlation,
            nameId=self.string("cudaLaunchKernel_v7000"),
            returnValue=0,
        )

    def copy(
        self, start: int, bytes_: int, kind: int, correlation: int, pid: int = 7, tid: int = 7, **more: object
    ) -> None:
        self.call(start, correlation, pid, tid)
        self.add(
            MEMCPY,
            start=start,
            end=more.pop("end", start + 10),
            correlationId=correlation,
            globalPid=_global(pid, 0),
            **{"bytes": bytes_, "copyKind": kind, **more},
        )

    def write(self, path: Path, new: bool = False, drop: Mapping[str, Sequence[str]] | None = None) -> Path:
        """Write the file; tables appear only where they have rows, as nsys does.

        ``drop``: columns that this version does not have.
        """
        columns = {
            KERNEL: _NEW_KERNEL if new else _KERNEL,
            RUNTIME: _RUNTIME,
            MEMCPY: _MEMCPY,
            NVTX: _NVTX,
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ["start", "end", "deviceId", "correlationId", "globalPid", "graphId"],
            "CUPTI_ACTIVITY_KIND_MEMSET": ["start", "end", "deviceId", "correlationId", "globalPid", "bytes"],
            "CUDA_UM_CPU_PAGE_FAULT_EVENTS": ["start", "end"],
            "TARGET_INFO_GPU": ["id", "cuDevice", "name", *_GPU] if new else ["id", "name"],
            "TARGET_INFO_CUDA_DEVICE": ["gpuId", "cudaId", "pid"],
        }
        path.unlink(missing_ok=True)
        with sqlite3.connect(path) as connection:
            meta = "META_DATA_EXPORT" if new else "EXPORT_META_DATA"
            _table(connection, meta, ["name", "value"], _about(new))
            strings = ({"id": id_, "value": text} for text, id_ in self.strings.items())
            _table(connection, "StringIds", ["id", "value"], strings)
            for table, rows in self.rows.items():
                left = [name for name in columns[table] if name not in (drop or {}).get(table, ())]
                _table(connection, table, left, rows)
        connection.close()
        return path


def two_runs(kernels: int = 3) -> Export:
    """Two marked runs of a few kernels, each with a copy in and one out, after a warm-up that is not marked."""
    export, pid = Export(), 7
    export.add("TARGET_INFO_GPU", id=0, cuDevice=0, name="Tesla V100-SXM2-16GB")
    export.kernel("warm", 10, 20, 40, 1, pid)
    for run in range(2):
        origin = 1000 * (run + 1)
        export.range("gpuprof-run", origin, origin + 900, pid, pid)
        export.copy(origin + 1, 4096, 1, 100 * run + 50, pid)
        for turn in range(kernels):
            begin = origin + 50 + 100 * turn
            name = f"k{turn % 2}"
            export.kernel(name, begin - 20, begin, begin + 60, 100 * run + 10 + turn, pid, grid=(80 + turn, 1, 1))
        export.copy(origin + 600, 64, 2, 100 * run + 51, pid)
    return export


def _global(pid: int, tid: int) -> int:
    return VM | pid << 24 | tid


def _about(new: bool) -> list[dict[str, object]]:
    product, schema = ("2024.6.1.90", "3.16.0") if new else ("2022.4.2.1", "3.0.0")
    return [
        {"name": "EXPORT_PRODUCT_NAME", "value": "NVIDIA Nsight Systems"},
        {"name": "EXPORT_PRODUCT_VERSION", "value": product},
        {"name": "EXPORT_SCHEMA_VERSION", "value": schema},
    ]


def _table(
    connection: sqlite3.Connection, name: str, columns: Sequence[str], rows: Iterable[Mapping[str, object]]
) -> None:
    listed = ", ".join(f'"{column}"' for column in columns)
    connection.execute(f'CREATE TABLE "{name}" ({listed})')
    marks = ", ".join("?" * len(columns))
    values = [tuple(row.get(column) for column in columns) for row in rows]
    connection.executemany(f'INSERT INTO "{name}" VALUES ({marks})', values)
