"""A database that gpuprof wrote before its core was split into packages is read, estimated from and placed from."""

import json
import shutil
from pathlib import Path

import pytest

from gpuprof.cli.main import main
from gpuprof.domain.deployment import read_map
from gpuprof.domain.device import Device
from gpuprof.kernel_db.schema import TABLES
from gpuprof.kernel_db.store import KernelDb
from tests.command_line import CommandLine

OLD = Path(__file__).parent.parent / "kernel_db" / "database_of_0_1_0"
DEVICE = "cpu-intel-xeon-4c"


@pytest.fixture(autouse=True)
def database(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(OLD / "gpuprof-db", here / "gpuprof-db")
    machine = Device("cpu-of-another-machine", "cpu", 2, 1000.0, {}, 1, 1.0, 1)
    monkeypatch.setattr("gpuprof.machine.cpu.local_cpu", lambda: machine)
    return here / "gpuprof-db"


def test_every_table_of_an_old_database_is_read(database: Path) -> None:
    rows = {table: KernelDb(database).read_table(table).num_rows for table in TABLES}
    assert rows == {"runs": 14, "devices": 3, "models": 10, "ops": 105, "kernels": 210, "colocations": 2}


@pytest.mark.parametrize(
    ("words", "expected"), [("mlp --batch 1,4", "estimates.json"), ("mlp --beside random_mlp@1:50", "beside.json")]
)
def test_an_old_database_gives_the_estimates_that_it_gave(words: str, expected: str, cli: CommandLine) -> None:
    rows = cli.json("estimate", words, "--share 50 --device", DEVICE)
    for now, then in zip(rows, json.loads((OLD / expected).read_text()), strict=True):
        for key in ("model", "device", "share", "batch", "latency_source", "memory_source", "weight_bytes"):
            # The version that wrote them did not carry the mark of unstable rows into estimates.
            assert str(now[key]).removeprefix("unstable, ") == str(then[key])
        for key in ("latency_ms", "throughput_rps", "memory_bytes"):
            assert now[key] == pytest.approx(then[key])


def test_models_are_placed_by_an_old_database(tmp_path: Path) -> None:
    (tmp_path / "slo.csv").write_text("model,rate_rps,slo_ms\nmlp,20,100\nrandom_mlp,10,100\n")
    assert main(["place", "--gpus", f"{DEVICE}:1"]) == 0
    placed = read_map(tmp_path / "map.json")
    assert placed.unplaced == ()
    assert {replica.model for _, _, _, replica in placed.places()} == {"mlp", "random_mlp"}
