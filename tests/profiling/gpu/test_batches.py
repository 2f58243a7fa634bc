"""All batch sizes of a model under a share in one process: times first, then recordings in another."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, UnavailableError
from gpuprof.kernel_db.store import KernelDb
from gpuprof.machine.mps import LOG, PERCENTAGE
from gpuprof.profiling.gpu import collectors
from gpuprof.profiling.gpu.collectors import CuptiCollector, GpuCollector
from gpuprof.profiling.sweep.campaign import Campaign, Cell
from gpuprof.profiling.worker.measurement import Crew
from gpuprof.profiling.worker.process import Worker
from tests.profiling.gpu.test_collectors import tools
from tests.profiling.models import write_mlp
from tests.profiling.requests import QUICK, a_job
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time

__all__ = ["tools"]  # a fixture
V100 = device("v100")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The tasks of workers: their process, and the task's name."""
    recorded: list[tuple[int, str]] = []
    send = Worker.send

    def note_task(self: Worker, task: Any, *given: Any, **more: Any) -> None:
        recorded.append((self.process_id, task.__name__))
        send(self, task, *given, **more)

    monkeypatch.setattr(Worker, "send", note_task)
    return recorded


def _processes(calls: list[tuple[int, str]], task: str) -> list[int]:
    return [process for process, name in calls if name == task]


def _run_campaign(directory: Path, collector: GpuCollector, cells: list[Cell]) -> list[dict[str, Any]]:
    database = KernelDb.create(directory / "db")
    # on a busy machine a row may be unstable, and would be measured again
    results = list(Campaign(database, V100, collector, limits=QUICK, keep_unstable=True, repeats=1).run(cells))
    assert [result.cell for result in results] == cells
    return sorted(database.read_table("models").to_pylist(), key=lambda row: str(row["batch"]))


@pytest.mark.slow
def test_batch_sizes_are_timed_in_a_process_and_recorded_in_another(tools: Path, calls: list[tuple[int, str]]) -> None:
    pytest.importorskip("torch")
    path = write_mlp(tools / "m.onnx")
    rows = _run_campaign(tools, CuptiCollector(), [Cell(a_job(path, batch)) for batch in (1, 2, 4)])
    names = [name for _, name in calls]
    assert names == ["check_model", *["load", "time", "time_pauses"] * 3, *["record_with_kineto"] * 3]
    timed, recorded = set(_processes(calls, "time")), set(_processes(calls, "record_with_kineto"))
    assert len(timed) == len(recorded) == 1 and timed != recorded
    assert [row["batch"] for row in rows] == [1, 2, 4]
    assert all(row["latency_mean_ms"] > 0 and row["latency_paused_mean_ms"] > 0 for row in rows)
    assert all(row["runtime"] == "onnxruntime" and row["memory_peak_bytes"] for row in rows)
    runs = KernelDb(tools / "db").read_table("runs").to_pylist()
    assert all("no kernels" in run["notes"] for run in runs)  # there is no GPU to record


@pytest.mark.slow
def test_shares_and_models_have_processes_of_their_own(
    tools: Path, calls: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def shares(_: object, wanted: list[Share], **__: object) -> Iterator[tuple[dict[str, str], ...]]:
        yield tuple({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share.sm_pct:g}"} for share in wanted)

    monkeypatch.setattr(collectors, "bind_shares", shares)
    paths = [write_mlp(tools / f"{name}.onnx") for name in "ab"]
    cells = [Cell(a_job(path, batch, share)) for path in paths for share in (30.0, 60.0) for batch in (1, 2)]
    rows = _run_campaign(tools, GpuCollector(), cells)
    assert len(set(_processes(calls, "time"))) == 4 and len(rows) == 8
    assert all(row["error"] is None for row in rows)


def test_a_batch_size_that_fails_leaves_the_others(tools: Path) -> None:
    fixed, free = write_mlp(tools / "fixed.onnx", batch=1), write_mlp(tools / "free.onnx")
    cells = [Cell(replace(a_job(free, batch), path=fixed)) for batch in (1, 2)]
    with pytest.raises(InputError):  # the runtime refuses the second: the user's error, said at the end
        _run_campaign(tools, GpuCollector(), cells)
    rows = KernelDb(tools / "db").read_table("models").to_pylist()
    assert [(row["batch"], row["latency_mean_ms"] is not None) for row in rows] == [(1, True)]


def test_a_share_that_cannot_be_given_is_remembered_for_each(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refuse(*_: object, **__: object) -> Iterator[tuple[dict[str, str], ...]]:
        raise UnavailableError("the MPS daemon does not start: busy")
        yield

    monkeypatch.setattr(collectors, "bind_shares", refuse)
    rows = _run_campaign(
        tools, GpuCollector(), [Cell(a_job(write_mlp(tools / "m.onnx"), batch, 50.0)) for batch in (1, 2)]
    )
    assert [row["error"] for row in rows] == ["the MPS daemon does not start: busy"] * 2


def test_a_client_that_mps_refuses_shows_what_both_logs_end_with(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refuse_server(*_: object, **__: object) -> Iterator[tuple[dict[str, str], ...]]:
        (tools / "server.log").write_text("Failed to start : invalid argument")
        yield ({PERCENTAGE: "50", LOG: str(tools)},)

    def no_gpu(*_: object) -> None:
        raise UnavailableError("this PyTorch sees no GPU: error 805")

    monkeypatch.setattr(collectors, "bind_shares", refuse_server)
    monkeypatch.setattr(Crew, "measure", no_gpu)
    (row,) = _run_campaign(tools, GpuCollector(), [Cell(a_job(write_mlp(tools / "m.onnx"), 1, 50.0))])
    assert row["error"].startswith("this PyTorch sees no GPU: error 805 (MPS says: server.log: Failed to start")
