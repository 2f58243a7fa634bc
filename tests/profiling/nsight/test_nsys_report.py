from __future__ import annotations

import sqlite3
from pathlib import Path

import pandas as pd
import pytest

from gpuprof.domain.catalogue import GpuDescription
from gpuprof.errors import InputError
from gpuprof.profiling.nsight.nsys_report import read_nsys
from tests.profiling.nsys_files import KERNEL, MEMCPY, RUNTIME, Export, two_runs


@pytest.mark.parametrize("new", [False, True], ids=["schema 3.0", "schema 3.16"])
def test_old_and_new_exports_give_the_same_kernels(tmp_path: Path, new: bool) -> None:
    timeline = read_nsys(two_runs().write(tmp_path / "r.sqlite", new=new))
    kernels = timeline.kernels
    assert kernels["name"].tolist()[:3] == ["void warm(float*)", "void k0(float*)", "void k1(float*)"]
    assert kernels["repeat"].tolist() == [-1, 0, 0, 0, 1, 1, 1]
    assert kernels["grid_x"].tolist() == [80, 80, 81, 82, 80, 81, 82]
    assert kernels["duration_ns"].tolist() == [20, *[60] * 6]
    assert timeline.gpus == {0: GpuDescription("Tesla V100-SXM2-16GB")}
    assert timeline.version == ("2024.6.1.90 (schema 3.16.0)" if new else "2022.4.2.1 (schema 3.0.0)")


def test_copies_have_their_direction_and_run(tmp_path: Path) -> None:
    copies = read_nsys(two_runs().write(tmp_path / "r.sqlite")).copies
    assert copies["direction"].tolist() == ["h2d", "d2h"] * 2
    assert copies["bytes"].tolist() == [4096, 64] * 2
    assert copies["repeat"].tolist() == [0, 0, 1, 1]
    assert copies["memory"].isna().all()


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


def test_a_trace_of_whole_graphs_is_named_as_such_and_never_read_as_no_kernels(tmp_path: Path) -> None:
    export = Export()
    export.call(10, 1)
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=1, end=2, graphId=1)
    with pytest.raises(InputError, match=r"CUDA graphs as wholes.*--cuda-graph-trace=node"):
        read_nsys(export.write(tmp_path / "r.sqlite"))


def test_a_missing_kernel_table_is_an_error(tmp_path: Path) -> None:
    export = Export()
    export.range("gpuprof-run", 0, 100)
    path = export.write(tmp_path / "r.sqlite")
    with pytest.raises(InputError, match="no kernel and no CUDA call"):
        read_nsys(path)


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
