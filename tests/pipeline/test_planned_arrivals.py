"""Which arrivals a map is planned for."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.domain.arrival_process import Batched, RecordedArrivals
from gpuprof.domain.shaped_queue import ShapedQueue
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.errors import InputError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.pipeline.planned_arrivals import make_queueing

SERVER = BatchServer((4.0, 5.0, 6.0, 7.0), 4, 0.0)


@pytest.mark.parametrize("text", [None, "poisson", " Poisson "])
def test_without_a_shape_arrivals_are_poisson(text: str | None) -> None:
    assert isinstance(make_queueing(text), BatchQueue)


def test_a_shape_by_name_is_planned_for() -> None:
    queueing = make_queueing("batch:8")
    assert isinstance(queueing, ShapedQueue)
    assert queueing.shape == Batched(1.0, 8)
    calm = BatchQueue().pool(Arrivals(300.0), (SERVER, SERVER)).whole.percentile(99.0)
    assert queueing.pool(Arrivals(300.0), (SERVER, SERVER)).whole.percentile(99.0) > 1.2 * calm


def test_a_trace_is_planned_for_at_the_rate_that_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time_s\n" + "".join(f"{i}\n{i}.001\n{i}.002\n" for i in range(2000)))
    queueing = make_queueing(str(path))
    assert isinstance(queueing, ShapedQueue)
    assert isinstance(queueing.shape, RecordedArrivals)
    # Three at once, then nothing: the second and the third wait for the first.
    times = queueing.pool(Arrivals(3.0), (SERVER,)).whole
    assert times.percentile(20.0) == pytest.approx(4.0, rel=0.05)
    assert times.percentile(99.0) > 7.0


def test_a_trace_that_is_not_there_or_of_several_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no trace"):
        make_queueing(str(tmp_path / "missing.csv"))
    path = tmp_path / "two.csv"
    path.write_text("time_s,model\n0.1,a\n0.2,b\n")
    with pytest.raises(InputError, match="names 2 models"):
        make_queueing(str(path))
    with pytest.raises(InputError, match="unknown arrival process"):
        make_queueing("gama:4")
