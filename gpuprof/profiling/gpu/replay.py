"""Imports existing recordings: reports of nsys, ncu, torch.profiler and ONNX Runtime, joined if they match."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import gpuprof
from gpuprof.domain.catalogue import describe_device
from gpuprof.domain.device import Device
from gpuprof.domain.file_access import refuse_pipe
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import Sizes, describe_sizes
from gpuprof.errors import InputError
from gpuprof.graph.executed_graph import ExecutedNode, read_executed
from gpuprof.graph.load import load_runnable, require_sizes
from gpuprof.kernel_db.schema import ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id
from gpuprof.profiling.collector import Collected, record_dims
from gpuprof.profiling.gpu.gpu_rows import Recording, device_rows, kernel_rows, model_row, op_rows
from gpuprof.profiling.gpu.node_join import join_nodes
from gpuprof.profiling.nsight.ncu import Counters, parse_ncu_csv, read_ncu_rep, read_text
from gpuprof.profiling.nsight.nsys import export_report, is_nsys_csv, parse_nsys_csv, read_nsys
from gpuprof.profiling.timeline.json_trace import read_json_trace
from gpuprof.profiling.timeline.timeline import Timeline, column, join_kernels
from gpuprof.profiling.worker.job import Job, Request, summarize

#: .qdrep was nsys's format until 2021.3; .qdstrm is a recording not yet converted by nsys.
_NSYS, _NCU = (".nsys-rep", ".qdrep", ".qdstrm"), (".ncu-rep", ".ncu-repz")
_UNTIMED = "no latency of a run: "
_ORT = "onnxruntime"


@dataclass(frozen=True)
class ReportSet:
    """Reports of a program, at most one of each kind."""

    timeline: Timeline | None = None  #: Kernels in time; without kernels, ONNX Runtime's profile.
    profile: Timeline | None = None  #: ONNX Runtime's profile of the same runs.
    counters: Counters | None = None
    executed: tuple[ExecutedNode, ...] = ()  #: Graph executed by ONNX Runtime.


def _latency_columns(recording: Recording, request: Request) -> tuple[dict[str, Any], str]:
    """Return the latency and throughput columns of the runs in a report, and a note on their source."""
    if recording.timeline is None:
        return {}, f"{_UNTIMED}counters replay kernels one by one"
    times, how = recording.timeline.run_times_ns()
    if not times:
        return {}, f"{_UNTIMED}{how}"
    stats = summarize([time / 1e6 for time in times], request.limits.precision)
    rate = request.job.graph.batch * 1e3 / stats.latency_mean_ms if stats.latency_mean_ms else None
    return {**asdict(stats), "throughput_rps": rate}, f"latencies are of runs under the profiler: {how}"


def _find_variant(recording: Recording) -> dict[str, Any]:
    """Return the runtime and the execution found in reports: torch.profiler sees PyTorch's operators."""
    if "torch.profiler" in recording.tools and _ORT not in recording.tools:
        return {"runtime": "pytorch", "execution": None, "precision": None}
    return {"runtime": "onnxruntime", "execution": "fused"} if _ORT in recording.tools else {}


def read_report_set(paths: Sequence[Path]) -> ReportSet:
    """Return reports of a program by their kinds.

    Raises `InputError` when a file is not a report, or two reports are of the same kind; `UnavailableError` when
    reading a report requires nsys or ncu.
    """
    graphs = [path for path in paths if path.suffix == ".onnx"]
    reports = [read_report(path) for path in paths if path.suffix != ".onnx"]
    timelines = [report for report in reports if isinstance(report, Timeline)]
    profiles = [timeline for timeline in timelines if timeline.tool == _ORT]
    recorded = [timeline for timeline in timelines if timeline.tool != _ORT]
    counters = [report for report in reports if isinstance(report, Counters)]
    counts = [len(part) for part in (recorded, profiles, counters, graphs)]
    if not reports or max(counts) > 1:
        raise InputError(
            "one timeline, one profile of ONNX Runtime, one report with counters and one optimized graph can be joined "
            f"but got {counts[0]}, {counts[1]}, {counts[2]} and {counts[3]}",
            "ingest them one after another",
        )
    return ReportSet(
        timeline=next(iter(recorded), None) or next(iter(profiles), None),
        profile=profiles[0] if recorded and profiles else None,
        counters=next(iter(counters), None),
        executed=read_executed(graphs[0]) if graphs else (),
    )


def recordings_of(evidence: ReportSet, runs: str | None = None) -> tuple[Recording, ...]:
    """Return a recording for each GPU with kernels, by GPU index; a timeline and counters are joined kernel by kernel.

    ``runs``: as for `Timeline.select_runs`.
    """
    by_gpu = evidence.counters.by_gpu() if evidence.counters else {}
    if evidence.timeline is None:
        return tuple(_recording_of_counters(counters, gpu, len(by_gpu)) for gpu, counters in by_gpu.items())
    timeline = evidence.timeline
    if timeline.tool == _ORT:
        timeline = _take_nodes_as_kernels(timeline)
    if evidence.profile is None or runs is not None or timeline.repeats:
        timeline = timeline.select_runs(runs)
    if evidence.profile is not None:
        timeline = join_nodes(timeline, evidence.profile)
    parts = timeline.by_gpu()
    return tuple(_join_tools(part, _counters_of_gpu(by_gpu, gpu, len(parts)), evidence) for gpu, part in parts.items())


def split_runs(evidence: ReportSet, runs: str | None) -> dict[tuple[str | None, int | None], str | None]:
    """Return (model, batch) → pattern of its runs, if the pattern ``runs`` has groups of these names; else ``runs``."""
    if runs is None or runs.isdecimal() or evidence.timeline is None:
        return {(None, None): runs}
    try:
        pattern = re.compile(runs)
    except re.error as error:
        raise InputError(f"--runs {runs!r} is no regular expression: {error}") from None
    if not {"model", "batch"} & set(pattern.groupindex):
        return {(None, None): runs}
    names: dict[tuple[str | None, int | None], list[str]] = {}
    for name in evidence.timeline.run_names(runs):
        match = pattern.fullmatch(name)
        groups = match.groupdict() if match else {}
        batch = groups.get("batch")
        if batch is not None and not (batch.isdecimal() and int(batch)):
            raise InputError(f"the batch {batch!r} in the range {name!r} is no number from 1", "(?P<batch>\\d+)")
        names.setdefault((groups.get("model"), None if batch is None else int(batch)), []).append(re.escape(name))
    return {key: "|".join(escaped) for key, escaped in names.items()} or {(None, None): runs}


def _take_nodes_as_kernels(timeline: Timeline) -> Timeline:
    """Return ONNX Runtime's profile with its nodes as kernels, if the nodes ran on the CPU and there are no kernels."""
    nodes = timeline.nodes
    on_cpu = nodes["provider"].str.startswith("CPU")
    if len(timeline.kernels) or not on_cpu.all():
        lacking = "the profile has no kernels: record them, too, and name both reports"
        return timeline if len(timeline.kernels) else replace(timeline, notes=(*timeline.notes, lacking))
    kernels = nodes.assign(range=nodes["name"], op_name=nodes["name"], node=np.arange(len(nodes)))
    names = [
        f"{p.removesuffix('ExecutionProvider')}:{kind}"
        for p, kind in zip(nodes["provider"], nodes["op_type"], strict=True)
    ]
    return replace(timeline, kernels=kernels.assign(name=names))


def _counters_of_gpu(by_gpu: Mapping[int, Counters], gpu: int, gpus: int) -> Counters | None:
    """Return the counters of a GPU; if both reports have a single GPU, their indices may differ."""
    if gpus == 1 and len(by_gpu) == 1:
        return next(iter(by_gpu.values()))
    return by_gpu.get(gpu)


def _join_tools(timeline: Timeline, counters: Counters | None, evidence: ReportSet) -> Recording:
    notes, kernels = list(timeline.notes), timeline.kernels
    tools = {timeline.tool: timeline.version} | ({_ORT: "profile"} if evidence.profile is not None else {})
    indices = {int(index) for index in column(timeline.kernels, "device_index").dropna().unique()}
    gpus = tuple(dict.fromkeys(gpu for index, gpu in timeline.gpus.items() if not indices or index in indices))
    if counters is not None:
        kernels, unmatched = join_kernels(kernels, counters.kernels)
        notes += [*unmatched, *counters.notes]
        tools["ncu"] = ""
        gpus = gpus or tuple(counters.gpus.values())
    return Recording(kernels, gpus, tools, tuple(notes), timeline, executed=evidence.executed)


def read_report(path: Path) -> Timeline | Counters:
    """Return a report's content; the format is recognised by the first bytes, not by the name.

    Raises `InputError` for an unknown format; `UnavailableError` when reading requires nsys or ncu.
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
        return read_json_trace(path)
    text = read_text(path)
    return parse_nsys_csv(text, str(path)) if is_nsys_csv(text) else parse_ncu_csv(text, str(path))


def ingest(
    database: KernelDb, recording: Recording, reports: Sequence[Path], job: Job, device: Device
) -> tuple[ModelRow, tuple[str, ...]]:
    """Append a run with the rows of a recording and their origin; return the row of the model, and notes."""
    started = datetime.now(UTC)
    request = Request(new_run_id(started), started, device, job)
    recording = recording.tie_to_ops(job.graph).estimate_occupancy(device)
    needed = recording.requirement(device) if device.kind == "gpu" else None
    variant = _find_variant(recording)
    timed, note = _latency_columns(recording, request)
    row = model_row(request, needed, recording.nodes, **timed)
    if needed is None and len(recording.kernels):
        row = replace(row, kernel_count=max(1, round(len(recording.kernels) / recording.runs)))
    collected = Collected(
        models=(replace(row, **variant),),
        ops=tuple(replace(op, **variant) for op in op_rows(request, recording)),
        kernels=tuple(replace(kernel, **variant) for kernel in kernel_rows(request, recording.kernels)),
        devices=device_rows(request, recording),
    )
    collected = record_dims(collected, (job,))
    notes = (*recording.notes, *(needed.notes if needed else ()), note)
    run = RunRow(
        **request.columns(),
        started_at=started,
        collector="replay",
        model_sha256=job.graph.sha256 or None,
        model_path=job.graph.path or None,
        dims=describe_sizes(job.graph.sizes) or None,
        processes=job.processes,
        host=platform.node(),
        collector_version=", ".join(f"{tool} {version}".strip() for tool, version in recording.tools.items()),
        gpuprof_version=gpuprof.__version__,
        command=shlex.join(sys.argv),
        settings=json.dumps({"reports": list(map(str, reports))}),
        source=" + ".join(map(str, reports)),
        source_sha256=_hash_reports(reports),
        notes="; ".join(notes),
    )
    database.append(Run(run, collected.devices, collected.models, collected.ops, collected.kernels))
    return collected.models[0], notes


def replayed_job(text: str | None, batch: int, share: Share, reports: Sequence[Path], sizes: Sizes = ()) -> Job:
    """Return the job described by reports: an ONNX file's, or a job known by name only.

    ``text``: a path, ``NAME=path``, or a name; None: the first report's stem; ``sizes``: sizes of the free dimensions
    in the recording.
    """
    name, _, model = (text or reports[0].name.split(".")[0]).rpartition("=")
    path = Path(model)
    if path.is_file():
        graph = load_runnable(path, batch, name or path.stem, dict(sizes))
        return Job(require_sizes(graph), path, share)
    if path.suffix == ".onnx":
        raise InputError(f"there is no model file {path}", "name the model that was recorded, or leave it out")
    return Job(ModelGraph(model, batch, (), (), (), (), 0, "", "", sizes), path, share)


def device_of_recording(recorded: Recording) -> Device:
    """Return the device of the reports: from the catalogue, else as described by the reports.

    Raises `InputError` when the reports name no device or several, or describe a board missing from the catalogue
    incompletely.
    """
    devices = {device.name: device for gpu in recorded.gpus if (device := describe_device(gpu)) is not None}
    if len(devices) == 1 and all(describe_device(gpu) is not None for gpu in recorded.gpus):
        return next(iter(devices.values()))
    names = " and ".join(gpu.name for gpu in recorded.gpus) or "no GPU"
    raise InputError(f"the reports name {names}, which does not tell the device", "name it: --device h200")


def _recording_of_counters(counters: Counters, gpu: int, gpus: int) -> Recording:
    kernels = counters.kernels.assign(repeat=0, joined="counters")
    notes = ["only counters: kernels' order in time and overlap are not known", *counters.notes]
    notes += [f"GPU {gpu} of {gpus} in the report"] if gpus > 1 else []
    return Recording(kernels, tuple(counters.gpus.values()), {"ncu": ""}, tuple(notes))


def _hash_reports(paths: Sequence[Path]) -> str:
    """Return the hash of the report, of several that of their hashes."""
    hashes = []
    for path in paths:
        with path.open("rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
