from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.machine.visible_sms import visible_sms


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


def test_without_a_driver_nothing_is_known() -> None:
    assert visible_sms("libno-such-driver.so") is None
