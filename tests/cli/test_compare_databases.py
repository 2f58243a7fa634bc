"""``gpuprof compare BEFORE AFTER``: verdict, table, files for CI, and the exit code."""

from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpuprof.kernel_db.schema import ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run
from tests.command_line import CommandLine


@pytest.fixture(autouse=True)
def nights(here: Path) -> None:
    """Write two databases of three runs each; ``slow`` is 10% slower tonight, ``same`` is not."""
    for name, slow_ms in (("last", 4.0), ("tonight", 4.4)):
        database = KernelDb.create(here / name)
        for repeat in range(3):
            run_id = f"{name}{repeat}"
            run = RunRow(run_id, datetime(2026, 1, 1, 3, repeat, tzinfo=UTC), "v100", "test", "slow")
            rows = [
                ModelRow(run_id, model, "v100", 8, latency_p50_ms=ms * (1.0 + 0.002 * repeat), stable=True)
                for model, ms in (("slow", slow_ms), ("same", 9.0))
            ]
            database.append(Run(run, models=rows))


def test_a_regression_is_named_with_exit_code_1(cli: CommandLine) -> None:
    captured = cli("compare last tonight", code=1)
    assert captured.out.splitlines()[0] == (
        "last → tonight: 1 slower, 1 no difference of 2 cells (at most 1% false alarms)."
    )
    assert "+10.0%" in captured.out
    assert "1 of 2 cells slower by more than 0%, most slow batch 8 on 100% of v100" in captured.err


def test_a_threshold_tolerates_it_and_equal_databases_do_not_differ(cli: CommandLine) -> None:
    cli("compare last tonight --threshold 15")
    cli("compare tonight last")
    assert "2 no difference of 2 cells" in cli("compare last last").out


def test_programs_get_json_markdown_and_junit(tmp_path: Path, cli: CommandLine) -> None:
    rows = {row["model"]: row for row in cli.json("compare last tonight --junit report.xml", code=1)}
    assert rows["slow"]["verdict"] == "slower" and rows["slow"]["change_pct"] == pytest.approx(10.0)
    assert rows["same"]["verdict"] == "no difference" and 0.0 < rows["same"]["smallest_pct"] < 10.0
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    failed = suite.find("testcase/failure/..")
    assert failed is not None and failed.get("classname") == "slow"
    assert (
        "| slow batch 8 on 100% of v100 | 4.008 | 4.409 | +10.0% |"
        in cli("compare last tonight --markdown", code=1).out
    )
