import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.errors import UnavailableError
from gpuprof.profiling.collector import COLLECTORS, Collector, choose_collector
from gpuprof.profiling.contract import CollectorContract
from gpuprof.profiling.cpu.ort import OrtCollector
from gpuprof.profiling.gpu.collectors import NsysNcuCollector
from gpuprof.profiling.worker.job import Request
from tests.profiling.gpu.test_collectors import tools
from tests.profiling.models import write_convs, write_mlp
from tests.profiling.requests import a_request


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


class TestOrt(CollectorContract):
    def make_collector(self) -> Collector:
        return OrtCollector()

    def make_request(self) -> Request:
        path = Path(_directory().name) / "convs.onnx"
        return a_request(path if path.exists() else write_convs(path))

    def test_every_op_is_accounted_for(self) -> None:
        collected = self.collect_distinct()
        assert len(collected.ops) == 7
        timed = [row for row in collected.ops if row.duration_mean_ns is not None]
        assert sum(row.fused for row in timed) + sum("not executed" in (row.note or "") for row in collected.ops) == 7
        assert {row.op_type for row in timed} >= {"Conv"}

    def test_the_nodes_time_adds_up(self) -> None:
        (model,) = self.collect_distinct().models
        ops_ms = sum(row.duration_mean_ns or 0 for row in self.collect_distinct().ops) / 1e6
        assert model.node_time_ms is not None and model.untied_time_ms is not None
        assert abs(ops_ms + model.untied_time_ms - model.node_time_ms) < 1e-3


__all__ = ["tools"]


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
