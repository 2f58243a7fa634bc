"""Takes what was recorded elsewhere into the database: reports of nsys, ncu, both joined, or torch.profiler."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

import gpuprof
from gpuprof.domain.catalogue import device_of_driver
from gpuprof.domain.device import Device
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.schema import RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id
from gpuprof.profiling.child.job import Job, Request
from gpuprof.profiling.collector import Collected
from gpuprof.profiling.gpu.gpu_rows import Recording, device_rows, kernel_rows, model_row, op_rows
from gpuprof.profiling.gpu.kineto_trace import read_kineto
from gpuprof.profiling.nsight.ncu_report import Counters, read_ncu_csv, read_ncu_rep
from gpuprof.profiling.nsight.nsys_report import read_nsys
from gpuprof.profiling.nsight.nsys_tool import export_report
from gpuprof.profiling.timeline.kernel_join import join_kernels
from gpuprof.profiling.timeline.timeline import Timeline, column

_NSYS, _NCU = (".nsys-rep", ".qdrep", ".qdstrm"), (".ncu-rep", ".ncu-repz")
_UNTIMED = "the latency of a batch is not in a report: what a profiler slows down is no latency"


class ReplayCollector:
    """Gives what reports hold of a request, instead of running anything.

    Parameters
    ----------
    paths : sequence of Path
        At most one timeline (nsys, torch.profiler) and one report with counters (ncu), of the same program.
    """

    name = "replay"
    kinds: tuple[str, ...] = ("gpu",)

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self.paths = tuple(paths)
        self._recorded: Recording | None = None

    def available(self) -> str | None:
        """Return None when there are reports to read."""
        return None if self.paths else "it reads reports: name them with --from-report"

    def version(self) -> str:
        """Return the tools that recorded, with their versions."""
        return ", ".join(f"{tool} {version}".strip() for tool, version in self.recording().tools.items())

    def runtime(self) -> tuple[str, str]:
        """Return what ran the model: a report does not say."""
        return "unknown", "unknown"

    def recording(self) -> Recording:
        """Return the content of the reports, reading them once.

        Raises
        ------
        InputError
            When one is not readable, or they do not go together.
        UnavailableError
            When one needs a tool to be read that is not here.
        """
        if self._recorded is None:
            self._recorded = read_reports(self.paths)
        return self._recorded

    def collect(self, request: Request) -> Collected:
        """Return the rows of ``request``; see `gpuprof.profiling.collector.Collector`."""
        found = self.recording()
        return Collected(
            models=(model_row(request, found),),
            ops=op_rows(request, found.kernels),
            kernels=kernel_rows(request, found.kernels),
            devices=device_rows(request, found),
            settings={"reports": [str(path) for path in self.paths]},
            notes=(*found.notes, _UNTIMED),
        )


def read_reports(paths: Sequence[Path]) -> Recording:
    """Return what reports of one program hold, joined kernel by kernel where there are a timeline and counters.

    Raises
    ------
    InputError
        When one is no report, or there are two timelines or two reports with counters.
    UnavailableError
        When a report needs nsys or ncu to be read.
    """
    found = [read_report(path) for path in paths]
    timelines = [each for each in found if isinstance(each, Timeline)]
    counters = [each for each in found if isinstance(each, Counters)]
    if not found or len(timelines) > 1 or len(counters) > 1:
        raise InputError(
            f"one timeline and one report with counters can be joined but got {len(timelines)} and {len(counters)}",
            "ingest them one after another",
        )
    if not timelines:
        return _only_counted(counters[0])
    timeline = timelines[0].select_runs()
    notes = list(timeline.notes)
    kernels, tools = timeline.kernels, {timeline.tool: timeline.version}
    if counters:
        kernels, unmatched = join_kernels(_without_estimates(kernels), counters[0].kernels)
        notes += unmatched
        tools["ncu"] = ""
    used = {int(index) for index in column(timeline.kernels, "device_index").dropna().unique()}
    gpus = tuple(dict.fromkeys(name for index, name in timeline.gpus.items() if not used or index in used))
    return Recording(kernels, timeline.copies, gpus or _gpu_names(counters), tools, tuple(notes))


def read_report(path: Path) -> Timeline | Counters:
    """Return a report's content; what it is stands in its first bytes, not in its name.

    Raises
    ------
    InputError
        When it is none that gpuprof knows.
    UnavailableError
        When it needs nsys or ncu to be read.
    """
    if path.suffix in _NCU:
        return read_ncu_rep(path)
    if path.suffix in _NSYS:
        with export_report(path) as sqlite:
            return read_nsys(sqlite)
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if not head:
        raise InputError(f"{path} is empty", "was the recording cut off, or the disk full?")
    if head.startswith(b"SQLite format 3\x00"):
        return read_nsys(path)
    if head.startswith(b"\x1f\x8b") or head.lstrip()[:1] in (b"{", b"["):
        return read_kineto(path)
    return read_ncu_csv(path)


def ingest(database: KernelDb, collector: ReplayCollector, job: Job, device: Device) -> Collected:
    """Append one run with the reports' rows and where they came from; return the rows."""
    started = datetime.now(UTC)
    request = Request(new_run_id(started), started, device, job)
    collected = collector.collect(request)
    run = RunRow(
        run_id=request.run_id,
        started_at=started,
        device=device.name,
        collector=collector.name,
        model=job.graph.name,
        model_sha256=job.graph.sha256 or None,
        model_path=job.graph.path or None,
        batch=job.graph.batch,
        sm_share_pct=job.share.sm_pct,
        mig_profile=job.share.mig,
        processes=job.processes,
        host=platform.node(),
        collector_version=collector.version(),
        gpuprof_version=gpuprof.__version__,
        command=shlex.join(sys.argv),
        settings=json.dumps(dict(collected.settings), sort_keys=True),
        source=" + ".join(str(path) for path in collector.paths),
        source_sha256=_sha256(collector.paths),
        notes="; ".join(collected.notes) or None,
    )
    database.append(Run(run, collected.devices, collected.models, collected.ops, collected.kernels))
    return collected


def replayed_job(text: str | None, batch: int, share: Share, reports: Sequence[Path]) -> Job:
    """Return the job that reports are of: an ONNX file's, or one that is known by name only.

    Parameters
    ----------
    text : str or None
        A path, ``NAME=path``, or a name; None: the first report's stem.
    """
    name, _, given = (text or reports[0].name.split(".")[0]).rpartition("=")
    path = Path(given)
    if path.is_file():
        return Job(load_graph(path, batch, name or path.stem), path, share)
    if path.suffix == ".onnx":
        raise InputError(f"there is no model file {path}", "name the model that was recorded, or leave it out")
    return Job(ModelGraph(given, batch, (), (), (), (), 0, "", ""), path, share)


def device_of_recording(recorded: Recording) -> Device:
    """Return the device of the catalogue that reports were recorded on.

    Raises
    ------
    InputError
        When they do not say, say several, or one that the catalogue does not have.
    """
    known = {gpu: device_of_driver(gpu) for gpu in recorded.gpus}
    devices = list({device.name: device for device in known.values() if device is not None}.values())
    if len(devices) == 1 and None not in known.values():
        return devices[0]
    said = " and ".join(recorded.gpus) or "no GPU"
    raise InputError(f"the reports name {said}, which does not tell the device", "name it: --device h200")


def _only_counted(counters: Counters) -> Recording:
    kernels = counters.kernels.assign(repeat=0, joined="counters")
    notes = ("only counters: kernels' order in time and overlap are not known",)
    return Recording(kernels, None, _gpu_names([counters]), {"ncu": ""}, notes)


def _gpu_names(counters: Sequence[Counters]) -> tuple[str, ...]:
    return tuple(each.gpu for each in counters if each.gpu)


def _without_estimates(kernels: pd.DataFrame) -> pd.DataFrame:
    """Leave out what a timeline estimates and counters measure."""
    return kernels.drop(columns="achieved_occupancy_pct", errors="ignore")


def _sha256(paths: Sequence[Path]) -> str:
    """Return the hash of the report, of several that of their hashes."""
    hashes = []
    for path in paths:
        with path.open("rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
