from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pyarrow as pa
import pytest

from gpuprof.kernel_db.schema import TABLES, ModelRow, arrow_schema, from_arrow, to_arrow, workload_label
from tests.kernel_db.rows import a_run


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


def test_no_rows_make_an_empty_table_of_the_same_schema() -> None:
    assert to_arrow("kernels", []).schema == arrow_schema("kernels")
    assert a_run().tables()["devices"].num_rows == 0


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
