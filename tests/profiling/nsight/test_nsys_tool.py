from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpuprof.errors import InputError, UnavailableError
from gpuprof.profiling.nsight import nsys_tool
from gpuprof.profiling.nsight.nsys_report import read_nsys
from gpuprof.profiling.nsight.nsys_tool import export_report, find_importer, find_nsys, record_program
from tests.profiling.fake_tools import write_program
from tests.profiling.models import write_mlp
from tests.profiling.nsys_files import two_runs
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time

# Copies the report to where it is told, as export does; records by writing one.
_FAKE = """
case "$1" in
--version) echo "NVIDIA Nsight Systems version 2024.6.1.90-246160830v0";;
profile) echo "$@" > {log}; while [ "$1" != -o ]; do shift; done; shift; touch "$1{ending}";;
export) while [ "$1" != -o ]; do shift; done; shift; cp {report} "$1";;
esac
"""

PROGRAM = """
import sys, nvtx
from pathlib import Path
from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.runtime.session import open_session
path = Path(sys.argv[1])
session = open_session(path, threads=1)
feeds = random_inputs(load_graph(path, 2))
for _ in range(3):
    with nvtx.annotate("gpuprof-run"):
        session.run(None, feeds)
with nvtx.annotate("the end"):
    pass
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    report = two_runs().write(tmp_path / "source.sqlite")
    body = _FAKE.format(log=tmp_path / "command", report=report, ending=".nsys-rep")
    binary = write_program(tmp_path / "bin-nsys", body)
    monkeypatch.setattr(nsys_tool, "find_nsys", lambda: binary)
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


def test_a_start_that_nsys_itself_lost_is_tried_once_more(fake: Path) -> None:
    lost = f"if mkdir {fake}/tried 2>/dev/null; then echo '= sem_open' >&2; exit 1; fi"
    whole = (fake / "bin-nsys").read_text().split("\n", 1)[1]
    write_program(fake / "bin-nsys", f"{lost}\n{whole}")
    assert record_program(["true"], fake / "x", time_limit_s=30) == fake / "x.nsys-rep"
    write_program(fake / "bin-nsys", "echo '= sem_open' >&2; exit 1")
    with pytest.raises(UnavailableError, match="sem_open"):
        record_program(["true"], fake / "x", time_limit_s=30)


def test_a_raw_recording_without_an_importer_says_what_is_missing(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = fake / "x.qdstrm"
    raw.touch()
    monkeypatch.setattr(nsys_tool, "find_importer", lambda _: None)
    with pytest.raises(UnavailableError, match="nsys's importer is not installed"), export_report(raw):
        pass
    with pytest.raises(InputError, match="no such file"), export_report(fake / "none.nsys-rep"):
        pass


def test_the_importer_is_found_where_debian_puts_it(tmp_path: Path) -> None:
    binary = tmp_path / "usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys"
    importer = tmp_path / "usr/lib/nsight-systems/host-linux-x64/QdstrmImporter"
    for path in (binary, importer):
        path.parent.mkdir(parents=True)
        path.touch()
    assert find_importer(binary) == importer


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
    monkeypatch.setattr(nsys_tool, "find_nsys", lambda: None)
    with pytest.raises(UnavailableError, match=r"nsys is not installed \(apt-get install nsight-systems"):
        record_program(["true"], tmp_path / "x", time_limit_s=1)


@pytest.mark.slow
@pytest.mark.skipif(find_nsys() is None, reason="nsys is not installed: .ci/install-nsys.sh unpacks Debian's")
def test_the_real_nsys_records_and_exports_a_run_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("nvtx")
    model = write_mlp(tmp_path / "mlp.onnx")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = str(Path(nsys_tool.__file__).parents[3])
    report = record_program(
        [sys.executable, str(program), str(model)],
        tmp_path / "x",
        time_limit_s=120,
        trace="nvtx",
        environment={"PYTHONPATH": root},
    )
    with export_report(report) as sqlite, pytest.raises(InputError, match="no kernel and no CUDA call"):
        read_nsys(sqlite)
