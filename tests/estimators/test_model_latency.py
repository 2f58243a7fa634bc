"""Times of models alone: what was measured, and processes that were not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.domain.estimate import EXTRAPOLATED, MEASURED, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.cross_gpu.cross_gpu import CrossGpuLatencies
from gpuprof.estimators.cross_gpu.execution import Execution
from gpuprof.estimators.measured.known_models import KnownModels
from gpuprof.estimators.model_latency import ModelLatencies, part_of_one
from tests.estimators.rows import CPU, GPU, database, measured_row


@pytest.fixture
def latencies(tmp_path: Path) -> ModelLatencies:
    rows = [measured_row("net", batch, 2.0 + 3.0 * batch, std_ms=0.5, repeats=25) for batch in (1, 4, 8)]
    models = KnownModels(database(tmp_path / "db", rows), None)
    cross_gpu = CrossGpuLatencies(Execution(), models.bind_graph)
    return ModelLatencies(models, lambda device: None, cross_gpu)


def test_a_measured_time_comes_with_how_much_it_varies(latencies: ModelLatencies) -> None:
    latency, cv = latencies.alone(CPU, Workload("net", 4, Share()))
    assert (latency.value, latency.source) == (14.0, MEASURED)
    assert cv == pytest.approx(0.5 / 14.0)


def test_processes_that_were_not_measured_take_as_long_as_one_with_its_part_of_the_share(
    latencies: ModelLatencies,
) -> None:
    two, _ = latencies.alone(CPU, Workload("net", 4, Share(100.0), 2))
    half, _ = latencies.alone(CPU, Workload("net", 4, part_of_one(Share(100.0), 2)))
    assert (two.value, two.source) == (half.value, EXTRAPOLATED)


def test_without_its_file_a_model_has_no_time_on_another_device(latencies: ModelLatencies) -> None:
    with pytest.raises(InputError, match=f"not measured on {GPU.name} and its ONNX file is not there"):
        latencies.alone(GPU, Workload("net", 4, Share()))
