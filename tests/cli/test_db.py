from dataclasses import replace
from pathlib import Path

import pytest

from gpuprof.kernel_db.store import KernelDb
from tests.command_line import CommandLine
from tests.kernel_db.rows import a_run


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelDb:
    monkeypatch.setenv("GPUPROF_DB", str(tmp_path / "db"))
    database = KernelDb.create(tmp_path / "db")
    database.append(a_run("r1"))
    database.append(a_run("r2", model="other", batch=8))
    return database


def test_ls_names_models_devices_and_batches(cli: CommandLine) -> None:
    rows = cli.json("db ls")
    assert [(row["model"], row["batches"], row["shares"], row["collectors"]) for row in rows] == [
        ("net", [1], ["100%"], "ort"),
        ("other", [8], ["100%"], "ort"),
    ]


def test_sql_answers_as_csv_and_numbers_columns_of_one_name(cli: CommandLine) -> None:
    assert cli("db sql 'select 1 as a, 2 as a' --csv").out == "a,a_2\n1,2\n"


def test_a_column_of_a_query_without_a_value_is_shown(cli: CommandLine) -> None:
    assert cli("""db sql "select 'net' as model, null as power_w" """).out.split()[:2] == ["model", "power_w"]


def test_small_runs_are_merged_and_a_damaged_file_is_named(database: KernelDb, cli: CommandLine) -> None:
    assert "2 segments" in cli("db compact").err
    (segment,) = database.segments()
    (segment / "models.parquet").write_bytes(b"xx")
    assert "models.parquet is damaged" in cli("db ls", code=3).err


def test_import_says_what_came_of_each_file(tmp_path: Path, cli: CommandLine) -> None:
    file = tmp_path / "bert.csv"
    file.write_text("Mig instance,Batch size,Workload Number,Throughput,Latency\n1,1,1,74.4,0.013\n")
    (row,) = cli.json("db import", file)
    assert (row["form"], row["device"], row["rows"]) == ("parvagpu", "a100-80", 1)
    selected = cli("""db sql "select throughput_rps from models where model = 'bert'" --csv""").out
    assert selected == "throughput_rps\n74.4\n"


def test_a_column_has_one_form_and_keys_are_repeated(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    query = "select 'a' as model, true as stable, 1 as n, 2.5 as x union all select 'b', false, 57442304, 10.25"
    lines = [line.split() for line in cli("db sql", f'"{query}"').out.splitlines()]
    assert sorted(lines[2:]) == [["a", "yes", "1", "2.50"], ["b", "no", "57,442,304", "10.25"]]
    monkeypatch.setenv("COLUMNS", "32")
    shown = cli("db sql 'select model, batch, name, repeat, duration_ns from kernels'").out.splitlines()
    heads = [shown[number - 1] for number, line in enumerate(shown) if line.startswith("──")]
    assert len(heads) > 1 and all(head.split()[:2] == ["model", "batch"] for head in heads), heads


def test_ls_lists_shares_by_their_size(database: KernelDb, cli: CommandLine) -> None:
    for number, share in enumerate((100.0, 25.0, 9.5, 50.0)):
        run = a_run(f"s{number}", model="shared")
        database.append(replace(run, models=[replace(row, sm_share_pct=share) for row in run.models]))
    (shares,) = (row["shares"] for row in cli.json("db ls") if row["model"] == "shared")
    assert shares == ["9.5%", "25%", "50%", "100%"]
