import json
from pathlib import Path

import pytest

from gpuprof.kernel_db.store import KernelDb
from gpuprof.pipeline.profile import ProfileResult
from tests.command_line import CommandLine
from tests.profiling.ncu_files import kernel, raw_csv
from tests.profiling.nsys_files import two_runs
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time


@pytest.fixture(autouse=True)
def _here(here: Path) -> None:
    two_runs().write(here / "net.sqlite")
    counted = [kernel(f"k{i % 2}(float*)", "50", 80 + i) for i in range(3)]
    (here / "net.csv").write_text(raw_csv(counted))


def test_two_reports_of_one_run_are_joined_into_the_database(tmp_path: Path, cli: CommandLine) -> None:
    reports = ["--from-report", "net.sqlite", "--from-report", "net.csv"]
    captured = cli("profile bert --batch 8", *reports, "--json")
    (row,) = json.loads(captured.out)
    assert (row["model"], row["device"], row["batch"], row["kernel_count"]) == ("bert", "v100", 8, 3)
    assert row["max_occupancy_pct"] == 50.0
    assert "latencies are of runs under the profiler" in captured.err
    kernels = KernelDb(tmp_path / "gpuprof-db").read_table("kernels", ["joined"]).to_pylist()
    assert {kernel["joined"] for kernel in kernels} == {"both"}


CASES = Path(__file__).parents[1] / "profiling" / "cases"


@pytest.mark.parametrize(
    ("report", "more", "expected"),
    [
        ("nsys/unified.sqlite", [], {"device": "a100-80", "h2d_bytes": 2**30, "d2h_bytes": 2**29}),
        ("nsys/software_adapter.sqlite", [], {"device": "a100-80", "kernel_count": 4}),
        ("nsys/copy_between.sqlite", [], {"dispatch_ms": 0.0, "kernel_count": 10}),
        ("nsys/copy_between.sqlite", ["--runs", "10"], {"kernel_count": 1, "latency_mean_ms": 0.2}),
        ("ncu/bom.csv", ["--device", "rtx-4090"], {"kernel_count": 2, "max_occupancy_pct": 45.31}),
        ("ncu/utf16.csv", ["--device", "rtx-4090"], {"kernel_count": 2, "max_occupancy_pct": 45.31}),
        ("ncu/attribute_word.csv", ["--device", "h200"], {"kernel_count": 1, "max_occupancy_pct": 45.5}),
        ("ort_profile.json", [], {"node_time_ms": 0.297, "latency_mean_ms": 0.317, "kernel_count": 1}),
    ],
)
def test_reports_of_other_programs_give_their_figures(
    report: str, more: list[str], expected: dict[str, object], cli: CommandLine
) -> None:
    (row,) = cli.json("profile net --batch 1 --from-report", CASES / report, *more)
    assert {name: row[name] for name in expected} == expected


def test_a_run_in_a_report_answers_estimate(cli: CommandLine) -> None:
    report = str(CASES / "nsys" / "copy_between.sqlite")
    cli("profile net --batch 1 --runs 10 --from-report", report, "--json")
    (row,) = cli.json("estimate net --batch 1 --device a100-80")
    assert row["latency_ms"] == pytest.approx(0.2)


def test_a_lost_counter_is_the_last_line(monkeypatch: pytest.MonkeyPatch, cli: CommandLine, tmp_path: Path) -> None:
    result = ProfileResult(
        notes=("a note",),
        device="h200",
        measured=(),
        cells=0,
        failures=(),
        unstable=(),
        database=tmp_path,
        lost=("no counters: ncu may not read them",),
    )
    monkeypatch.setattr("gpuprof.profile", lambda *_, **__: result)
    assert cli("profile net.onnx").err.splitlines()[-1] == "error: no counters: ncu may not read them"
