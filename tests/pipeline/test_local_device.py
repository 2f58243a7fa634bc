from dataclasses import replace

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.device import Device
from gpuprof.errors import InputError, UnavailableError
from gpuprof.pipeline.devices import resolve_local_device

V100 = device("v100")
CPU = Device("cpu-test", "cpu", 2, 1000.0, {}, 1, 1.0, 1)


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    boards = [V100, replace(V100, name="other")]
    monkeypatch.setattr("gpuprof.machine.gpu.local_gpus", lambda: tuple(boards))
    monkeypatch.setattr("gpuprof.machine.cpu.local_cpu", lambda: CPU)
    monkeypatch.setattr("gpuprof.profiling.gpu.collectors.GpuCollector.available", lambda self: None)
    return boards


def test_the_first_gpu_is_measured_where_one_can_be() -> None:
    assert resolve_local_device(None, "auto") is V100
    assert resolve_local_device("gpu", "auto") is V100
    assert resolve_local_device("other", "auto").name == "other"
    assert resolve_local_device("cpu", "auto") is CPU


def test_a_gpu_that_no_collector_measures_is_left_alone_and_the_reason_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuprof.profiling.gpu.collectors.GpuCollector.available", lambda self: "no runtime for it")
    notes: list[str] = []
    assert resolve_local_device(None, "auto", notes.append) is CPU
    assert [note for note in notes if note.startswith("v100 is not measured")] == notes != []
    assert resolve_local_device(None, "ort") is CPU


def test_what_this_machine_does_not_have_is_an_error(gpus: list[Device]) -> None:
    with pytest.raises(InputError, match="unknown device of this machine 'h200'"):
        resolve_local_device("h200", "auto")
    gpus.clear()
    assert resolve_local_device(None, "auto") is CPU
    with pytest.raises(UnavailableError, match="has no GPU"):
        resolve_local_device("gpu", "auto")
