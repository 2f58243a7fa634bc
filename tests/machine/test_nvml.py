from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from gpuprof.machine.nvml import ask_nvml, decode_nvml, load_nvml


class _RefusalError(Exception):
    pass


def _refuse(handle: object) -> None:
    raise _RefusalError


def test_what_a_gpu_or_an_older_binding_does_not_have_is_none() -> None:
    nvml = SimpleNamespace(
        NVMLError=_RefusalError, nvmlDeviceGetName=lambda handle: "gpu", nvmlDeviceGetMigMode=_refuse
    )
    assert ask_nvml(nvml, "nvmlDeviceGetName", 0) == "gpu"
    assert ask_nvml(nvml, "nvmlDeviceGetMigMode", 0) is None
    assert ask_nvml(nvml, "nvmlDeviceGetNumGpuCores", 0) is None


def test_texts_of_older_bindings_are_decoded() -> None:
    assert decode_nvml(b"NVIDIA A100") == decode_nvml("NVIDIA A100") == "NVIDIA A100"


def test_without_the_binding_there_is_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert load_nvml() is None
