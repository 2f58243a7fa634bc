import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprof.errors import InputError, UnavailableError
from gpuprof.machine.cgroup import own_cores
from gpuprof.machine.cores import MachineLoad
from gpuprof.profiling.worker.job import TimingLimits
from gpuprof.profiling.worker.measurement import Crew, ShareBinding
from gpuprof.profiling.worker.process import Worker
from gpuprof.profiling.worker.tasks import Loaded, Resident, Sample, WorkerSetup, check_model
from gpuprof.rules.cpu_slices import CpuSlice
from gpuprof.runtime.providers import ORT_CPU
from tests.profiling.models import write_mlp, write_strange
from tests.profiling.requests import QUICK, a_job
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mlp(tmp_path_factory.mktemp("models") / "mlp.onnx", width=256, layers=4)


def test_a_model_is_timed_at_each_batch_size_in_one_process_and_its_memory_holds_its_weights(model: Path) -> None:
    with Crew([a_job(model)]) as crew:
        process = crew.leader.process_id
        for batch in (1, 8):
            job = a_job(model, batch)
            (timing,) = crew.measure([job], QUICK)
            assert timing.stats.repeats >= 6 and timing.paused_ms
            assert timing.throughput_rps == pytest.approx(batch * 1000 / timing.stats.latency_mean_ms, rel=0.5)
            assert timing.memory_peak_bytes >= job.graph.weight_bytes > 1e6
            assert timing.part.threads == len(own_cores())
        assert crew.leader.process_id == process


def test_copies_and_neighbours_run_at_once(model: Path) -> None:
    half = 100.0 / max(2, len(own_cores()))
    jobs = [a_job(model, 1, half, processes=2), a_job(model, 4, half)]
    with Crew(jobs) as crew:
        timings = crew.measure(jobs, QUICK)
    assert len(timings) == 2
    assert all(timing.stats.repeats >= 2 and timing.paused_ms is None for timing in timings)


def test_a_model_that_the_runtime_refuses_is_the_users_error(tmp_path: Path, model: Path) -> None:
    job = replace(a_job(model), path=write_strange(tmp_path / "odd.onnx"))
    with Crew([job]) as crew, pytest.raises(InputError, match="Nonsense"):
        crew.measure([job], QUICK)


def test_a_batch_that_ends_its_process_costs_none_of_the_others(model: Path) -> None:
    job = a_job(model)
    with Crew([job]) as crew:
        crew.leader.end()
        assert crew.measure([job], QUICK)[0].stats.repeats


def test_neighbours_of_a_batch_that_fails_are_there_for_the_next_one(tmp_path: Path, model: Path) -> None:
    half = 100.0 / max(2, len(own_cores()))
    jobs = [a_job(model, 1, half), a_job(model, 1, half)]
    odd = replace(jobs[1], path=write_strange(tmp_path / "odd.onnx"))
    with Crew(jobs) as crew:
        for wrong in ([jobs[0], odd], [odd, jobs[1]]):
            with pytest.raises(InputError, match="Nonsense"):
                crew.measure(wrong, QUICK)
            assert all(timing.stats.repeats for timing in crew.measure(jobs, QUICK))
        with pytest.raises(ZeroDivisionError):
            crew.measure(jobs, QUICK, end=lambda: 1 // 0)  # type: ignore[arg-type]
        assert all(timing.stats.repeats for timing in crew.measure(jobs, QUICK))


def test_other_programs_that_run_meanwhile_make_a_row_unstable(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job(model)
    monkeypatch.setattr(
        MachineLoad, "describe_disturbance", lambda self, disturbance, tolerance: f"busy, {tolerance:g}"
    )
    with Crew([job]) as crew:
        (timing,) = crew.measure([job], QUICK)
    assert timing.disturbance == "busy, 0.04" and not timing.stats.stable


def test_a_row_beside_a_load_that_starts_midway_is_marked_and_counts_the_waits(model: Path) -> None:
    spin = "import os, time; os.sched_setaffinity(0, [{}]); time.sleep(0.2)\nwhile True: pass"
    loads: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        loads.extend(subprocess.Popen([sys.executable, "-c", spin.format(core)]) for core in own_cores())

    job = a_job(model)
    with Crew([job]) as crew:
        try:
            (timing,) = crew.measure([job], TimingLimits(precision=1e-6, max_time_s=1.5), begin=start)
        finally:
            for load in loads:
                load.kill()
                load.wait()
    assert timing.disturbance is not None and "other programs kept" in timing.disturbance
    assert not timing.stats.stable
    assert timing.cpu_wait_pct is None or timing.cpu_wait_pct > 5.0  # where the kernel counts it


def test_neighbours_end_their_batch_before_they_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Any] = []
    receive = Worker.receive

    def note_result(self: Worker, within_s: float = 60.0) -> Any:
        results.append(receive(self, within_s))
        return results[-1]

    monkeypatch.setattr(Worker, "receive", note_result)
    jobs = [a_job(write_mlp(tmp_path / "mlp.onnx"))]
    with Crew(jobs, [ShareBinding(ORT_CPU, {})]) as crew:
        with crew.keep_running(jobs, QUICK):
            assert results == [Loaded()]
        assert isinstance(results[-1], Sample)


def _answer(resident: Resident, word: str) -> tuple[int, str]:
    return os.getpid(), word


def _hang(resident: Resident) -> None:
    os.system("sleep 60")


def _crash(resident: Resident) -> None:
    raise KeyError("odd")


def _exhaust(resident: Resident) -> None:
    raise MemoryError


def test_a_worker_runs_tasks_one_after_another_and_is_gone_afterwards(tmp_path: Path) -> None:
    with Worker(WorkerSetup(), "m") as worker:
        process = worker.process_id
        assert [worker.call(_answer, word) for word in "ab"] == [(process, "a"), (process, "b")]
        assert worker.call(check_model, write_mlp(tmp_path / "m.onnx"), True) is None
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_tasks_own_error_keeps_its_kind_and_the_worker_goes_on(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"rubbish")
    with Worker(WorkerSetup(), "x") as worker:
        with pytest.raises(InputError, match="not an ONNX model") as refused:
            worker.call(check_model, tmp_path / "x.onnx", False)
        assert refused.value.fix
        with pytest.raises(UnavailableError, match="out of memory"):
            worker.call(_exhaust)
        assert worker.call(_answer, "on")[1] == "on"


def test_a_share_that_cannot_be_enforced_is_the_error_of_the_first_task() -> None:
    with (
        Worker(WorkerSetup(part=CpuSlice((4095,))), "m") as worker,
        pytest.raises(UnavailableError, match="cannot run on cores 4095"),
    ):
        worker.call(_answer, "a")


def test_a_worker_that_is_killed_is_said_to_be_and_one_that_crashes_quoted() -> None:
    with Worker(WorkerSetup(), "m at batch 1") as worker:
        worker.send(_hang)
        os.kill(worker.process_id, signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"m at batch 1: the process died \(signal SIGKILL\)"):
            worker.receive(60)
        assert not worker.is_alive
    with Worker(WorkerSetup(), "m") as worker, pytest.raises(UnavailableError, match="its last words: KeyError: 'odd'"):
        worker.call(_crash)


def test_a_worker_that_hangs_is_ended_in_time_with_what_it_started() -> None:
    with Worker(WorkerSetup(), "m") as worker:
        worker.call(_answer, "up")
        worker.send(_hang)
        with pytest.raises(UnavailableError, match=r"no answer within 0\.2 s"):
            worker.receive(0.2)
        group = worker.process_id
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("the worker's own child lives on")
