"""Finds and runs Nsight Systems: recording a program, and turning a recording into SQLite."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpuprof.errors import GpuprofError, InputError, UnavailableError
from gpuprof.profiling.nsight.tool_process import find_tool, run_tool

#: Message of nsys 2022.4 on a busy machine when the program ends before nsys has opened its semaphore.
_START_RACE = "sem_open"
_IMPORTER_PLACES = (
    "usr/lib/nsight-systems/host-linux-*/QdstrmImporter",
    "opt/nvidia/nsight-systems*/*/host-linux-*/QdstrmImporter",
)
_INSTALL = "apt-get install nsight-systems (Debian: non-free) or nsight-systems-cli (NVIDIA's repository)"


def find_nsys() -> Path | None:
    """Return the path of nsys; None if not installed."""
    return find_tool("nsys")


def record_program(
    command: Sequence[str],
    report: Path,
    *,
    time_limit_s: float,
    trace: str = "cuda,nvtx",
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Run ``command`` under ``nsys profile`` and return the report's path.

    Raises `UnavailableError` when nsys is missing, fails, takes too long or leaves no report. ``report``: path without
    an ending, also of the log. ``trace``: event kinds to record. CUDA graphs are recorded node by node: nsys's own
    default hides their kernels.
    """
    binary = _require_nsys()
    # Sampling of the CPU and of context switches is off: it needs privileges and slows the program down.
    options = ["--sample=none", "--cpuctxsw=none", "--force-overwrite=true", f"--trace={trace}"]
    if "cuda" in trace.split(","):
        options.append("--cuda-graph-trace=node")
    log = report.with_name(f"{report.name}.nsys.log")
    whole = [str(binary), "profile", *options, "-o", str(report), *command]
    try:
        output = run_tool(whole, log=log, time_limit_s=time_limit_s, environment=environment)
    except UnavailableError as error:
        if _START_RACE not in str(error):
            raise
        output = run_tool(whole, log=log, time_limit_s=time_limit_s, environment=environment)
    paths = [report.with_name(report.name + ending) for ending in (".nsys-rep", ".qdrep", ".qdstrm")]
    for path in paths:
        if path.is_file():
            return path
    raise UnavailableError(f"nsys left no report: {output.strip()[-200:]}", f"log: {log}")


@contextmanager
def export_report(report: Path) -> Iterator[Path]:
    """Yield the SQLite file of a report, removed on exit.

    A raw recording (``.qdstrm``), left by an nsys without its importer, is imported first. Raises `InputError` when the
    report is missing, or refused by nsys; `UnavailableError` when nsys or its importer is
    missing or hangs.
    """
    if not report.is_file():
        raise InputError(f"cannot read {report}: no such file")
    binary = _require_nsys()
    with tempfile.TemporaryDirectory(prefix="gpuprof-") as name:
        directory = Path(name)
        if report.suffix == ".qdstrm":
            report = _import_recording(report, binary, directory)
        sqlite = directory / "report.sqlite"
        command = [str(binary), "export", "--type=sqlite", "--force-overwrite=true", "-o", str(sqlite), str(report)]
        output = _run_reader(command, report, directory / "export.log")
        if not sqlite.is_file():
            raise UnavailableError(f"nsys exported nothing of {report}: {output.strip()[-200:]}")
        yield sqlite


def find_importer(binary: Path) -> Path | None:
    """Return the program that converts a raw recording into a report; None without the host part of nsys."""
    for root in binary.resolve().parents:
        for place in ("host-linux-*/QdstrmImporter", *_IMPORTER_PLACES):
            if importers := sorted(root.glob(place)):
                return importers[-1]
    return None


def _import_recording(recording: Path, binary: Path, directory: Path) -> Path:
    importer = find_importer(binary)
    if importer is None:
        raise UnavailableError(
            f"{recording} is a raw recording, and nsys's importer is not installed",
            "install nsight-systems-host, or import it on a machine that has it: QdstrmImporter -i FILE",
        )
    report = directory / f"{recording.stem}.nsys-rep"
    command = [str(importer), "-i", str(recording), "-o", str(report)]
    _run_reader(command, recording, directory / "import.log")
    return report


def _run_reader(command: Sequence[str], report: Path, log: Path) -> str:
    """Run a program that reads a report; a refused report is an input error."""

    def explain_refusal(output: str) -> GpuprofError:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or "invalid" in line.lower()]
        return InputError(
            f"{Path(command[0]).name} cannot read {report}: {(telling or lines or ['it does not say why'])[-1]}",
            "is it whole, and of a version that is not newer?",
        )

    return run_tool(command, log=log, explain=explain_refusal)


def _require_nsys() -> Path:
    binary = find_nsys()
    if binary is None:
        raise UnavailableError("nsys is not installed", _INSTALL)
    return binary
