"""Import of profiler reports from other machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import combine_sizes, describe_sizes
from gpuprof.errors import InputError
from gpuprof.kernel_db.schema import ModelRow
from gpuprof.kernel_db.store import KernelDb
from gpuprof.pipeline.devices import database_path, read_own_devices, resolve_device
from gpuprof.pipeline.profile import resolve_shares
from gpuprof.pipeline.profile_settings import ProfileWorkloads, ReportSettings
from gpuprof.pipeline.result import Result
from gpuprof.profiling.gpu.gpu_rows import Recording
from gpuprof.profiling.gpu.replay import (
    device_of_recording,
    ingest,
    read_report_set,
    recordings_of,
    replayed_job,
    split_runs,
)


def _find_device(recording: Recording, notes: list[str]) -> Device:
    """Return the device of the recorded reports; for a CPU, which no report describes, this machine's."""
    if not recording.is_on_cpu:
        return device_of_recording(recording)
    here = resolve_device("cpu", None, None, notes.append)
    notes.append(f"the report does not name its CPU: taken for {here.name}; --device names another")
    return here


@dataclass(frozen=True, kw_only=True)
class IngestResult(Result):
    """Profiler reports of one model at one batch size, as rows."""

    models: tuple[ModelRow, ...]
    share: Share

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return the rows added to the table ``models``."""
        return [{**asdict(row), "share": str(self.share)} for row in self.models]


def ingest_reports(
    models: Sequence[str],
    reports: ReportSettings,
    workloads: ProfileWorkloads,
    dims: Mapping[str, int | Sequence[int]] | None = None,
) -> IngestResult:
    """Append the content of reports: a run for each model, batch size and GPU with kernels.

    Raises `InputError` when a report cannot be read, or more than one workload was named.

    Parameters
    ----------
    models : sequence of str
        Empty (the first report's name is used), or a single ONNX file, ``"NAME=FILE"``, or name.
    reports : ReportSettings
        By default the runs are gpuprof's own ranges, else the whole report is a single run.
    workloads : ProfileWorkloads
        The recorded batch size and share, by default the whole device; ``device``: a name of the catalogue or of
        ``device_file``, by default the GPU that the reports name or describe.
    dims : mapping of str to int or sequence of int, optional
        Sizes of free dimensions in the recording, a single size for each.
    """
    files, runs, batches = list(reports.reports), reports.runs, workloads.batches or workloads.usual_batches
    names_batch = runs is not None and "(?P<batch>" in runs
    if (len(batches) != 1 and not names_batch) or len(models) > 1:
        raise InputError(
            f"a report is of one model at one batch size but got {len(models)} and {len(batches)}",
            "say which was recorded: --batch 8",
        )
    recorded, *more = combine_sizes(dims or {})
    if more:
        raise InputError(
            "a report is of one size of each dimension", f"say which: --dim {describe_sizes(recorded[:1])}"
        )
    notes: list[str] = []
    rows: list[ModelRow] = []
    own_devices = read_own_devices(reports.device_file)
    device = resolve_device(workloads.device, None, own_devices, notes.append) if workloads.device else None
    part = Share()
    evidence = read_report_set(files)
    for (model, batch), selected in split_runs(evidence, runs).items():
        for recording in recordings_of(evidence, selected):
            target = device or _find_device(recording, notes)
            part = resolve_shares(workloads.shares, target)[0] if workloads.shares else Share()
            name = model or (models[0] if models else None)
            job = replayed_job(name, batch or batches[0], part, files, recorded)
            row, remarks = ingest(KernelDb.create(database_path(workloads.db)), recording, files, job, target)
            notes += remarks
            rows.append(row)
    return IngestResult(notes=tuple(dict.fromkeys(notes)), models=tuple(rows), share=part)
