"""Requests that are measured in a moment, and reports that are read."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.graph.load import load_graph
from gpuprof.kernel_db.store import KernelDb
from gpuprof.profiling.gpu.gpu_rows import Recording
from gpuprof.profiling.gpu.replay import ingest, read_report_set, recordings_of, replayed_job
from gpuprof.profiling.worker.job import Job, Request, TimingLimits

QUICK = TimingLimits(warm_up_s=0.05, min_time_s=0.05, want_repeats=20, want_time_s=0.2, max_time_s=0.4)
CPU = Device("cpu-test", "cpu", 1, 1000.0, {}, 1, 1.0, 1)


def a_job(path: Path, batch: int = 2, share: float = 100.0, processes: int = 1) -> Job:
    return Job(load_graph(path, batch), path, Share(share), processes)


def a_request(path: Path) -> Request:
    return Request("r1", datetime(2026, 1, 2, tzinfo=UTC), CPU, a_job(path), limits=QUICK)


def read_reports(reports: Sequence[Path], runs: str | None = None) -> tuple[Recording, ...]:
    return recordings_of(read_report_set(reports), runs)


def ingest_reports(
    database: KernelDb, reports: Sequence[Path], device: Device, model: str | None = "net", batch: int = 4
) -> None:
    (recording,) = read_reports(reports)
    ingest(database, recording, reports, replayed_job(model, batch, Share(), reports), device)
