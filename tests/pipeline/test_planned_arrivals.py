"""Which arrivals a map is planned for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprof.domain.arrival_process import (
    BatchPoissonArrivals,
    RecordedArrivals,
)
from gpuprof.domain.sojourn import Arrivals, BatchServer, ShapedQueue, queue_of
from gpuprof.errors import InputError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.pipeline.problem import make_queueing
from gpuprof.placement.contract import LinearEstimator, demand, evidence, plain_device, problem, solve_and_check
from gpuprof.placement.feasibility import check
from gpuprof.placement.planned_workloads import find_alike
from gpuprof.placement.policies import make_policy

SERVER = BatchServer((4.0, 5.0, 6.0, 7.0), 4, 0.0)


def test_a_shape_by_name_is_planned_for() -> None:
    queueing = make_queueing("batch:8", ["a"])
    assert isinstance(queueing, ShapedQueue)
    assert queueing.shape == BatchPoissonArrivals(1.0, 8)
    calm = BatchQueue().pool(Arrivals(300.0), (SERVER, SERVER)).whole.percentile(99.0)
    assert queueing.pool(Arrivals(300.0), (SERVER, SERVER)).whole.percentile(99.0) > 1.2 * calm
    assert queueing.sojourn(Arrivals(150.0), SERVER) == queueing.pool(Arrivals(150.0), (SERVER,)).whole


def test_a_trace_is_planned_for_at_the_rate_that_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time_s\n" + "".join(f"{i}\n{i}.001\n{i}.002\n" for i in range(2000)))
    queueing = make_queueing(str(path), ["a"])
    assert isinstance(queueing, ShapedQueue)
    assert isinstance(queueing.shape, RecordedArrivals)
    # Three at once, then nothing: the second and the third wait for the first.
    times = queueing.pool(Arrivals(3.0), (SERVER,)).whole
    assert times.percentile(20.0) == pytest.approx(4.0, rel=0.05)
    assert times.percentile(99.0) > 7.0


def write_two_models(path: Path) -> Path:
    """Six requests of ``a`` at once every second, and one of ``b`` every sixth of it."""
    times = [(float(second), "a") for second in range(600) for _ in range(6)]
    times += [(second + part / 6.0, "b") for second in range(600) for part in range(6)]
    path.write_text("time_s,model\n" + "".join(f"{time:.6f},{model}\n" for time, model in sorted(times)))
    return path


def test_a_trace_says_of_each_model_how_its_requests_arrive(tmp_path: Path) -> None:
    trace = str(write_two_models(tmp_path / "two.csv"))
    queueing = make_queueing(trace, ["a", "b"])
    both = [queue_of(queueing, model).pool(Arrivals(60.0), (SERVER,)).whole.percentile(99.0) for model in "ab"]
    assert both[0] > 10.0  # the last of six waits for a batch of one and one of four
    assert both[1] == pytest.approx(4.0, rel=0.05)
    demands = [demand("a", 60.0, 9.0), demand("b", 60.0, 9.0)]
    given = replace(problem(demands, [(plain_device(), None)], LinearEstimator(3.0, 1.0)), queueing=queueing)
    assert find_alike(given) == {"a": "a", "b": "b"}
    placement, deployment = solve_and_check(make_policy("optimal"), given)
    counts = Counter(replica.model for *_, replica in deployment.places())
    assert not placement.unplaced
    assert counts["a"] > counts["b"] == 1
    even = deployment.models["b"].predicted
    assert even is not None
    assert even.p99_ms == pytest.approx(even.p50_ms or 0.0, rel=0.05)
    assert check(deployment, replace(evidence(given), queueing=BatchQueue())), "b's times are those of its own law"


def test_a_trace_that_is_not_there_or_lacks_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no trace"):
        make_queueing(str(tmp_path / "missing.csv"), ["a"])
    path = tmp_path / "two.csv"
    path.write_text("time_s,model\n0.1,a\n0.2,b\n")
    with pytest.raises(InputError, match="nothing is known of how requests of c arrive"):
        make_queueing(str(path), ["a", "c"])
    path.write_text("time_s,model\n")
    with pytest.raises(InputError, match="holds no requests"):
        make_queueing(str(path), ["a"])
    with pytest.raises(InputError, match="unknown arrival process"):
        make_queueing("gama:4", ["a"])
