"""``python -m bench.kernel_db_writers``: are runs lost while several processes append and compact at once?"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

from gpuprof.kernel_db.compaction import compact_if_due
from gpuprof.kernel_db.schema import ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run
from gpuprof.kernel_db.verification import verify


def append_runs(path: Path, writer: int, runs: int) -> list[str]:
    """Append ``runs`` runs, compacting whenever it is due; return the ids of those whose append returned."""
    database = KernelDb.create(path)
    acknowledged = []
    for number in range(runs):
        run_id = f"w{writer}-{number:06}"
        row = RunRow(run_id, datetime.now(UTC), "cpu", "ort", "net", batch=1)
        database.append(Run(row, models=[ModelRow(run_id, "net", "cpu", 1, latency_mean_ms=1.0, stable=True)]))
        acknowledged.append(run_id)
        compact_if_due(database)
    return acknowledged


def main() -> None:
    """Print how many of the acknowledged runs are in the database afterwards, and what ``verify`` finds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--appends", type=int, default=20_000, help="of all writers together")
    parser.add_argument("--writers", type=int, default=4)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "db"
        started = time.perf_counter()
        with ProcessPoolExecutor(asked.writers, mp_context=get_context("spawn")) as pool:
            count = asked.appends // asked.writers
            written = list(pool.map(append_runs, [path] * asked.writers, range(asked.writers), [count] * asked.writers))
        elapsed_s = time.perf_counter() - started
        acknowledged = {run_id for ids in written for run_id in ids}
        database = KernelDb(path)
        found = database.read_table("models", ["run_id"]).column("run_id").to_pylist()
        print(f"{len(acknowledged)} runs acknowledged by {asked.writers} writers in {elapsed_s:.0f} s")
        print(f"lost: {len(acknowledged - set(found))}, there twice: {len(found) - len(set(found))}")
        print(f"defects that verify finds: {len(verify(database))}; segments left: {len(database.segments())}")


if __name__ == "__main__":
    main()
