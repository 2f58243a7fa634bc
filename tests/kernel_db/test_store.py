import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuprof.errors import InputError
from gpuprof.kernel_db.schema import SCHEMA_VERSION, VERSION_KEY, arrow_schema
from gpuprof.kernel_db.store import KernelDb, merge_segments, migrate_table, new_run_id
from tests.kernel_db.rows import a_run, assert_sound, make_database


@pytest.mark.parametrize(
    ("where", "runs"),
    [
        ({}, "0123"),
        ({"model": "m1", "batch": (2, 4)}, "13"),
        ({"mig_profile": ["3g.40gb", None]}, "0123"),
        ({"batch": []}, ""),
        ({"batch": [1, 4]}, "03"),
        ({"mig_profile": None, "model": "m0"}, "02"),
        ({"mig_profile": "3g.40gb"}, ""),
        ({"model": "none"}, ""),
    ],
)
def test_rows_are_filtered_and_columns_come_as_requested(tmp_path: Path, where: dict[str, object], runs: str) -> None:
    database = KernelDb.create(tmp_path / "db")
    assert database.read_table("models").num_rows == 0 and not (tmp_path / "db").exists()  # before the first run
    for number in range(4):
        database.append(a_run(f"r{number}", model=f"m{number % 2}", batch=number + 1))
    rows = database.read_table("models", ["latency_mean_ms", "run_id"], where)
    assert rows.column_names == ["latency_mean_ms", "run_id"]
    assert rows.column("run_id").to_pylist() == [f"r{number}" for number in runs]


def test_duckdb_reads_the_files_without_gpuprof(tmp_path: Path) -> None:
    import duckdb

    make_database(tmp_path / "db", "r1", "r2")
    files = f"{tmp_path}/db/*/models.parquet"
    result = duckdb.connect().execute("select count(*), sum(latency_mean_ms) from read_parquet(?)", [files])
    assert result.fetchall() == [(2, 3.0)]


def test_a_database_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not exist \(gpuprof profile"):
        KernelDb(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is not a directory"):
        KernelDb(tmp_path / "file")
    with pytest.raises(InputError, match="file is not a directory"):
        KernelDb.create(tmp_path / "file" / "db")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir(mode=0o500)
    with pytest.raises(InputError, match="not writable"):
        KernelDb.create(tmp_path / "db")


def test_a_failing_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = make_database(tmp_path / "db", "r1")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with pytest.raises(InputError, match="no space left on device"):
        database.append(a_run("r2"))
    assert [path.name for path in database.path.iterdir() if path.is_dir()] == ["r1"]


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, damage: str) -> None:
    database = make_database(tmp_path / "db", "r1", "r2")
    file = database.path / "r2" / "models.parquet"
    content = file.read_bytes()
    file.write_bytes({"cut": content[: len(content) // 2], "garbage": b"x" * 500, "empty": b""}[damage])
    with pytest.raises(InputError) as caught:
        database.read_table("models")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_dead_writer_left_is_cleared_but_not_beside_a_live_one(tmp_path: Path) -> None:
    database = make_database(tmp_path / "db", "r1")
    leftover = database.path / ".tmp-r9"
    leftover.mkdir()
    with database.writing():
        KernelDb.create(database.path)
        assert leftover.exists()
    KernelDb.create(database.path)
    assert not leftover.exists()
    assert database.read_table("models").num_rows == 1


def test_run_ids_sort_by_time_and_never_meet() -> None:
    first = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    later = datetime(2026, 1, 2, 3, 4, 5, 7, tzinfo=UTC)
    assert new_run_id(first) < new_run_id(later)
    assert len({new_run_id(first) for _ in range(100)}) == 100


def test_a_single_flipped_bit_in_the_data_is_found(tmp_path: Path) -> None:
    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1", kernels=500))
    file = database.path / "r1" / "kernels.parquet"
    column = pq.ParquetFile(file).metadata.row_group(0).column(arrow_schema("kernels").get_field_index("start_ns"))
    whole, end = file.read_bytes(), column.data_page_offset + column.total_compressed_size
    for position in range(end - 28, end):  # the page's data, behind its header
        content = bytearray(whole)
        content[position] ^= 0x10
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"r1/kernels\.parquet is damaged"):
            database.read_table("kernels")


def test_a_negative_batch_in_a_file_is_one_line_that_names_it(tmp_path: Path) -> None:
    database = make_database(tmp_path / "db", "r1")
    database.append(a_run("r2", batch=-1))
    with pytest.raises(InputError, match=r"r2/models\.parquet is damaged: batch must be at least 1 but is -1"):
        database.read_table("models")


def test_a_run_that_is_there_already_is_refused_even_after_it_was_compacted(tmp_path: Path) -> None:
    database = make_database(tmp_path / "db", "r1", "r2")
    merge_segments(database)
    with pytest.raises(InputError, match="run r1 is in the kernel database"):
        database.append(a_run("r1"))
    assert database.read_table("models").num_rows == 2


def test_a_reader_finds_segments_that_were_compacted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = KernelDb.create(tmp_path / "db")
    for number in range(3):
        database.append(a_run(f"r{number}"))
    list_segments = KernelDb.segments

    def list_and_compact(self: KernelDb) -> list[Path]:
        segments = list_segments(self)
        monkeypatch.setattr(KernelDb, "segments", list_segments)
        merge_segments(KernelDb(self.path))
        return segments

    monkeypatch.setattr(KernelDb, "segments", list_and_compact)
    assert database.read_table("models").num_rows == 3


def _as_version(file: Path, version: int) -> None:
    pq.write_table(pq.read_table(file).replace_schema_metadata({VERSION_KEY: str(version).encode()}), file)


def test_files_of_a_newer_version_and_of_strangers_are_refused(tmp_path: Path) -> None:
    database = make_database(tmp_path / "db", "r1")
    file = database.path / "r1" / "models.parquet"
    _as_version(file, SCHEMA_VERSION + 1)
    with pytest.raises(InputError, match=r"models\.parquet has version .* \(upgrade gpuprof\)"):
        database.read_table("models")
    pq.write_table(pa.table({"a": [1]}), file)
    with pytest.raises(InputError, match="was not written by gpuprof"):
        database.read_table("models")


def test_rows_of_version_2_say_what_their_runs_said_of_the_runtime(tmp_path: Path) -> None:
    database = KernelDb.create(tmp_path / "db")
    runs: dict[str, dict[str, Any]] = {
        "r1": {"runtime": "onnxruntime", "provider": "CPUExecutionProvider", "precision": "int64"},
        "r2": {"runtime": "torch", "provider": "TorchCUDA", "precision": "float32"},
        "r3": {"runtime": None, "provider": None, "precision": None},
    }
    expected = {
        "r1": ("onnxruntime", "fused", "float32"),  # whole numbers are what the model takes, not what it computes in
        "r2": ("pytorch", "eager", None),  # whether in TF32 was left to PyTorch
        "r3": (None, None, None),
    }
    for run_id, fields in runs.items():
        run = a_run(run_id)
        database.append(replace(run, run=replace(run.run, **fields)))
        for table in ("runs", "models", "ops", "kernels"):
            file = database.path / run_id / f"{table}.parquet"
            if table != "runs":
                content = pq.read_table(file).drop_columns(["runtime", "execution", "precision"])
                pq.write_table(content, file)
            _as_version(file, 2)
    for table in ("models", "ops", "kernels"):
        rows = database.read_table(table, ["run_id", "runtime", "execution", "precision"]).to_pylist()
        assert {row["run_id"]: (row["runtime"], row["execution"], row["precision"]) for row in rows} == expected
    assert_sound(database)


def test_occupancies_that_version_4_estimated_leave_the_column_of_counters() -> None:
    rows = {
        "run_id": ["r"] * 4,
        "joined": ["both", "counters", None, None],
        "start_ns": [0, None, 5, None],  # of a timeline alone, and of counters alone
        "achieved_occupancy_pct": [10.0, 20.0, 30.0, 40.0],
    }
    old = pa.table(rows).replace_schema_metadata({VERSION_KEY: b"4"})
    new = migrate_table("kernels", old, "kernels.parquet")
    assert new.column("achieved_occupancy_pct").to_pylist() == [10.0, 20.0, None, 40.0]
    assert new.column("launch_occupancy_pct").to_pylist() == [None, None, 30.0, None]
