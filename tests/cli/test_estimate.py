"""``gpuprof estimate`` as a user types it."""

import json
from pathlib import Path

import pytest

from gpuprof.kernel_db.schema import ColocationRow
from gpuprof.lab.scenarios import build_database
from tests.command_line import CommandLine
from tests.estimators.rows import database, measured_row, two_layers


@pytest.fixture
def db(tmp_path: Path) -> str:
    rows = [
        measured_row(name, batch, scale * (1.0 + batch), device="a30", memory=2**30 * batch)
        for name, scale in (("fast", 1.0), ("slow", 5.0))
        for batch in (1, 4, 64)
    ]
    database(tmp_path / "db", rows)
    return str(tmp_path / "db")


def test_without_a_model_every_model_of_the_database_is_answered(db: str, cli: CommandLine) -> None:
    rows = cli.json("estimate --batch 1,3 --db", db)
    assert [(row["model"], row["batch"], row["latency_ms"], row["latency_source"]) for row in rows] == [
        ("fast", 1, 2.0, "measured"),
        ("fast", 3, 4.0, "interpolated"),
        ("slow", 1, 10.0, "measured"),
        ("slow", 3, 20.0, "interpolated"),
    ]
    assert {row["device"] for row in rows} == {"a30"}


def test_a_file_on_a_device_of_the_catalogue_says_precision_and_runtime(tmp_path: Path, cli: CommandLine) -> None:
    (row,) = cli.json("estimate", two_layers(tmp_path / "two.onnx"), "--device h100 --batch 8")
    assert row["latency_source"] == "cross-gpu: tfloat32, onnxruntime, never compared on this board"
    assert row["memory_source"] == "process, weights and live activations, scaled"


@pytest.mark.parametrize("batch", ["0", "-1", "1.5", "x", "", "1,,2", "9999999999"])
def test_a_batch_that_is_none_is_refused(db: str, batch: str, cli: CommandLine) -> None:
    message = cli("estimate fast --db", db, f"--batch='{batch}'", code=3).err
    assert "--batch must be whole numbers from 1 to 65,536" in message and message.count("\n") == 1


def test_a_batch_that_cannot_fit_in_memory_is_refused(db: str, cli: CommandLine) -> None:
    message = cli("estimate fast --batch 64 --db", db, code=3).err
    assert "fast at batch 64 needs 64.0 GiB (measured), but a30 at 100% has 24.0 GiB" in message


@pytest.fixture
def halves(tmp_path: Path) -> str:
    rows = [
        measured_row(name, batch, 10.0 * batch, device="a30", share=50.0)
        for name in ("fast", "slow")
        for batch in (1, 4)
    ]
    row = ColocationRow(
        "r1", "a30", 0, 0, "fast", 1, "slow:4:50%", 50.0, latency_mean_ms=12.0, solo_latency_mean_ms=10.0
    )
    database(tmp_path / "halves", rows, colocations=[row])
    return str(tmp_path / "halves")


@pytest.mark.parametrize("neighbour", ["slow@4:50", "slow:4:50%", "slow@4"])
def test_beside_a_measured_neighbour_the_measured_time_is_said(halves: str, neighbour: str, cli: CommandLine) -> None:
    (row,) = cli.json("estimate fast --share 50 --db", halves, "--beside", neighbour)
    assert (row["latency_ms"], row["latency_source"], row["beside"]) == (12.0, "measured", "slow@4:50%")


def test_ops_that_nothing_is_known_of_widen_the_interval_or_are_an_error(tmp_path: Path, cli: CommandLine) -> None:
    words = ["estimate", two_layers(tmp_path / "odd.onnx", middle="Odd"), "--device a100-80"]
    (row,) = cli.json(*words)
    assert row["unknown_ops"] == ["Odd"]
    assert float(str(row["latency_high_ms"])) > 5.0 * float(str(row["latency_ms"]))
    assert float(str(row["latency_ms"])) > 0.003  # three launches, whatever is known of them
    refused = cli(*words, "--strict", code=3)
    assert refused.out == "" and "nothing is known of Odd on a100-80" in refused.err


@pytest.mark.slow
def test_several_files_measured_under_one_name_are_said(tmp_path: Path, cli: CommandLine) -> None:
    database(tmp_path / "db", [measured_row("net", 1, 5.0, device="a30", sha256="old")])
    database(tmp_path / "db", [measured_row("net", 1, 50.0, device="a30", sha256="new", run_id="r2")], run_id="r2")
    message = "2 different files were measured as net: the last one counts"
    assert message in cli("estimate --device a30 --db", tmp_path / "db").err


@pytest.fixture
def folder(here: Path) -> Path:
    """An empty directory with three services of BERT on the thesis's V100, in rows that a program computed."""
    services = "".join(f"bert,20,400,{name}\n" for name in "abc")
    (here / "slo.csv").write_text(f"model,rate_rps,slo_ms,service\n{services}")
    build_database("thesis-shares", here, here).rename(here / "gpuprof-db")
    return here


def test_a_plan_by_ushers_premise_names_it_and_check_refuses_it(folder: Path, cli: CommandLine) -> None:
    text = " ".join(cli("place --gpus v100 --estimator usher").out.split())
    assert "1 × v100 ($3.06/h), minimum by a premise." in text
    assert "USHER's: models that fit by their compute requirement do not slow each other down" in text
    assert "measured" not in text and "interpolated" not in text and "proven" not in text
    replicas = [
        replica
        for gpu in json.loads((folder / "map.json").read_text())["nodes"][0]["gpus"]
        for part in gpu["partitions"]
        for replica in part["replicas"]
    ]
    assert {replica["predicted"]["source"] for replica in replicas} == {"computed, assumed"}
    assert cli.json("check map.json --estimator database", code=1)["basis"]["premise"].startswith("USHER's")


def test_computed_rows_are_called_computed_by_every_estimator(folder: Path, cli: CommandLine) -> None:
    for estimator in ("measured", "database", "usher"):
        rows = cli.json("estimate bert --batch 8 --estimator", estimator, "--device v100")
        assert {row["latency_source"] for row in rows} == {"computed"}
