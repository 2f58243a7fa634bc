"""Imports recordings made elsewhere: reports of nsys, ncu, both joined, or torch.profiler."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gpuprof
from gpuprof.domain.device import Device
from gpuprof.domain.file_access import refuse_pipe
from gpuprof.domain.gpu_description import GpuDescription, describe_device
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import Sizes, describe_sizes
from gpuprof.errors import InputError
from gpuprof.graph.load import load_runnable, require_sizes
from gpuprof.kernel_db.schema import RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id
from gpuprof.profiling.child.job import Job, Request
from gpuprof.profiling.collector import Collected, record_dims
from gpuprof.profiling.gpu.gpu_rows import Recording, device_rows, kernel_rows, model_row, op_rows
from gpuprof.profiling.gpu.kineto_trace import read_kineto
from gpuprof.profiling.nsight.ncu_report import Counters, read_ncu_csv, read_ncu_rep
from gpuprof.profiling.nsight.nsys_report import read_nsys
from gpuprof.profiling.nsight.nsys_tool import export_report
from gpuprof.profiling.timeline.kernel_join import join_kernels
from gpuprof.profiling.timeline.timeline import Timeline, column
from gpuprof.runtime.executed_variant import arithmetic_precision
from gpuprof.runtime.providers import NODE_RANGE

#: nsys called its reports .qdrep until 2021.3; .qdstrm is a recording that it has not converted yet.
_NSYS, _NCU = (".nsys-rep", ".qdrep", ".qdstrm"), (".ncu-rep", ".ncu-repz")
_UNTIMED = "the latency of a batch is not in a report: what a profiler slows down is no latency"


class ReplayCollector:
    """Returns rows from existing reports instead of running anything.

    ``paths``: at most one timeline (nsys, torch.profiler) and one report with counters (ncu), of the same program;
    ``recording``: the part of them that counts, where they are of several GPUs: one of `read_reports`.
    """

    name = "replay"
    kinds: tuple[str, ...] = ("gpu",)

    def __init__(self, paths: Sequence[Path] = (), recording: Recording | None = None) -> None:
        self.paths = tuple(paths)
        self._recording = recording

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

        Raises `InputError` when one is not readable, they do not go together, or are of several GPUs;
        `UnavailableError` when one needs a tool to be read that is not here.
        """
        if self._recording is None:
            recordings = read_reports(self.paths)
            if len(recordings) > 1:
                raise InputError(f"the reports are of {len(recordings)} GPUs", "take them one by one")
            self._recording = recordings[0]
        return self._recording

    def collect(self, request: Request) -> Collected:
        """Return the rows of ``request``; see `gpuprof.profiling.collector.Collector`."""
        recording = self.recording().estimate_occupancy(request.device)
        needed = recording.requirement(request.device)
        variant = _find_variant(recording, request)
        return Collected(
            models=(replace(model_row(request, needed), **variant),),
            ops=tuple(replace(row, **variant) for row in op_rows(request, recording.kernels)),
            kernels=tuple(replace(row, **variant) for row in kernel_rows(request, recording.kernels)),
            devices=device_rows(request, recording),
            settings={"reports": [str(path) for path in self.paths]},
            notes=(*recording.notes, *(needed.notes if needed else ()), _UNTIMED),
        )


def _find_variant(recording: Recording, request: Request) -> dict[str, Any]:
    """Return what reports say of how the model was executed: torch.profiler sees PyTorch, the others any runtime."""
    if "torch.profiler" not in recording.tools:
        return {}
    within = column(recording.kernels, "range").astype("object")
    eager = any(isinstance(name, str) and name.startswith(NODE_RANGE) for name in within)
    precision = arithmetic_precision(request.job.graph, request.device) if eager else None
    return {"runtime": "pytorch", "execution": "eager" if eager else None, "precision": precision}


def read_reports(paths: Sequence[Path]) -> tuple[Recording, ...]:
    """Return what reports of one program hold, joined kernel by kernel where there are a timeline and counters.

    Raises `InputError` when one is no report, or there are two timelines or two reports with counters;
    `UnavailableError` when a report needs nsys or ncu to be read.

    Returns
    -------
    tuple of Recording
        One for each GPU that kernels ran on, in the order of their indices.
    """
    reports = [read_report(path) for path in paths]
    timelines = [each for each in reports if isinstance(each, Timeline)]
    counters = [each for each in reports if isinstance(each, Counters)]
    if not reports or len(timelines) > 1 or len(counters) > 1:
        raise InputError(
            f"one timeline and one report with counters can be joined but got {len(timelines)} and {len(counters)}",
            "ingest them one after another",
        )
    counted = counters[0].by_gpu() if counters else {}
    if not timelines:
        return tuple(_recording_of_counters(one, gpu, len(counted)) for gpu, one in counted.items())
    parts = timelines[0].select_runs().by_gpu()
    return tuple(_join_tools(part, _counters_of_gpu(counted, gpu, len(parts))) for gpu, part in parts.items())


def _counters_of_gpu(counted: Mapping[int, Counters], gpu: int, gpus: int) -> Counters | None:
    """Return the counters of a GPU; where both reports have one alone, its index need not be the same."""
    if gpus == 1 and len(counted) == 1:
        return next(iter(counted.values()))
    return counted.get(gpu)


def _join_tools(timeline: Timeline, counters: Counters | None) -> Recording:
    notes, kernels = list(timeline.notes), timeline.kernels
    tools = {timeline.tool: timeline.version}
    gpus = _list_used_gpus(timeline)
    if counters is not None:
        kernels, unmatched = join_kernels(kernels, counters.kernels)
        notes += unmatched
        tools["ncu"] = ""
        gpus = gpus or tuple(counters.gpus.values())
    return Recording(kernels, timeline.copies, gpus, tools, tuple(notes))


def _list_used_gpus(timeline: Timeline) -> tuple[GpuDescription, ...]:
    used = {int(index) for index in column(timeline.kernels, "device_index").dropna().unique()}
    return tuple(dict.fromkeys(gpu for index, gpu in timeline.gpus.items() if not used or index in used))


def read_report(path: Path) -> Timeline | Counters:
    """Return a report's content; its format is told by its first bytes, not by its name.

    Raises `InputError` when it is none that gpuprof knows; `UnavailableError` when it needs nsys or ncu to be read.
    """
    refuse_pipe(path)
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
    # gzip's magic number, or the beginning of a JSON document.
    if head.startswith(b"\x1f\x8b") or head.lstrip()[:1] in (b"{", b"["):
        return read_kineto(path)
    return read_ncu_csv(path)


def ingest(database: KernelDb, collector: ReplayCollector, job: Job, device: Device) -> Collected:
    """Append one run with the reports' rows and where they came from; return the rows."""
    started = datetime.now(UTC)
    request = Request(new_run_id(started), started, device, job)
    collected = record_dims(collector.collect(request), (job,))
    run = RunRow(
        **request.columns(),
        started_at=started,
        collector=collector.name,
        model_sha256=job.graph.sha256 or None,
        model_path=job.graph.path or None,
        dims=describe_sizes(job.graph.sizes) or None,
        processes=job.processes,
        host=platform.node(),
        collector_version=collector.version(),
        gpuprof_version=gpuprof.__version__,
        command=shlex.join(sys.argv),
        settings=json.dumps(dict(collected.settings), sort_keys=True),
        source=" + ".join(str(path) for path in collector.paths),
        source_sha256=_hash_reports(collector.paths),
        notes="; ".join(collected.notes) or None,
    )
    database.append(Run(run, collected.devices, collected.models, collected.ops, collected.kernels))
    return collected


def replayed_job(text: str | None, batch: int, share: Share, reports: Sequence[Path], sizes: Sizes = ()) -> Job:
    """Return the job that reports are of: an ONNX file's, or one that is known by name only.

    ``text``: a path, ``NAME=path``, or a name; None: the first report's stem; ``sizes``: of its free dimensions in the
    recording.
    """
    name, _, given = (text or reports[0].name.split(".")[0]).rpartition("=")
    path = Path(given)
    if path.is_file():
        graph = load_runnable(path, batch, name or path.stem, dict(sizes))
        return Job(require_sizes(graph), path, share)
    if path.suffix == ".onnx":
        raise InputError(f"there is no model file {path}", "name the model that was recorded, or leave it out")
    return Job(ModelGraph(given, batch, (), (), (), (), 0, "", "", sizes), path, share)


def device_of_recording(recorded: Recording) -> Device:
    """Return the device that reports were recorded on: of the catalogue, else as they describe it.

    Raises `InputError` when they do not say, say several, or say too little of a board that the catalogue does not
    have.
    """
    found = {device.name: device for gpu in recorded.gpus if (device := describe_device(gpu)) is not None}
    if len(found) == 1 and all(describe_device(gpu) is not None for gpu in recorded.gpus):
        return next(iter(found.values()))
    said = " and ".join(gpu.name for gpu in recorded.gpus) or "no GPU"
    raise InputError(f"the reports name {said}, which does not tell the device", "name it: --device h200")


def _recording_of_counters(counters: Counters, gpu: int, gpus: int) -> Recording:
    kernels = counters.kernels.assign(repeat=0, joined="counters")
    notes = ["only counters: kernels' order in time and overlap are not known"]
    notes += [f"GPU {gpu} of {gpus} in the report"] if gpus > 1 else []
    return Recording(kernels, None, tuple(counters.gpus.values()), {"ncu": ""}, tuple(notes))


def _hash_reports(paths: Sequence[Path]) -> str:
    """Return the hash of the report, of several that of their hashes."""
    hashes = []
    for path in paths:
        with path.open("rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
