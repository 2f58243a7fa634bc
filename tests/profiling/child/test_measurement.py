from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.machine.cpu_share import own_cores
from gpuprof.profiling.child.children import Child
from gpuprof.profiling.child.measurement import ShareBinding, keep_running, measure, slices_of
from gpuprof.runtime.providers import ORT_CPU
from tests.profiling.models import write_mlp, write_strange
from tests.profiling.requests import QUICK, a_job
from tests.reruns import measures_in_real_time

pytestmark = measures_in_real_time


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mlp(tmp_path_factory.mktemp("models") / "mlp.onnx", width=256, layers=4)


def test_a_model_is_timed_and_its_memory_holds_its_weights(model: Path) -> None:
    job = a_job(model)
    (timing,) = measure(job, limits=QUICK)
    assert timing.stats.repeats >= 6
    assert timing.throughput_rps == pytest.approx(2 * 1000 / timing.stats.latency_mean_ms, rel=0.5)
    assert timing.memory_peak_bytes >= job.graph.weight_bytes > 1e6
    assert timing.part.threads == len(own_cores())


def test_copies_and_neighbours_run_at_once(model: Path) -> None:
    half = 100.0 / max(2, len(own_cores()))
    timings = measure(a_job(model, 1, half, processes=2), [a_job(model, 4, half)], QUICK)
    assert len(timings) == 2
    assert all(timing.stats.repeats >= 2 for timing in timings)


def test_shares_that_do_not_fit_are_refused_before_anything_starts(model: Path) -> None:
    with pytest.raises(InputError, match="at most 100 percent"):
        measure(a_job(model, share=60.0), [a_job(model, share=60.0)], QUICK)
    with pytest.raises(InputError, match=r"no MIG instance 1g\.5gb"):
        slices_of([Share(100.0, "1g.5gb")])


def test_a_model_that_the_runtime_refuses_is_the_users_error(tmp_path: Path, model: Path) -> None:
    from dataclasses import replace

    job = replace(a_job(model), path=write_strange(tmp_path / "odd.onnx"))
    with pytest.raises(InputError, match="Nonsense"):
        measure(job, limits=QUICK)


def test_neighbours_end_their_batch_before_they_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    tell, expect = Child.tell, Child.expect

    def note_line(self: Child, line: str) -> None:
        said.append(line)
        tell(self, line)

    def heard(self: Child, event: str, within_s: float) -> dict[str, Any]:
        found = expect(self, event, within_s)
        said.append(event)
        return found

    monkeypatch.setattr(Child, "tell", note_line)
    monkeypatch.setattr(Child, "expect", heard)
    with keep_running([a_job(write_mlp(tmp_path / "mlp.onnx"))], [ShareBinding(ORT_CPU, {})]):
        assert said[-1] == "go"
    assert said[-2:] == ["stop", "done"]
