"""A million kernel rows in the kernel database, in a plain SQLite table and in CSV: sizes and a query's time.

    python -m bench.kernel_db [--rows 1000000] [--runs 500] [--directory DIR]

The query is the one that estimators ask: the time of the kernels of one (device, op type, batch). Each is asked five
times, the median is printed; SQLite has no index, as the other two have none; CSV is read by pyarrow, the fastest
reader at hand.
"""

from __future__ import annotations

import argparse
import csv
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from gpuprof.kernel_db.compaction import compact_if_due, merge_segments
from gpuprof.kernel_db.schema import KernelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id

DEVICES = ("v100", "a100-80", "h100", "cpu-amd-epyc-2c")
BATCHES = (1, 2, 4, 8, 16, 32)
OP_TYPES = ("Conv", "Gemm", "MatMul", "Add", "Relu", "Softmax", "LayerNormalization", "Concat")
ASKED = {"device": "a100-80", "op_type": "Conv", "batch": 8}
COLUMNS = [field.name for field in fields(KernelRow)]
as_tuple = attrgetter(*COLUMNS)  # dataclasses.astuple copies each value deeply: most of the time went there
ASK_TIMES = 5


def main() -> None:
    """Write the rows three times, ask three times, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--directory", type=Path, help="where to write; by default a temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        compare(Path(name), options.rows, options.runs)


def compare(directory: Path, rows: int, runs: int) -> None:
    """Print size, time to write and time of the query of each."""
    database = KernelDb.create(directory / "db")
    table = sqlite3.connect(directory / "plain.sqlite")
    table.execute(f"create table kernels ({', '.join(COLUMNS)})")
    seconds = dict.fromkeys(("gpuprof", "SQLite", "CSV"), 0.0)
    with (directory / "plain.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for run in made_up_runs(rows, runs):
            values = list(map(as_tuple, run.kernels))
            seconds["gpuprof"] += time_work(keep, database, run)
            seconds["SQLite"] += time_work(insert, table, values)
            seconds["CSV"] += time_work(writer.writerows, values)
    print(f"{rows:,} kernel rows of {runs} runs; asked for {ASKED}\n")
    print(f"{'':26}{'MiB':>8}{'write s':>10}{'query ms':>10}  sum of durations ns")
    report("gpuprof, as appended", size(directory / "db"), seconds["gpuprof"], lambda: ask_gpuprof(database))
    compacting = time_work(merge_segments, database)
    report("gpuprof, compacted", size(directory / "db"), compacting, lambda: ask_gpuprof(database))
    report("SQLite, plain table", size(directory / "plain.sqlite"), seconds["SQLite"], lambda: ask_sqlite(table))
    report("CSV", size(directory / "plain.csv"), seconds["CSV"], lambda: ask_csv(directory / "plain.csv"))


def report(what: str, size_bytes: int, write_s: float, ask: Callable[[], int]) -> None:
    """Ask a few times and print one line."""
    answers = [
        (timed_answer := time.perf_counter(), ask(), time.perf_counter() - timed_answer) for _ in range(ASK_TIMES)
    ]
    query_ms = 1000.0 * statistics.median(answer[2] for answer in answers)
    print(f"{what:26}{size_bytes / 2**20:8.1f}{write_s:10.1f}{query_ms:10.1f}  {answers[0][1]:,}", flush=True)


def made_up_runs(rows: int, runs: int) -> Iterator[Run]:
    """Yield runs whose kernels look like a profiler's: a few hundred names, launch shapes, nearly equal times."""
    draw = random.Random(0)
    for number in range(runs):
        now = datetime.now(UTC)
        run_id, device = new_run_id(now), DEVICES[number % len(DEVICES)]
        batch, model = BATCHES[number // len(DEVICES) % len(BATCHES)], f"model{number % 40}"
        launches = [launch(draw) for _ in range(200)]
        start, kernels = 0, []
        for n in range(rows // runs):
            kernel = launches[n % len(launches)]
            duration = max(1, round(kernel["base_ns"] * batch * draw.lognormvariate(0.0, 0.05)))
            start += duration + draw.randrange(500, 3000)
            kernels.append(
                KernelRow(
                    run_id=run_id, model=model, device=device, batch=batch, name=kernel["name"],
                    position=n % len(launches), repeat=n // len(launches), op_signature=kernel["signature"],
                    op_type=kernel["op_type"], op_name=f"node_{n % len(launches)}", start_ns=start,
                    duration_ns=duration, process_id=4242, stream_id=7, grid_x=kernel["grid"] * batch, grid_y=1,
                    grid_z=1, block_x=kernel["block"], block_y=1, block_z=1,
                    registers_per_thread=kernel["registers"], static_shared_bytes=0, dynamic_shared_bytes=16384,
                    achieved_occupancy_pct=round(draw.uniform(20, 95), 2),
                    dram_throughput_pct=round(draw.uniform(5, 90), 2),
                )
            )  # fmt: skip
        yield Run(RunRow(run_id, now, device, "nsys", model, batch=batch), kernels=kernels)


def launch(draw: random.Random) -> dict[str, Any]:
    """Return what all repeats of one launch have in common."""
    op_type = draw.choice(OP_TYPES)
    return {
        "name": f"void {op_type.lower()}_kernel_{draw.randrange(60)}<float, {draw.choice((64, 128))}, 4>(float*, int)",
        "op_type": op_type,
        "signature": f"{draw.getrandbits(128):032x}",
        "base_ns": draw.randrange(2_000, 200_000),
        "grid": draw.randrange(8, 4096),
        "block": draw.choice((64, 128, 256, 512)),
        "registers": draw.randrange(16, 128),
    }


def keep(database: KernelDb, run: Run) -> None:
    """Append a run as `gpuprof profile` does."""
    database.append(run)
    compact_if_due(database)


def insert(table: sqlite3.Connection, values: list[tuple[object, ...]]) -> None:
    """Add rows to SQLite in one transaction."""
    with table:
        table.executemany(f"insert into kernels values ({', '.join('?' * len(COLUMNS))})", values)


def ask_gpuprof(database: KernelDb) -> int:
    """Return the sum of the asked kernels' durations."""
    return int(sum(database.read_table("kernels", ["duration_ns"], ASKED).column("duration_ns").to_pylist()))


def ask_sqlite(table: sqlite3.Connection) -> int:
    """Return the same from SQLite."""
    condition = " and ".join(f"{name} = ?" for name in ASKED)
    (answer,) = table.execute(
        f"select sum(duration_ns) from kernels where {condition}", list(ASKED.values())
    ).fetchone()
    return int(answer)


def ask_csv(path: Path) -> int:
    """Return the same from CSV."""
    import pyarrow.compute as pc
    from pyarrow import csv as arrow_csv

    wanted = arrow_csv.ConvertOptions(include_columns=["duration_ns", *ASKED])
    rows = arrow_csv.read_csv(path, convert_options=wanted)
    for name, value in ASKED.items():
        rows = rows.filter(pc.equal(rows.column(name), value))
    return int(pc.sum(rows.column("duration_ns")).as_py())


def time_work(work: Callable[..., object], *arguments: object) -> float:
    """Return the seconds that ``work`` takes."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory."""
    return (
        path.stat().st_size
        if path.is_file()
        else sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    )


if __name__ == "__main__":
    main()
