import os
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.share import Share
from gpuprof.errors import UnavailableError
from gpuprof.profiling.gpu import collectors
from gpuprof.profiling.gpu.collectors import GpuCollector, NcuCollector, NsysCollector, NsysNcuCollector
from gpuprof.profiling.gpu.nvml import NvmlFigures, NvmlSampler, idle_figures, nvml_unavailable_reason, visible_gpu
from gpuprof.profiling.gpu.recording import run_nodes_for_recording
from gpuprof.profiling.nsight.nsys import record_program
from gpuprof.profiling.worker.job import Request
from gpuprof.profiling.worker.process import Worker
from gpuprof.profiling.worker.tasks import Sample
from gpuprof.runtime.providers import ORT_CPU
from tests.profiling.fake_nvml import GIB, FakeNvml
from tests.profiling.fake_tools import write_program
from tests.profiling.models import write_mlp
from tests.profiling.ncu_files import kernel, raw_csv
from tests.profiling.nsys_files import two_runs
from tests.profiling.requests import a_job, a_request
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time

# Both run the program that they are given, as the real ones do, and leave what was written beforehand.
NSYS = """
case "$1" in
--version) echo "NVIDIA Nsight Systems version 2024.6.1.90";;
profile) while [ "$1" != -o ]; do shift; done; shift; out=$1; shift; "$@" || exit $?; touch "$out.nsys-rep";;
export) while [ "$1" != -o ]; do shift; done; shift; cp {report} "$1";;
esac
"""
NCU = """
case "$1" in
--version) echo "Version 2025.1.0.0 (build 1)"; exit;;
--query-metrics) echo "sm__warps_active  Counter  warp  # of warps"; echo "gpu__time_duration Counter ns x"; exit;;
esac
{refuse}
while [ "$1" != --log-file ]; do shift; done; log=$2
while [ "$1" != {python} ]; do shift; done
"$@" && cp {table} "$log"
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU, nsys and ncu, whose models run on the CPU."""
    report = two_runs().write(tmp_path / "report.sqlite")
    table = tmp_path / "table.csv"
    table.write_text(raw_csv([kernel(f"k{i % 2}(float*)", str(10 * (i + 1)), 80 + i) for i in range(3)]))
    write_program(tmp_path / "nsys", NSYS.format(report=report))
    write_program(tmp_path / "ncu", NCU.format(table=table, refuse="", python=sys.executable))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(collectors, "gpu_unavailable_reason", lambda: None)
    monkeypatch.setattr(GpuCollector, "provider", ORT_CPU)
    monkeypatch.setattr(collectors, "idle_figures", lambda **_: NvmlFigures(50.0, 1000.0, 30.0, 2**30, 5))
    return tmp_path


def _request(directory: Path, share: float = 100.0) -> Request:
    request = a_request(write_mlp(directory / "mlp.onnx"))
    return replace(request, device=device("v100"), job=replace(request.job, share=Share(share)))


def test_a_timeline_and_counters_are_joined_beside_a_timing_of_its_own(tools: Path) -> None:
    collector = NsysNcuCollector()
    assert collector.available() is None
    assert collector.version() == "nsys 2024.6.1.90, ncu 2025.1.0.0"
    collected = collector.collect(_request(tools))
    (model,) = collected.models
    assert model.latency_mean_ms is not None and model.latency_mean_ms > 0 and model.repeats
    assert model.max_occupancy_pct == 30.0 and model.kernel_count == 3
    assert (model.h2d_bytes, model.d2h_bytes) == (4096, 64)
    assert model.power_w is not None and model.idle_power_w == 50.0 and model.clock_mhz == 1380
    assert model.error is None
    assert {row.joined for row in collected.kernels} == {"both"}
    assert collected.settings["clock_control"] == "none" and collected.settings["cache_control"] == "none"
    assert any("no counter for dram_read_bytes" in note for note in collected.notes)


def test_where_counters_are_refused_timing_goes_on_and_says_so(tools: Path) -> None:
    refuse = "echo '==ERROR== ERR_NVGPUCTRPERM'; exit 1"
    write_program(tools / "ncu", NCU.format(table="x", refuse=refuse, python=sys.executable))
    collected = NsysNcuCollector().collect(_request(tools))
    (model,) = collected.models
    # 80 to 82 blocks of 8 warps on 80 SMs of 64: an eighth of the warps, which the launches tell without counters.
    assert model.kernel_count == 3 and model.max_occupancy_pct == pytest.approx(82 / 80 * 8 / 64 * 100)
    assert any("occupancy is estimated" in note for note in collected.notes)
    assert model.occupancy_source == "launch_occupancy_pct"
    assert all(row.achieved_occupancy_pct is None and row.launch_occupancy_pct for row in collected.kernels)
    assert collected.lost[0].startswith("no counters: ncu may not read") and collected.lost[0] in collected.notes
    with pytest.raises(UnavailableError, match="ERR_NVGPUCTRPERM"):
        NcuCollector().collect(_request(tools))


def test_counters_alone_leave_null_what_needs_an_order_in_time(tools: Path) -> None:
    collected = NcuCollector().collect(_request(tools))
    assert [row.achieved_occupancy_pct for row in collected.kernels] == [10.0, 20.0, 30.0]
    (model,) = collected.models
    assert model.max_occupancy_pct == 30.0 and model.kernel_count == 3
    assert model.wavg_occupancy_pct is None and model.dispatch_ms is None and model.h2d_bytes is None


def test_nvml_alone_times_and_samples(tools: Path) -> None:
    collected = GpuCollector().collect(_request(tools))
    assert collected.kernels == () and collected.ops == ()
    assert collected.models[0].kernel_count is None and collected.models[0].power_w is not None


@pytest.mark.slow
def test_what_a_profiler_does_not_see_under_a_share_is_left_out_and_the_timing_stays(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def shares(*_: object, **__: object) -> Iterator[tuple[dict[str, str], ...]]:
        yield ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"},)

    (tools / "report.sqlite").write_bytes(b"no database")
    with pytest.raises(UnavailableError, match="cannot read what was recorded"):
        NsysCollector().collect(_request(tools))
    monkeypatch.setattr(collectors, "bind_shares", shares)
    collected = NsysCollector().collect(_request(tools, 50.0))
    assert collected.kernels == () and collected.models[0].latency_mean_ms is not None
    assert any(note.startswith("no kernels under the share: cannot read what was recorded") for note in collected.notes)


@pytest.mark.slow
def test_counters_that_cannot_be_read_leave_the_timeline(tools: Path) -> None:
    counted = (tools / "table.csv").read_text()
    (tools / "table.csv").write_text(counted.replace("30", "much"))
    collected = NsysNcuCollector().collect(_request(tools))
    assert collected.kernels[0].achieved_occupancy_pct == 10.0 and "'much' is no number" in collected.lost[0]
    (tools / "table.csv").write_text('"ID","Kernel Name"\n"0"\n')
    collected = NsysNcuCollector().collect(_request(tools))
    assert collected.models[0].kernel_count == 3
    assert any(note.startswith("no counters: cannot read what was recorded") for note in collected.notes)
    with pytest.raises(UnavailableError, match="cannot read what was recorded"):
        NcuCollector().collect(_request(tools))


@pytest.mark.slow
def test_jobs_beside_one_another_are_timed_together_and_not_recorded(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def shares(_: object, wanted: list[Share], **__: object) -> Iterator[tuple[dict[str, str], ...]]:
        yield tuple({} for _ in wanted)

    monkeypatch.setattr(collectors, "bind_shares", shares)
    request = _request(tools, 50.0)
    beside = a_job(write_mlp(tools / "other.onnx", width=32), share=50.0)
    collected = NsysCollector().collect(replace(request, beside=(beside,)))
    assert [row.model for row in collected.colocations] == ["mlp", "other"]
    assert all(row.power_w is not None and row.latency_mean_ms for row in collected.colocations)
    first, second = collected.colocations
    assert second.dispatch_ms is None and first.dispatch_ms is not None and first.latency_p50_ms is not None
    # Three kernels of 60 ns and two copies of 10 are taken off what a batch took without a profiler.
    assert first.dispatch_ms == pytest.approx(first.latency_p50_ms - 200e-6)
    assert collected.models == ()


def test_a_program_that_fails_under_the_profiler_shows_its_own_words(tools: Path) -> None:
    write_program(tools / "nsys", 'case "$1" in profile) echo "error: out of memory" >&2; exit 1;; esac')
    with pytest.raises(UnavailableError, match=r"nsys failed \(exit code 1\): error: out of memory"):
        NsysCollector().collect(_request(tools))


def test_each_says_why_it_cannot_work_here(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectors, "find_tool", lambda name: None if name == "ncu" else tools / name)
    assert NsysCollector().available() is None
    assert NsysNcuCollector().available() == "ncu is not installed: it comes with the CUDA toolkit"
    monkeypatch.setattr(collectors, "find_tool", lambda name: None)
    assert "nsys is not installed" in str(NsysCollector().available())
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("nvmlInit"))
    assert NsysCollector().available() == "no NVIDIA GPU: Not Supported"


@pytest.mark.slow
def test_a_profiler_that_hangs_is_ended_and_the_timing_kept_apart(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuprof.profiling.nsight.tool_process.REACTION_S", 0.2)
    write_program(tools / "ncu", 'case "$1" in --*ver*) echo "Version 2025.1.0";; --query*) ;; *) sleep 600;; esac')
    request = _request(tools)
    patient = replace(request, limits=replace(request.limits, tool_s=8.0))  # for what nsys takes on a busy machine
    (row,) = NsysNcuCollector().collect(patient).models
    assert row.latency_mean_ms is not None and row.kernel_count == 3
    with pytest.raises(UnavailableError, match="ncu did not end within 1 s and was ended"):
        NcuCollector().collect(replace(request, limits=replace(request.limits, tool_s=1.0)))


def test_power_is_sampled_while_batches_run_and_not_in_pauses(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("begin", "stop"):
        act = getattr(NvmlSampler, name)

        def note_call(self: NvmlSampler, name: str = name, act: Any = act) -> None:
            order.append(name)
            act(self)

        monkeypatch.setattr(NvmlSampler, name, note_call)
    receive = Worker.receive

    def note_result(self: Worker, within_s: float = 60.0) -> Any:
        result = receive(self, within_s)
        order.append("timed" if isinstance(result, Sample) else "paused" if isinstance(result, list) else "loaded")
        return result

    monkeypatch.setattr(Worker, "receive", note_result)
    collected = GpuCollector().collect(_request(tools))
    assert order == ["loaded", "begin", "timed", "stop", "paused"]
    (row,) = collected.models
    assert row.latency_paused_mean_ms is not None and row.latency_paused_mean_ms > 0
    assert collected.settings["power"] == "samples" and collected.settings["share_by"] == "nothing: the whole device"


@pytest.mark.slow
def test_nsys_records_once_alone_and_once_with_profiled_nodes(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[bool] = []
    record = record_program

    def note_recording(command: list[str], *given: Any, **more: Any) -> Path:
        recorded.append(pickle.loads(Path(command[-1]).read_bytes())[1][0] is run_nodes_for_recording)
        return record(command, *given, **more)

    monkeypatch.setattr(collectors, "record_program", note_recording)
    collected = NsysCollector().collect(_request(tools))
    assert recorded == [False, True]
    (model,) = collected.models
    assert model.dispatch_ms is not None and model.latency_p50_ms is not None
    assert model.dispatch_ms == pytest.approx(model.latency_p50_ms - 200e-6)  # three kernels and two copies
    # The played report is of another program: its runs take 900 ns, in which no run of this model fits.
    assert any(note.startswith("kernels are not tied to nodes") for note in collected.notes)


def _wait(nvml: FakeNvml, samples: int) -> None:
    while nvml.asked < samples:
        time.sleep(0.001)


def test_power_and_clock_are_means_and_memory_is_the_most() -> None:
    nvml = FakeNvml()
    with NvmlSampler(nvml=nvml, period_s=0.001) as sampler:
        _wait(nvml, 5)
    figures = sampler.figures()
    assert figures.samples >= 5
    assert figures.power_w == 100.0 + 10.0 * (figures.samples - 1)
    assert figures.clock_mhz == 1380
    assert figures.memory_bytes == 3 * GIB
    assert figures.temperature_c == 40 + figures.samples


def test_neither_loading_nor_pauses_after_the_timing_are_sampled() -> None:
    nvml = FakeNvml()
    nvml.energy_mj = 5_000.0  # of a time too short for it
    with NvmlSampler(nvml=nvml, period_s=0.001) as sampler:
        _wait(nvml, 10)
        sampler.begin()
        before = nvml.asked
        _wait(nvml, before + 3)
        sampler.stop()
        kept = sampler.figures()
        _wait(nvml, nvml.asked + 20)  # the GPU is asked on, and nothing of it kept
    assert sampler.figures().samples == kept.samples and kept.power_source == "samples"
    assert kept.power_w is not None and kept.power_w > 80 + 20 * before


def test_power_is_what_the_energy_counter_says_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(
        "gpuprof.profiling.gpu.nvml.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    )
    nvml = FakeNvml()
    nvml.energy_mj = 5_000.0
    with NvmlSampler(nvml=nvml, period_s=0.001) as sampler:
        nvml.energy_mj, clock[0] = 9_000.0, 101.0  # loading
        sampler.begin()
        nvml.energy_mj, clock[0] = 1_409_000.0, 103.0
        sampler.stop()
        nvml.energy_mj, clock[0] = 1_410_000.0, 130.0  # pauses
    figures = sampler.figures()
    assert figures.power_w == pytest.approx(700.0) and figures.power_source == "energy counter"


def test_what_a_gpu_does_not_say_is_null() -> None:
    figures = idle_figures(nvml=FakeNvml("nvmlDeviceGetPowerUsage"), seconds=0.01)
    assert figures.power_w is None and figures.clock_mhz == 1380


def test_without_a_driver_nothing_is_sampled_and_the_reason_is_said() -> None:
    nvml = FakeNvml("nvmlInit")
    assert nvml_unavailable_reason(nvml) == "no NVIDIA GPU: Not Supported"
    assert nvml_unavailable_reason(FakeNvml(gpus=0)) == "the driver has no GPU"
    assert nvml_unavailable_reason(FakeNvml()) is None
    figures = idle_figures(nvml=nvml, seconds=0.0)
    assert figures.samples == 0 and figures.power_w is None and figures.memory_bytes is None


@pytest.mark.parametrize(
    ("visible", "index"), [(None, 0), ("", 0), ("2,0", 2), ("GPU-5", 5), ("GPU-unknown", 0), ("MIG-7", 0)]
)
def test_the_gpu_that_programs_get_is_sampled(visible: str | None, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Several(FakeNvml):
        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
            if not uuid[-1].isdecimal():
                raise self.NVMLError("Not Found")
            return int(uuid[-1])

        def nvmlDeviceGetIndex(self, handle: int) -> int:  # noqa: N802
            return handle

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpu(Several()) == index
