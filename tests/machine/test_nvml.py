from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.machine.nvml import ask_nvml, visible_sms


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


def _driver(sms: int, fails: str = "") -> Any:
    def attribute(count: Any, number: int, device: Any) -> int:
        assert number == 16
        count._obj.value = sms
        return int(fails == "attribute")

    return SimpleNamespace(
        cuInit=lambda flags: int(fails == "init"), cuDeviceGet=lambda device, index: 0, cuDeviceGetAttribute=attribute
    )


def test_a_client_is_told_its_part_of_the_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _driver(66))
    assert visible_sms() == 66
    for fails in ("init", "attribute"):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, fails=fails: _driver(66, fails))
        assert visible_sms() is None
