from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.errors import InputError
from gpuprof.kernel_db.sql import run_query
from gpuprof.kernel_db.store import KernelDb
from tests.kernel_db.rows import a_run


@pytest.fixture
def database(tmp_path: Path) -> KernelDb:
    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1"))
    database.append(a_run("r2"))
    return database


def test_tables_are_joined_by_name(database: KernelDb) -> None:
    result = run_query(database, "select k.op_type, count(*) n from kernels k join runs r using (run_id) group by 1")
    assert result.columns == ("op_type", "n")
    assert result.rows == (("Conv", 6),)


def test_latest_models_has_the_newest_of_rows_measured_alike(database: KernelDb) -> None:
    assert run_query(database, "select run_id from latest_models").rows == (("r2",),)


def test_an_empty_database_answers_with_no_rows(tmp_path: Path) -> None:
    assert run_query(KernelDb.create(tmp_path / "none"), "select * from ops").rows == ()


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
        "selec",
        "select * from nowhere",
    ],
)
def test_a_query_reaches_nothing_but_the_tables(database: KernelDb, statement: str) -> None:
    with pytest.raises(InputError, match="the query failed"):
        run_query(database, statement)
    assert not Path("/tmp/gpuprof-must-not-be").exists()


def test_what_a_query_deletes_is_not_deleted(database: KernelDb) -> None:
    with pytest.raises(InputError):
        run_query(database, "delete from models")
    assert database.read_table("models").num_rows == 2


@pytest.mark.parametrize("statement", ["", "  ;", "-- nothing"])
def test_an_empty_query_is_refused_with_an_example(database: KernelDb, statement: str) -> None:
    with pytest.raises(InputError, match=r"the query is empty.*from latest_models"):
        run_query(database, statement)
