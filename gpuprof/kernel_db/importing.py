"""Brings published measurements into the database, each file once.

Formats: CSV tables with a model in each row (ParvaGPU's, Elvinger's thesis', Triton Model Analyzer's), and iGniter's
profile of a GPU and its models: lines of JSON, ``{"model or hardware": {"key": value}}``.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from gpuprof.domain.catalogue import datasets, devices
from gpuprof.domain.file_access import decode_text, read_input
from gpuprof.errors import InputError, unknown_name
from gpuprof.kernel_db.schema import ColocationRow, DeviceRow, ModelRow, RunRow, workload_label
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id


@dataclass(frozen=True)
class Source:
    """A text file and its content."""

    path: Path
    text: str
    sha256: str

    @classmethod
    def read_file(cls, path: Path) -> Source:
        """Read ``path``.

        Raises `InputError` for a file that is unreadable or not text.
        """
        content = read_input(path, "name a file or a known table to import")
        return cls(path, decode_text(content, path), hashlib.sha256(content).hexdigest())

    def rows(self) -> list[tuple[int, dict[str, str]]]:
        """Return the lines of a CSV file with a header as (line number, column → text).

        Raises `InputError` with the line number, when a line has more or fewer fields than the header.
        """
        reader = csv.reader(io.StringIO(self.text, newline=""))
        header: Sequence[str] = [name.strip() for name in next(reader, [])]
        rows = []
        for fields in reader:
            if not any(text.strip() for text in fields):
                continue
            if len(fields) != len(header):
                raise InputError(
                    f"{self.path}:{reader.line_num}: {len(fields)} fields where the header has {len(header)}"
                )
            rows.append((reader.line_num, dict(zip(header, (text.strip() for text in fields), strict=True))))
        return rows

    def header(self) -> tuple[str, ...]:
        """Return the names in the first line of a CSV file."""
        first = next(csv.reader(io.StringIO(self.text.lstrip("\r\n").split("\n", 1)[0])), [])
        return tuple(name.strip() for name in first)

    def number(self, line: int, row: Mapping[str, str], name: str) -> float | None:
        """Return a non-negative number of a row; None for an empty field or a mark for a missing value.

        Raises `InputError` with the line number, for any other text.
        """
        # Published tables separate thousands by commas.
        text = row[name].replace(",", "")
        if text in ("", "N/A", "nan", "-"):
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise InputError(f"{self.path}:{line}: {name} must be a number, not negative, but is {row[name]!r}")
        return value

    def require_number(self, line: int, row: Mapping[str, str], name: str) -> float:
        """Return a required number. Raises `InputError` with the line number when the number is missing."""
        value = self.number(line, row, name)
        if value is None:
            raise InputError(f"{self.path}:{line}: {name} is missing")
        return value

    def finer_latency_ms(
        self, line: int, row: Mapping[str, str], latency_s: str, throughput: str, *, batch: int
    ) -> float | None:
        """Return a batch's time in ms: from the printed time or, if more precise, a single process's throughput.

        A time printed as 2 ms may be anything from 1.5 to 2.5 ms. None when both are missing, or no request was
        answered. ``latency_s``, ``throughput``: names of columns, in seconds and requests per second.
        """
        latency, rate = self.number(line, row, latency_s), self.number(line, row, throughput)
        if not latency and not rate:
            return None
        if not rate or (latency and _rounding(row[latency_s]) <= _rounding(row[throughput])):
            return 1000.0 * (latency or 0.0)
        return 1000.0 * batch / rate

    def run(self, device: str, collector: str, notes: str, **columns: str | None) -> RunRow:
        """Return the run of the file's rows; ``columns`` are further columns of the run."""
        now = datetime.now(UTC)
        return RunRow(
            run_id=new_run_id(now),
            started_at=now,
            device=device,
            collector=collector,
            model="",
            source=str(self.path),
            source_sha256=self.sha256,
            notes=notes,
            **columns,  # type: ignore[arg-type]
        )


def _rounding(text: str) -> float:
    """Return the largest relative rounding error of a printed number above 0."""
    number = Decimal(text.replace(",", ""))
    return 0.5 * 10.0 ** int(number.as_tuple().exponent) / float(number)


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A form of table, with the columns of its run."""

    collector: str
    notes: str
    header: tuple[str, ...]  #: Columns that identify the form.
    #: Source, number and cells of a line → columns of ``models``.
    read_row: Callable[[Source, int, Mapping[str, str]], dict[str, Any]]
    device: str | None = None  #: Device of the publication; None: the file does not name its device.
    run: Mapping[str, str] = field(default_factory=dict)

    def recognizes(self, source: Source) -> bool:
        """Return whether ``source`` has the table's columns."""
        return set(self.header) <= set(source.header())

    def read_run(self, source: Source, device: str | None) -> Run:
        """Return the table as a run.

        Raises `InputError` when no device is given or known, or with the line number for an invalid number.
        """
        if (name := device or self.device) is None:
            raise InputError(f"{source.path} does not say which device it is of", "say so with --device")
        run = source.run(name, self.collector, self.notes, **self.run)
        models = [
            ModelRow(run_id=run.run_id, device=name, **self.read_row(source, line, row)) for line, row in source.rows()
        ]
        return Run(run, models=models)


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


#: Column of the database → Triton Model Analyzer's name.
_ANALYZED = {
    "throughput_rps": "Throughput (infer/sec)",
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


@dataclass(frozen=True, slots=True)
class IgniterGrid:
    """Workloads of the matrices in iGniter's profiles, from ``datasets/igniter.toml``."""

    batches: tuple[int, ...]
    shares_pct: tuple[float, ...]
    #: ``pair_batch``, ``pair_share_pct``: Of each of two copies at once; the L2 utilisation is at this batch, too.
    pair_batch: int
    pair_share_pct: float


@cache
def igniter_grid() -> IgniterGrid:
    """Return the workloads that iGniter measures."""
    table = tomllib.loads((datasets() / "igniter.toml").read_text(encoding="utf-8"))
    batches, shares_pct = tuple(table["batches"]), tuple(table["shares_pct"])
    return IgniterGrid(batches, shares_pct, table["pair_batch"], table["pair_share_pct"])


class IgniterProfile:
    """iGniter's profile: models at 3 batches under 3 shares, two copies at once, and the device."""

    def recognizes(self, source: Source) -> bool:
        """Return whether the first line of ``source`` is that of an iGniter profile."""
        try:
            first = json.loads(source.text.lstrip().split("\n", 1)[0])
        except ValueError:
            return False
        return isinstance(first, dict) and len(first) == 1 and all(isinstance(value, dict) for value in first.values())

    def read_run(self, source: Source, device: str | None) -> Run:
        """Return the profile as a run.

        Raises `InputError` with the line number, for a line foreign to the format, or naming a missing or garbled key.
        """
        tables = parse_igniter_tables(source.text, source.path)
        hardware = tables.pop("hardware", {})
        run = source.run(
            device or "v100",
            "import:igniter",
            "iGniter section 3.1; latency is the time on the GPU; what fits no column is in settings as published",
            runtime="tensorrt",
            settings=json.dumps({"hardware": hardware, **tables}, sort_keys=True),
        )
        try:
            models = [row for name, table in tables.items() for row in _make_model_rows(run, name, table)]
            pairs = [
                row
                for group, (name, table) in enumerate(sorted(tables.items()))
                for row in _make_copy_rows(run, group, name, table)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InputError(
                f"{source.path}: the profile lacks or garbles {error}",
                "name the config.jsonl of iGniter's tools, whole",
            ) from None
        gpu = DeviceRow(
            run_id=run.run_id,
            device=run.device,
            kind="gpu",
            clock_mhz=hardware.get("maxGPUfrequency"),
            max_power_w=hardware.get("maxGPUpower"),
            idle_power_w=hardware.get("idlepower"),
            measured=True,
            source="iGniter's profile",
        )
        return Run(run, devices=[gpu], models=models, colocations=pairs)


def parse_igniter_tables(text: str, path: Path) -> dict[str, dict[str, Any]]:
    """Return the table of the hardware and of each model in a profile.

    Raises `InputError` with the line number, for a line that is none of a profile's.
    """
    tables: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            for name, content in json.loads(line).items():
                tables.setdefault(name, {}).update(content)
        except (ValueError, AttributeError, TypeError):
            raise InputError(
                f"{path}:{number}: not a line of an iGniter profile", "name the config.jsonl of its tools"
            ) from None
    return tables


def _make_model_rows(run: RunRow, name: str, table: Mapping[str, Any]) -> Iterable[ModelRow]:
    grid = igniter_grid()
    for i, batch in enumerate(grid.batches):
        for j, share in enumerate(grid.shares_pct):
            alone_twice = (batch, share) == (grid.pair_batch, grid.pair_share_pct)
            yield ModelRow(
                run_id=run.run_id,
                model=name,
                device=run.device,
                batch=batch,
                sm_share_pct=share,
                latency_mean_ms=float(table["gpulatency"][i][j]),
                power_w=float(table["power"][i][j]),
                clock_mhz=float(table["frequency"][i][j]),
                l2_pct=float(table["l2caches"][j]) if batch == grid.pair_batch and "l2caches" in table else None,
                h2d_bytes=batch * int(table["inputdata"]),
                d2h_bytes=batch * int(table["outputdata"]),
                dispatch_ms=table.get("idletime_1") if alone_twice else None,
            )


def _make_copy_rows(run: RunRow, group: int, name: str, table: Mapping[str, Any]) -> Iterable[ColocationRow]:
    if "activetime_2" not in table:
        return
    batch, share_pct = igniter_grid().pair_batch, igniter_grid().pair_share_pct
    for member in range(2):
        yield ColocationRow(
            run_id=run.run_id,
            device=run.device,
            group=group,
            member=member,
            model=name,
            batch=batch,
            beside=workload_label(name, batch, share_pct, None, 1),
            sm_share_pct=share_pct,
            latency_mean_ms=float(table["activetime_2"]),
            solo_latency_mean_ms=table.get("activetime_1"),
            power_w=table.get("power_2"),
            clock_mhz=table.get("frequency_2"),
        )


#: Name of a form → its reader.
IMPORTERS: Mapping[str, CsvTable | IgniterProfile] = {
    "parvagpu": CsvTable(
        "import:parvagpu",
        "latencies are as printed or batch over throughput, whichever has more digits; throughput is published of "
        "one process and multiplied here by their number; 0,0 means out of memory",
        ("Mig instance", "Batch size", "Workload Number", "Throughput", "Latency"),
        _read_parvagpu,
        "a100-80",
    ),
    # Tables A.1, 5.2 and 6.5: models on a V100 with the three metrics of Creq.
    "thesis": CsvTable(
        "import:thesis",
        "latencies are as printed or batch over throughput, whichever has more digits; memory is published as a "
        "percentage of 16 GiB; empty fields are illegible in the published copy",
        (
            *("model", "batch", "latency_s", "throughput_rps", "mem_capacity_pct"),
            *("achieved_occupancy_pct", "weighted_achieved_occupancy_pct", "weighted_sm_utilization_pct"),
        ),
        _read_thesis,
        "v100",
        {"runtime": "pytorch", "runtime_version": "2.4"},
    ),
    "igniter-profile": IgniterProfile(),
    # The tables of inferences, and of the GPU's metrics over the same time.
    "model-analyzer": CsvTable(
        "import:model-analyzer",
        "latencies are a client's, queueing at its concurrency included; the batch is the client's; CPU and GPU "
        "memory are the server's",
        ("Model", "Batch", "Model Config Path"),
        _read_analyzed,
        run={"runtime": "triton"},
    ),
}


@dataclass(frozen=True, slots=True)
class ImportOutcome:
    """Outcome of importing a file."""

    path: Path
    form: str  #: A key of `IMPORTERS`; empty for a file that was passed over.
    device: str  #: Device of the measurements.
    #: Added to ``models`` and ``colocations``; 0: the file was there already, or is none of these forms.
    rows: int
    note: str = ""


def import_files(
    database: KernelDb, paths: Sequence[Path], device: str | None = None, form: str | None = None
) -> list[ImportOutcome]:
    """Import files, and in directories all files of a known format.

    All files are read before anything is written: a single bad file leaves the database unchanged. Raises `InputError`,
    with the line number, when a file cannot be read, has no known format, or is damaged. ``device``: device of the
    measurements where the files name none; by default the device of the publication; ``form``: a key of `IMPORTERS`; by
    default recognised from each file.
    """
    if form is not None and form not in IMPORTERS:
        raise unknown_name("form", form, sorted(IMPORTERS))
    imported_hashes = set(database.read_table("runs", ["source_sha256"]).column("source_sha256").to_pylist())
    outcomes: list[ImportOutcome] = []
    runs: list[Run] = []
    for path, optional in _files(paths):
        source = Source.read_file(path)
        name = form or next((name for name, reader in IMPORTERS.items() if reader.recognizes(source)), None)
        if name is None:
            if not optional:
                raise InputError(f"{path} has no form that is known", f"known: {', '.join(sorted(IMPORTERS))}")
            outcomes.append(ImportOutcome(path, "", "", 0, "passed over: no known form"))
        elif source.sha256 in imported_hashes:
            outcomes.append(ImportOutcome(path, name, "", 0, "there already"))
        else:
            run = IMPORTERS[name].read_run(source, device)
            rows = len(run.models) + len(run.colocations)
            if not rows:
                if not optional:
                    fix = "fetch it again whole, or name its form before it"
                    raise InputError(f"{path} has no row of the form {name}", fix)
                outcomes.append(ImportOutcome(path, name, "", 0, "passed over: no row"))
                continue
            runs.append(run)
            outcomes.append(ImportOutcome(path, name, run.run.device, rows))
    # Only now, when every file has been read.
    for run in runs:
        database.append(run)
    return outcomes


def split_form(words: Sequence[Path]) -> tuple[str | None, list[Path]]:
    """Return the format if the first word names one and no such file exists, and the remaining words as files."""
    words = list(words)
    if words and str(words[0]) in IMPORTERS and not words[0].exists():
        return str(words[0]), words[1:]
    return None, words


def _files(paths: Sequence[Path]) -> Iterable[tuple[Path, bool]]:
    """Yield each file, and whether an unrecognised file may be skipped."""
    for path in paths:
        if path.is_dir():
            yield from ((file, True) for file in sorted(path.iterdir()) if file.suffix in (".csv", ".jsonl"))
        else:
            yield path, False
