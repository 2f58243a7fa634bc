from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from gpuprof.profiling.collector import Collector
from gpuprof.profiling.contract import CollectorContract
from gpuprof.profiling.cpu.ort import OrtCollector
from gpuprof.profiling.worker.job import Request
from tests.profiling.models import write_convs
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
