"""nsys: recording a program, reports of both kinds, and a profiler's process."""

import sqlite3
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest

from gpuprof.domain.catalogue import GpuDescription
from gpuprof.errors import InputError, UnavailableError
from gpuprof.profiling.nsight import nsys
from gpuprof.profiling.nsight.ncu import known_failure
from gpuprof.profiling.nsight.nsys import export_report, read_nsys, record_program
from gpuprof.profiling.nsight.tool_process import ask_tool, find_tool, run_tool, tool_version
from tests.profiling.fake_tools import write_program
from tests.profiling.nsys_files import KERNEL, MEMCPY, RUNTIME, Export, two_runs
from tests.reruns import measures_in_real_time
from tests.serving.running import eventually, has_ended

pytestmark = measures_in_real_time

# Copies the report to where it is told, as export does; records by writing one.
_FAKE = """
case "$1" in
--version) echo "NVIDIA Nsight Systems version 2024.6.1.90-246160830v0";;
profile) echo "$@" > {log}; while [ "$1" != -o ]; do shift; done; shift; touch "$1{ending}";;
export) while [ "$1" != -o ]; do shift; done; shift; cp {report} "$1";;
esac
"""


@pytest.mark.parametrize("new", [False, True], ids=["schema 3.0", "schema 3.16"])
def test_old_and_new_exports_give_the_same_kernels(tmp_path: Path, new: bool) -> None:
    timeline = read_nsys(two_runs().write(tmp_path / "r.sqlite", new=new))
    kernels = timeline.kernels
    assert kernels["name"].tolist()[:3] == ["void warm(float*)", "void k0(float*)", "void k1(float*)"]
    assert kernels["repeat"].tolist() == [-1, 0, 0, 0, 1, 1, 1]
    assert kernels["grid_x"].tolist() == [80, 80, 81, 82, 80, 81, 82]
    assert kernels["duration_ns"].tolist() == [20, *[60] * 6]
    copies = timeline.copies
    assert copies["direction"].tolist() == ["h2d", "d2h"] * 2 and copies["bytes"].tolist() == [4096, 64] * 2
    assert copies["repeat"].tolist() == [0, 0, 1, 1] and copies["memory"].isna().all()
    assert timeline.gpus == {0: GpuDescription("Tesla V100-SXM2-16GB")}
    assert timeline.version == ("2024.6.1.90 (schema 3.16.0)" if new else "2022.4.2.1 (schema 3.0.0)")


@pytest.mark.parametrize("old", [False, True], ids=["", "without kinds of memory"])
def test_copies_say_which_memory_of_the_host_they_were_of(tmp_path: Path, old: bool) -> None:
    export = two_runs()
    export.copy(3000, 2**20, 1, 201, srcKind=0, dstKind=2)
    export.copy(3100, 2**20, 1, 202, srcKind=1, dstKind=2)
    export.copy(3200, 2**20, 2, 203, srcKind=2, dstKind=1)
    export.copy(3300, 2**20, 8, 204, srcKind=2, dstKind=2)
    dropped = {MEMCPY: ("srcKind", "dstKind")} if old else None
    copies = read_nsys(export.write(tmp_path / "r.sqlite", drop=dropped)).copies
    memories = [None if pd.isna(memory) else memory for memory in copies["memory"].tolist()[-4:]]
    assert memories == ([None] * 4 if old else ["pageable", "pinned", "pinned", None])


@pytest.mark.parametrize(
    ("ranges", "launches", "expected"),
    [
        # Kernels run long after their launches, which alone count.
        ([("outer", 0, 100, 7, 7), ("inner", 10, 20, 7, 7)], [(12, 7, 7), (30, 7, 7), (200, 7, 7)],
         ["inner", "outer", None]),
        ([("mine", 0, 100, 7, 7), ("theirs", 10, 90, 7, 8)], [(50, 7, 7), (50, 7, 8)], ["mine", "theirs"]),
        ([("first", 0, 100, 7, 7), ("second", 0, 100, 9, 9)], [(10, 7, 7), (11, 9, 9)], ["first", "second"]),
        ([("open", 0, None, 7, 7), ("closed", 5, 8, 7, 7)], [(50, 7, 7)], ["open"]),
    ],
    ids=["innermost", "of its thread", "of its process", "never left"],
)  # fmt: skip
def test_a_kernel_belongs_to_the_range_around_its_launch(
    tmp_path: Path,
    ranges: list[tuple[str, int, int | None, int, int]],
    launches: list[tuple[int, int, int]],
    expected: list[str | None],
) -> None:
    export = Export()
    for name, begin, end, pid, tid in ranges:
        export.range(name, begin, end, pid=pid, tid=tid, registered=name == "inner")
    for number, (launched, pid, tid) in enumerate(launches):
        correlation = number if len({p for _, p, _ in launches}) == 1 else 1  # processes count each for itself
        begin = 5000 + 20 * number
        export.kernel("k", launched, begin, begin + 10, correlation, pid=pid, tid=tid)
    kernels = read_nsys(export.write(tmp_path / "r.sqlite")).kernels
    assert kernels["range"].tolist() == expected
    assert kernels["process_id"].tolist() == [pid for _, pid, _ in launches]


def test_kernels_of_a_graph_carry_its_node_and_the_graphs_launch(tmp_path: Path) -> None:
    export = Export()
    export.range("gpuprof-run", 0, 100)
    export.kernel("k", launched=10, start=20, end=30, correlation=1, graphNodeId=77)
    export.add(KERNEL, **{**export.rows[KERNEL][0], "start": 31, "end": 40, "graphNodeId": 78})
    kernels = read_nsys(export.write(tmp_path / "r.sqlite")).kernels
    assert kernels["graph_node"].tolist() == [77, 78]
    assert kernels["repeat"].tolist() == [0, 0]


def test_a_trace_without_kernels_is_an_error_and_one_of_whole_graphs_named_as_such(tmp_path: Path) -> None:
    export = Export()
    export.call(10, 1)
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=1, end=2, graphId=1)
    with pytest.raises(InputError, match=r"CUDA graphs as wholes.*--cuda-graph-trace=node"):
        read_nsys(export.write(tmp_path / "r.sqlite"))
    ranges = Export()
    ranges.range("gpuprof-run", 0, 100)
    with pytest.raises(InputError, match="no kernel and no CUDA call"):
        read_nsys(ranges.write(tmp_path / "ranges.sqlite"))


def test_columns_that_a_version_lacks_are_missing_and_not_zero(tmp_path: Path) -> None:
    path = two_runs().write(tmp_path / "r.sqlite", drop={KERNEL: ["graphNodeId", "registersPerThread"]})
    kernels = read_nsys(path).kernels
    assert "registers_per_thread" not in kernels and "graph_node" not in kernels
    assert kernels["repeat"].tolist() == [-1, 0, 0, 0, 1, 1, 1]


def test_a_needed_column_that_is_gone_is_named(tmp_path: Path) -> None:
    path = two_runs().write(tmp_path / "r.sqlite", drop={RUNTIME: ["correlationId"]})
    with pytest.raises(InputError, match=r"CUPTI_ACTIVITY_KIND_RUNTIME.*no column correlationId"):
        read_nsys(path)


def test_launches_that_are_not_in_the_report_are_counted(tmp_path: Path) -> None:
    export = two_runs()
    export.rows[RUNTIME] = [row for row in export.rows[RUNTIME] if row["correlationId"] != 11]
    timeline = read_nsys(export.write(tmp_path / "r.sqlite"))
    assert timeline.notes == ("1 of 7 kernels have no launch call in the report",)


def test_a_file_of_another_tool_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end)")
    connection.close()
    with pytest.raises(InputError, match="not one that nsys export wrote"):
        read_nsys(path)
    text = tmp_path / "text.sqlite"
    text.write_text("ID,Kernel Name\n")
    with pytest.raises(InputError, match="not a SQLite file"):
        read_nsys(text)
    with pytest.raises(InputError, match="cannot read"):
        read_nsys(tmp_path / "nowhere.sqlite")


def test_a_truncated_file_is_an_error_and_not_fewer_kernels(tmp_path: Path) -> None:
    export = two_runs(kernels=400)
    whole = export.write(tmp_path / "r.sqlite").read_bytes()
    for part in (3, 2):
        cut = tmp_path / f"cut{part}.sqlite"
        cut.write_bytes(whole[: len(whole) * (part - 1) // part])
        with pytest.raises(InputError, match="cut off or damaged"):
            read_nsys(cut)


@pytest.mark.parametrize("value", ["word", b"\xff", 2.0**70, None])
def test_damaged_cells_are_unknown(tmp_path: Path, value: object) -> None:
    export = two_runs()
    export.kernel("k0", 2990, 3000, 3060, 300, registersPerThread=value)
    export.add("NVTX_EVENTS", start=3000, end=value, eventType=59, globalTid=value, text="gpuprof-run")
    timeline = read_nsys(export.write(tmp_path / "r.sqlite"))
    assert timeline.repeats == 2 and np.isnan(timeline.kernels["registers_per_thread"].iloc[-1])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    report = two_runs().write(tmp_path / "source.sqlite")
    body = _FAKE.format(log=tmp_path / "command", report=report, ending=".nsys-rep")
    binary = write_program(tmp_path / "bin-nsys", body)
    monkeypatch.setattr(nsys, "find_tool", lambda name: binary)
    return tmp_path


def test_a_recording_traces_graphs_node_by_node(fake: Path) -> None:
    report = record_program(["python", "-c", "pass"], fake / "x", time_limit_s=30)
    assert report == fake / "x.nsys-rep"
    words = (fake / "command").read_text().split()
    assert "--cuda-graph-trace=node" in words and "--trace=cuda,nvtx" in words
    assert words[-3:] == ["python", "-c", "pass"]
    with export_report(report) as sqlite:
        assert len(read_nsys(sqlite).kernels) == 7
    assert not sqlite.exists()


def test_a_tool_that_leaves_no_report_is_an_error(fake: Path) -> None:
    write_program(fake / "bin-nsys", "echo 'nothing collected'")
    with pytest.raises(UnavailableError, match="left no report: nothing collected"):
        record_program(["true"], fake / "x", time_limit_s=30)


def test_a_raw_recording_is_imported_or_the_importer_is_missed(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = fake / "x.qdstrm"
    raw.touch()
    monkeypatch.setattr(nsys, "_IMPORTER_PLACES", ("lib/host-linux-*/QdstrmImporter",))
    with pytest.raises(UnavailableError, match="nsys's importer is not installed"), export_report(raw):
        pass
    (fake / "lib" / "host-linux-x64").mkdir(parents=True)
    write_program(fake / "lib" / "host-linux-x64" / "QdstrmImporter", 'touch "$4"')
    with export_report(raw) as sqlite:
        assert sqlite.is_file()
    with pytest.raises(InputError, match="no such file"), export_report(fake / "none.nsys-rep"):
        pass


def test_a_report_that_nsys_refuses_is_named(fake: Path) -> None:
    report = fake / "x.nsys-rep"
    report.touch()
    write_program(fake / "bin-nsys", "echo 'Exportation error: Cannot read from stream.'; exit 1")
    with (
        pytest.raises(InputError, match=r"bin-nsys cannot read .*x\.nsys-rep: Exportation error"),
        export_report(report),
    ):
        pass


def test_without_nsys_what_to_install_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys, "find_tool", lambda name: None)
    with pytest.raises(UnavailableError, match=r"nsys is not installed \(apt-get install nsight-systems"):
        record_program(["true"], tmp_path / "x", time_limit_s=1)


@pytest.mark.slow
@pytest.mark.skipif(find_tool("nsys") is None, reason="nsys is not installed: .ci/install-nsys.sh unpacks Debian's")
def test_the_real_nsys_records_and_exports_a_program(tmp_path: Path) -> None:
    report = record_program([sys.executable, "-c", "pass"], tmp_path / "x", time_limit_s=120)
    with export_report(report) as sqlite, pytest.raises(InputError, match="no kernel and no CUDA call"):
        read_nsys(sqlite)


def test_a_tool_that_dies_shows_its_last_words_and_where_the_rest_is(tmp_path: Path) -> None:
    tool = write_program(tmp_path / "tool", "echo 'Error: no such device' >&2; echo bye; exit 7")
    with pytest.raises(UnavailableError, match=r"tool failed \(exit code 7\): Error: no such device \(log: .*log\)"):
        run_tool([str(tool)], time_limit_s=30)
    killed = write_program(tmp_path / "killed", "kill -SEGV $$")
    with pytest.raises(UnavailableError, match="signal SIGSEGV"):
        run_tool([str(killed)], time_limit_s=30)
    with pytest.raises(UnavailableError, match=r"cannot start nowhere: No such file"):
        run_tool([str(tmp_path / "nowhere")], time_limit_s=30)


def test_a_known_complaint_is_said_with_its_cure(tmp_path: Path) -> None:
    tool = write_program(tmp_path / "ncu", "echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1")
    with pytest.raises(UnavailableError, match="RestrictProfilingToAdminUsers"):
        run_tool([str(tool)], time_limit_s=30, explain=known_failure)


@pytest.mark.parametrize("stubborn", ["", "trap '' TERM; "], ids=["", "ignores SIGTERM"])
def test_a_hanging_tool_ends_with_all_children(tmp_path: Path, stubborn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuprof.profiling.nsight.tool_process.REACTION_S", 0.5)
    pid_file = tmp_path / "pid"
    tool = write_program(
        tmp_path / "tool", f"{stubborn}echo working; sleep 600 & echo $! > {pid_file}; wait; sleep 600"
    )
    with pytest.raises(UnavailableError, match=r"did not end within 1 s and was ended: working .*--profiler-limit"):
        run_tool([str(tool)], time_limit_s=1)
    assert _wait_for_end(int(pid_file.read_text()))


def test_the_log_of_one_that_failed_is_kept(tmp_path: Path) -> None:
    tool = write_program(tmp_path / "tool", "seq 3000; echo 'error: at the end'; exit 3")
    with pytest.raises(UnavailableError) as raised:
        run_tool([str(tool)], time_limit_s=30)
    log = Path(raised.value.fix.removeprefix("log: "))
    try:
        assert log.read_text().startswith("1\n2\n") and log.read_text().endswith("error: at the end\n")
    finally:
        log.unlink()


@pytest.mark.parametrize(
    ("printed", "version"),
    [
        ("NVIDIA Nsight Systems version 2024.6.1.90-246160830v0", "2024.6.1.90"),
        ("NVIDIA (R) Nsight Compute Command Line Profiler\nCopyright (c) 2018-2025\nVersion 2025.3.1.0 (build 1)",
         "2025.3.1.0"),
        ("Usage: nsys", None),
    ],
)  # fmt: skip
def test_the_version_is_read_from_what_each_tool_prints(tmp_path: Path, printed: str, version: str | None) -> None:
    assert tool_version(write_program(tmp_path / "tool", f"echo '{printed}'")) == version


def test_a_tool_that_fails_hangs_or_is_not_there_has_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuprof.profiling.nsight.tool_process.REACTION_S", 0.5)
    pid_file = tmp_path / "pid"
    assert ask_tool([str(write_program(tmp_path / "a", "echo 1; exit 1"))], 30) is None
    assert ask_tool([str(tmp_path / "nowhere")], 30) is None
    hangs = write_program(tmp_path / "b", f"sleep 600 & echo $! > {pid_file}; wait")
    assert ask_tool([str(hangs)], 1) is None
    assert _wait_for_end(int(pid_file.read_text()))


def test_children_that_a_tool_leaves_behind_are_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    tool = write_program(tmp_path / "tool", f"sleep 600 & echo $! > {pid_file}")
    run_tool([str(tool)], time_limit_s=30)
    assert _wait_for_end(int(pid_file.read_text()))


def _wait_for_end(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return True
    return eventually(lambda: has_ended(process))
