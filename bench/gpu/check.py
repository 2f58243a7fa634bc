"""Looks for what must not be in a database that `bench/gpu/run.sh` filled: figures of what did not happen there.

    python -m bench.gpu.check DATABASE

Prints a line for each kind of wrong row and exits with 1; says so and exits with 0 where there is none.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuprof.profiling.sweep.campaign import SMALL_BATCH

Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]
#: A client may get some SMs more or fewer than its percentage: they come in clusters.
_SM_TOLERANCE_PCT = 8.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the database that is named and return the exit code."""
    from gpuprof.kernel_db.store import KernelDb

    (path,) = sys.argv[1:] if arguments is None else arguments
    database = KernelDb(Path(path))
    tables = {name: database.read_table(name).to_pylist() for name in ("runs", "models", "kernels", "colocations")}
    wrong = find_wrong_rows(tables)
    for rule, count in wrong.items():
        print(f"{count} rows: {rule}")
    if not wrong:
        print(f"nothing wrong in {len(tables['models'])} rows of models and {len(tables['kernels'])} of kernels")
    return int(bool(wrong))


def find_wrong_rows(tables: Tables) -> dict[str, int]:
    """Return in words what is wrong, and of how many rows; empty where nothing is."""
    counts: Counter[str] = Counter()
    for rule in _RULES:
        counts.update(rule(tables))
    return dict(counts)


def _runtimes(tables: Tables) -> Iterator[str]:
    runtimes = {row["runtime"] for row in tables["models"] if row["runtime"] is not None}
    if len(runtimes) > 1:
        yield from ("of two runtimes in one database" for row in tables["models"] if row["runtime"] != min(runtimes))
    for run in tables["runs"]:
        on_gpu = not str(run["device"]).startswith("cpu")
        if on_gpu and run["provider"] == "CPUExecutionProvider":
            yield "of the CPU's provider under a GPU's name"


def _precision(tables: Tables) -> Iterator[str]:
    for row in tables["models"]:
        if row["precision"] is not None and row["precision"].startswith(("int6", "int3")):
            yield "with the precision of an input instead of the arithmetic's"


def _gaps(tables: Tables) -> Iterator[str]:
    for row in (*tables["models"], *tables["colocations"]):
        gap, latency = row["dispatch_ms"], row["latency_mean_ms"]
        if gap is not None and latency is not None and gap > latency:
            yield "with a gap between launches that is longer than the batch"


def _occupancy(tables: Tables) -> Iterator[str]:
    for row in tables["kernels"]:
        if 0.0 in (row["achieved_occupancy_pct"], row["launch_occupancy_pct"]) and row["duration_ns"]:
            yield "of kernels that ran and occupied nothing"


def _repeats(tables: Tables) -> Iterator[str]:
    key = ("model", "device", "batch", "sm_share_pct", "mig_profile", "processes", "execution")
    collectors = {run["run_id"]: run["collector"] for run in tables["runs"]}
    measured = Counter(
        (collectors.get(row["run_id"]), *(row[name] for name in key))
        for row in tables["models"]
        if row["error"] is None
    )
    for workload, count in measured.items():
        yield from ["measured again within the run"] * (count - (2 if workload[3] <= SMALL_BATCH else 1))


def _shares(tables: Tables) -> Iterator[str]:
    whole = max((row["client_sms"] or 0 for row in tables["models"] if row["sm_share_pct"] == 100.0), default=0)
    for row in (*tables["models"], *tables["colocations"]):
        if row["error"] is None and whole and row["client_sms"] and row["mig_profile"] is None:
            given_pct = 100.0 * row["client_sms"] / whole
            if abs(given_pct - row["sm_share_pct"]) > _SM_TOLERANCE_PCT:
                yield "whose client got other SMs than its share"


_RULES: Sequence[Callable[[Tables], Iterator[str]]] = (_runtimes, _precision, _gaps, _occupancy, _repeats, _shares)

if __name__ == "__main__":
    sys.exit(main())
