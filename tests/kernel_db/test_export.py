from __future__ import annotations

import json
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from gpuprof.errors import InputError
from gpuprof.kernel_db.export import export_tables, export_timeline
from gpuprof.kernel_db.store import KernelDb, Run
from tests.kernel_db.rows import START, a_run


@pytest.fixture
def database(tmp_path: Path) -> KernelDb:
    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1"))
    return database


def test_tables_are_exported_with_every_column(database: KernelDb, tmp_path: Path) -> None:
    written = export_tables(database, tmp_path / "out", "parquet")
    assert [path.name for path in written] == ["runs.parquet", "models.parquet", "ops.parquet", "kernels.parquet"]
    assert pq.read_table(tmp_path / "out" / "kernels.parquet").equals(database.read_table("kernels"))
    export_tables(database, tmp_path / "out", "csv")
    assert pyarrow.csv.read_csv(tmp_path / "out" / "models.csv").column("latency_mean_ms").to_pylist() == [1.5]


def test_the_timeline_is_what_chrome_reads(database: KernelDb, tmp_path: Path) -> None:
    assert export_timeline(database, tmp_path / "trace.json") == 3
    assert (tmp_path / "trace.json").stat().st_mode & 0o777 == 0o644
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(span["ts"], span["dur"]) for span in spans] == [(0.0, 0.007), (0.01, 0.007), (0.02, 0.007)]
    assert {span["pid"] for span in spans} == {trace["traceEvents"][0]["pid"]}
    assert trace["traceEvents"][0]["args"]["name"] == "net at batch 1 on 100% of cpu"


def test_a_timeline_without_kernels_is_an_error(tmp_path: Path) -> None:
    from gpuprof.kernel_db.schema import RunRow

    database = KernelDb.create(tmp_path / "db")
    database.append(Run(RunRow("r1", START, "cpu", "ort", "net")))
    with pytest.raises(InputError, match="no kernel whose start"):
        export_timeline(database, tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
