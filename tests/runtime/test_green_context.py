from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.errors import UnavailableError
from gpuprof.runtime.green_context import green_stream, use_stream
from gpuprof.runtime.providers import GREEN_SMS

TORCH = SimpleNamespace(__version__="2.11.0", cuda=SimpleNamespace(stream=lambda stream: nullcontext(stream)))


def _contexts(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[dict[str, int]]:
    asked: list[dict[str, int]] = []

    def create(**wanted: int) -> Any:
        asked.append(wanted)
        if error is not None:
            raise error
        return SimpleNamespace(Stream=lambda: "a stream of the context")

    module = SimpleNamespace(GreenContext=SimpleNamespace(create=create))
    monkeypatch.setitem(sys.modules, "torch.cuda.green_contexts", module)
    return asked


def test_work_goes_to_a_stream_of_a_context_of_so_many_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _contexts(monkeypatch)
    monkeypatch.setenv(GREEN_SMS, "32")
    stream = green_stream(TORCH)
    assert asked == [{"num_sms": 32, "device_id": 0}]
    with use_stream(TORCH, stream) as used:
        assert used == "a stream of the context"


def test_without_being_asked_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _contexts(monkeypatch)
    monkeypatch.delenv(GREEN_SMS, raising=False)
    assert green_stream(TORCH) is None and asked == []
    with use_stream(TORCH, None) as used:
        assert used is None


def test_a_context_that_cannot_be_made_is_an_error_and_no_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GREEN_SMS, "3")
    _contexts(monkeypatch, RuntimeError("num_sms must be at least 8\nmore"))
    with pytest.raises(UnavailableError, match="no green context of 3 SMs can be made: num_sms must be at least 8"):
        green_stream(TORCH)
    _contexts(monkeypatch, AttributeError("no such thing"))
    with pytest.raises(UnavailableError, match="has no green contexts"):
        green_stream(TORCH)
