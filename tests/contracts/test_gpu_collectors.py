from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.errors import UnavailableError
from gpuprof.profiling.collector import COLLECTORS, Collector, choose_collector
from gpuprof.profiling.contract import CollectorContract
from gpuprof.profiling.gpu.collectors import NsysNcuCollector
from gpuprof.profiling.worker.job import Request
from tests.profiling.gpu.test_collectors import tools
from tests.profiling.models import write_mlp
from tests.profiling.requests import a_request

__all__ = ["tools"]


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _request() -> Request:
    path = Path(_directory().name) / "mlp.onnx"
    return replace(a_request(path if path.exists() else write_mlp(path)), device=device("v100"))


@pytest.mark.usefixtures("tools")
@pytest.mark.slow
class TestNsysNcu(CollectorContract):
    def make_collector(self) -> Collector:
        return NsysNcuCollector()

    def make_request(self) -> Request:
        return _request()


def test_auto_says_why_it_did_not_take_each_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gpuprof.profiling.gpu.collectors.nvml_unavailable_reason", lambda: "no NVIDIA GPU: driver not loaded"
    )
    with pytest.raises(UnavailableError) as caught:
        choose_collector("auto", "gpu")
    message = str(caught.value)
    assert all(f"not {name}: " in message for name in COLLECTORS)
    assert "not ort: it measures a cpu, not a gpu" in message
    assert "not nsys: no NVIDIA GPU: driver not loaded" in message


@pytest.mark.usefixtures("tools")
def test_auto_takes_the_richest_that_works_and_names_it() -> None:
    collector, why = choose_collector("auto", "gpu")
    assert collector.name == "nsys+ncu"
    assert why.startswith("nsys+ncu: the first that works here; not ort: ")
