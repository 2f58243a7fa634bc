"""Rows as records, and SQL over the tables."""

from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import get_type_hints

import pyarrow as pa
import pytest

from gpuprof.errors import InputError
from gpuprof.kernel_db.records import list_values, read_records, run_query
from gpuprof.kernel_db.schema import TABLES, ModelRow, RunRow, arrow_schema, from_arrow, to_arrow, workload_label
from gpuprof.kernel_db.store import KernelDb, Run
from tests.kernel_db.rows import make_database

ROWS = [ModelRow("r1", "resnet", "v100", batch, latency_mean_ms=2.0 * batch) for batch in (1, 2, 4)]


@pytest.fixture
def database(tmp_path: Path) -> KernelDb:
    database = KernelDb.create(tmp_path / "db")
    database.append(Run(RunRow("r1", datetime(2026, 1, 1, tzinfo=UTC), "v100", "ort", "resnet"), models=ROWS))
    return database


@dataclass(frozen=True)
class Latency:
    batch: int
    latency_mean_ms: float | None


def test_whole_rows_come_back_as_they_were_written(database: KernelDb) -> None:
    assert sorted(read_records(database, ModelRow), key=lambda row: row.batch) == ROWS
    assert [row.batch for row in read_records(database, ModelRow, {"batch": 2})] == [2]
    assert read_records(database, ModelRow, {"device": "a100"}) == []


def test_a_record_may_have_some_of_the_columns(database: KernelDb) -> None:
    records = read_records(database, Latency, {"batch": [1, 4]}, table="models")
    assert sorted(records, key=lambda record: record.batch) == [Latency(1, 2.0), Latency(4, 8.0)]


def test_times_are_read_as_pyarrow_reads_them() -> None:
    times = [datetime(2024, 2, 29, 23, 59, 59, 999_999, UTC), None, datetime(1969, 12, 31, 1, tzinfo=UTC)]
    column = pa.chunked_array([pa.array(times, pa.timestamp("us", "UTC"))])
    assert list_values(column) == column.to_pylist() == times


@pytest.fixture
def runs(tmp_path: Path) -> KernelDb:
    return make_database(tmp_path / "db", "r1", "r2")


def test_tables_are_joined_by_name(runs: KernelDb) -> None:
    result = run_query(runs, "select k.op_type, count(*) n from kernels k join runs r using (run_id) group by 1")
    assert result.columns == ("op_type", "n")
    assert result.rows == (("Conv", 6),)


def test_latest_models_has_the_newest_of_rows_measured_alike(runs: KernelDb) -> None:
    assert run_query(runs, "select run_id from latest_models").rows == (("r2",),)
    row = read_records(runs, ModelRow)[0]
    others = [replace(row, dims="seq=8"), replace(row, execution="graphs"), replace(row, precision="float16")]
    for number, other in enumerate(others):
        run = RunRow(f"r0-{number}", datetime(2026, 1, 1, tzinfo=UTC), row.device, "nvml", row.model)
        runs.append(Run(run, models=[replace(other, run_id=run.run_id)]))
    assert len(run_query(runs, "select run_id from latest_models").rows) == 4
    assert run_query(runs, "select * from colocations").rows == ()


@pytest.mark.parametrize(
    "statement",
    [
        "select * from read_csv('/etc/hostname')",
        "select * from '/etc/hostname'",
        "select * from read_text('/etc/hostname')",
        "copy (select 1) to '/tmp/gpuprof-must-not-be'",
        "attach '/tmp/gpuprof-must-not-be.duckdb'",
        "set enable_external_access = true",
        "reset lock_configuration",
        "install httpfs",
        "load '/tmp/x.so'",
        "export database '/tmp/gpuprof-must-not-be'",
        "delete from models",
        "selec",
        "select * from nowhere",
    ],
)
def test_a_query_reaches_nothing_but_the_tables(runs: KernelDb, statement: str) -> None:
    with pytest.raises(InputError, match="the query failed"):
        run_query(runs, statement)
    assert not Path("/tmp/gpuprof-must-not-be").exists()
    assert runs.read_table("models").num_rows == 2


@pytest.mark.parametrize("statement", ["", "  ;", "-- nothing"])
def test_an_empty_query_is_refused_with_an_example(runs: KernelDb, statement: str) -> None:
    with pytest.raises(InputError, match=r"the query is empty.*from latest_models"):
        run_query(runs, statement)


@pytest.mark.parametrize("table", TABLES)
def test_a_column_is_nullable_exactly_where_its_field_may_be_none(table: str) -> None:
    hints = get_type_hints(TABLES[table])
    for field in fields(TABLES[table]):
        assert arrow_schema(table).field(field.name).nullable == (
            type(None) in getattr(hints[field.name], "__args__", ())
        )


def test_rows_survive_arrow_and_null_stays_apart_from_zero() -> None:
    rows = [ModelRow("r", "m", "cpu", 1, power_w=0.0), ModelRow("r", "m", "cpu", 2)]
    back = from_arrow("models", to_arrow("models", rows))
    assert back == rows
    assert to_arrow("models", rows).column("power_w").to_pylist() == [0.0, None]


def test_every_duration_size_and_rate_names_its_unit() -> None:
    units = ("_ns", "_ms", "_s", "_us", "_pct", "_bytes", "_w", "_mhz", "_rps")
    quantity = ("latency", "duration", "dram", "memory", "power", "throughput", "overhead", "occupancy", "clock_m")
    for table in TABLES:
        for field in arrow_schema(table):
            if field.type in (pa.int64(), pa.float64()) and field.name.startswith(quantity):
                assert field.name.endswith(units) or field.name == "dram_bytes_per_s", field.name


def test_a_workloads_label_tells_processes_and_mig_apart() -> None:
    assert workload_label("net", 8, 50.0, None, 1) == "net:8:50%"
    assert workload_label("net", 8, 50.0, "3g.40gb", 2) == "net:8:3g.40gb/50%x2"
