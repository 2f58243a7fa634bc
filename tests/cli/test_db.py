from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprof.cli.main import main
from gpuprof.kernel_db.schema import DeviceRow
from gpuprof.kernel_db.store import KernelDb
from tests.kernel_db.rows import a_run


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelDb:
    monkeypatch.setenv("GPUPROF_DB", str(tmp_path / "db"))
    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1"))
    database.append(a_run("r2", model="other", batch=8))
    return database


def test_ls_names_models_devices_and_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["db", "ls", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["model"], row["batches"], row["shares"], row["collectors"]) for row in rows] == [
        ("net", [1], ["100%"], "ort"),
        ("other", [8], ["100%"], "ort"),
    ]


def test_show_gives_a_table_or_what_is_known_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["db", "show", "other", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["batch"] == 8 and "power_w" not in row
    assert main(["db", "show", "kernels", "--limit", "2"]) == 0
    said = capsys.readouterr()
    assert said.out.count("CPU:Conv") == 2 and "2 of 6 rows" in said.err
    assert main(["db", "show", "othr"]) == 3
    assert "did you mean other" in capsys.readouterr().err


def test_sql_answers_as_csv_and_numbers_columns_of_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["db", "sql", "select 1 as a, 2 as a", "--csv"]) == 0
    assert capsys.readouterr().out == "a,a_2\n1,2\n"


def test_sql_answers_times_with_their_zone(capsys: pytest.CaptureFixture[str]) -> None:
    """For these DuckDB imports a package that it does not bring."""
    assert main(["db", "sql", "select run_id, started_at from runs order by run_id", "--csv"]) == 0
    _, first, *_ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"r1,\d{4}-\d\d-\d\d \d\d:\d\d:\d\d.*\+00:00", first)


def test_a_column_of_a_query_without_a_value_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["db", "sql", "select 'net' as model, null as power_w"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["model", "power_w"]


def test_a_query_without_rows_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["db", "sql", "select model from models where batch = 12345"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == "gpuprof: no row answers the query\n"
    assert main(["db", "sql", "select model from models where batch = 12345", "--csv"]) == 0
    assert capsys.readouterr().out == "model\n"


def test_verify_says_what_is_damaged_and_where(database: KernelDb, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["db", "verify"]) == 0
    (database.path / "r1" / "models.parquet").write_bytes(b"xx")
    assert main(["db", "verify"]) == 3
    assert "models.parquet" in capsys.readouterr().err


def test_compact_and_export(tmp_path: Path, database: KernelDb, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["db", "compact"]) == 0
    assert "2 segments" in capsys.readouterr().err
    assert main(["db", "export", "-o", str(tmp_path / "out"), "--format", "csv"]) == 0
    assert (tmp_path / "out" / "models.csv").read_text().count("\n") == 3
    assert main(["db", "export", "-o", str(tmp_path / "trace.json"), "--format", "trace"]) == 0
    assert (tmp_path / "trace.json").exists()


def test_a_database_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["db", "ls", "--db", "/nonexistent"]) == 3
    assert "the kernel database /nonexistent does not exist" in capsys.readouterr().err


def test_import_says_what_came_of_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bert.csv"
    file.write_text("Mig instance,Batch size,Workload Number,Throughput,Latency\n1,1,1,74.4,0.013\n")
    assert main(["db", "import", str(file), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["form"], row["device"], row["rows"]) == ("parvagpu", "a100-80", 1)
    assert main(["db", "sql", "select throughput_rps from models where model = 'bert'", "--csv"]) == 0
    assert capsys.readouterr().out == "throughput_rps\n74.4\n"
    assert main(["db", "import", str(file), "--format", "parvagup"]) == 3
    assert "did you mean parvagpu" in capsys.readouterr().err


def test_runs_are_shown_with_whole_identifiers_and_times_in_one_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["db", "show", "runs"]) == 0
    (line, *_) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("r2"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", line.split()[1])


def test_rows_of_devices_keep_their_device_where_the_table_is_cut_in_parts(
    database: KernelDb, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("cpu-intel-xeon-4c", "cpu-amd-epyc-8c")):
        for share_pct in (25.0, 50.0):
            run = f"d{number}-{share_pct:g}"
            measured = DeviceRow(run, name, "cpu", 4, share_pct, None, 1e12, dram_bytes=2**34, dram_bytes_per_s=1e11)
            database.append(replace(a_run(run), devices=[measured]))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["db", "show", "devices"]) == 0
    parts = capsys.readouterr().out.split("\n\n")
    assert len(parts) > 1
    assert all("cpu-intel-xeon-4c" in part and "cpu-amd-epyc-8c" in part for part in parts)


def test_a_table_without_rows_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["db", "show", "colocations"]) == 0
    said = capsys.readouterr()
    assert not said.out and "the table colocations has no rows" in said.err


@pytest.mark.parametrize("verb", ["ls", "show models", "verify", "compact", "sql 'select 1'"])
def test_a_folder_of_foreign_files_is_no_database(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/sales.parquet").write_bytes(b"PAR1")
    assert main(["db", *shlex.split(verb), "--db", str(tmp_path / "foreign")]) == 3
    assert "it holds sales.parquet and no run (give with --db" in capsys.readouterr().err


def test_numbers_of_a_column_have_one_form_and_keys_are_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    query = "select 'a' as model, true as stable, 1 as n, 2.5 as x union all select 'b', false, 57442304, 10.25"
    assert main(["db", "sql", query]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert sorted(lines[2:]) == [["a", "yes", "1", "2.50"], ["b", "no", "57,442,304", "10.25"]]
    monkeypatch.setenv("COLUMNS", "32")
    assert main(["db", "show", "kernels"]) == 0
    shown = capsys.readouterr().out.splitlines()
    heads = [shown[number - 1] for number, line in enumerate(shown) if line.startswith("──")]
    assert len(heads) > 1 and all(head.split()[:2] == ["model", "batch"] for head in heads), heads


def test_ls_lists_shares_by_their_size(database: KernelDb, capsys: pytest.CaptureFixture[str]) -> None:
    for number, share in enumerate((100.0, 25.0, 9.5, 50.0)):
        run = a_run(f"s{number}", model="shared")
        database.append(replace(run, models=[replace(row, sm_share_pct=share) for row in run.models]))
    assert main(["db", "ls", "--json"]) == 0
    (shares,) = (row["shares"] for row in json.loads(capsys.readouterr().out) if row["model"] == "shared")
    assert shares == ["9.5%", "25%", "50%", "100%"]
