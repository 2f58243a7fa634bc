from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpuprof.domain.deployment import Replica
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer, Sojourn
from gpuprof.placement.contract import ExponentialQueue, LinearEstimator, demand, plain_device, problem
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.predict import Predictor
from gpuprof.placement.problem import Options, Problem

REPLICA = PlacedReplica("m", 4, 1, Share(50.0), 100.0)


def predict(given: Problem, placed: PlacedReplica, *neighbours: PlacedReplica) -> Replica:
    """Return the first replica of a partition."""
    partition = PlacedPartition((placed, *neighbours))
    predictor = Predictor(given, [PlacedGpu("plain", (partition,))])
    return predictor.replicas(plain_device(), partition)[0]


def test_a_replica_is_predicted_at_its_part_of_the_rate() -> None:
    predicted = predict(problem([demand("m", 200.0, 60.0)]), REPLICA)
    server = BatchServer((6.0, 8.0, 10.0, 12.0), 4, 0.0)
    sojourn = ExponentialQueue().sojourn(Arrivals(100.0), server)
    assert predicted.batch_latency_ms == (6.0, 8.0, 10.0, 12.0)
    assert predicted.predicted.p99_ms == pytest.approx(sojourn.percentile(99.0))
    assert predicted.predicted.goodput_rps == pytest.approx(100.0 * sojourn.fraction_within(60.0))
    assert predicted.predicted.throughput_rps == pytest.approx(4000.0 / 12.0)


def test_intervals_enclose_the_predictions() -> None:
    predicted = predict(problem([demand("m", 200.0, 40.0)]), REPLICA).predicted
    for value, interval in (
        (predicted.p99_ms, predicted.p99_ms_interval),
        (predicted.goodput_rps, predicted.goodput_rps_interval),
        (predicted.throughput_rps, predicted.throughput_rps_interval),
    ):
        assert value is not None
        assert interval is not None
        assert interval[0] < value < interval[1]


class _RoughQueue(ExponentialQueue):
    """As simulation is: off by up to 1%, one way or the other by what is asked."""

    def sojourn(self, arrivals: Arrivals, server: BatchServer) -> Sojourn:
        exact = super().sojourn(arrivals, server)
        factor = 1.0 + 0.01 * math.sin(1e6 * server.latency_ms[-1])
        return replace(exact, quantiles_ms=tuple((p, ms * factor) for p, ms in exact.quantiles_ms))


@pytest.mark.parametrize("rate", [50.0, 60.0, 70.0, 80.0, 90.0])
def test_narrow_intervals_enclose_predictions_that_are_simulated(rate: float) -> None:
    given = replace(problem([demand("m", rate, 40.0)], None, LinearEstimator(interval=1e-5)), queueing=_RoughQueue())
    predicted = predict(given, replace(REPLICA, rate_rps=rate)).predicted
    assert predicted.p99_ms is not None and predicted.p99_ms_interval is not None
    assert predicted.p99_ms_interval[0] <= predicted.p99_ms <= predicted.p99_ms_interval[1]


def test_the_prediction_is_that_of_the_means_whatever_was_planned_with() -> None:
    plain, careful = (
        predict(problem([demand("m")], options=Options(confidence=confidence)), REPLICA) for confidence in (None, 0.9)
    )
    assert plain == careful


def test_memory_that_nobody_observed_is_predicted_and_never_a_limit() -> None:
    placed = replace(REPLICA, memory_bytes=2**30)
    measured, guessed = (
        predict(problem([demand("m")], estimator=LinearEstimator(source=source)), placed)
        for source in ("measured", "roofline, uncalibrated")
    )
    assert (measured.memory_limit_bytes, measured.predicted.memory_bytes) == (2**30, 2**30)
    assert (guessed.memory_limit_bytes, guessed.predicted.memory_bytes) == (None, 2**30)


def test_under_the_papers_rule_goodput_is_throughput_up_to_the_rate_and_nothing_is_said_of_percentiles() -> None:
    given = problem([demand("m")], options=Options(latency_budget=0.5))
    predicted = predict(given, replace(REPLICA, rate_rps=400.0)).predicted
    assert predicted.goodput_rps == pytest.approx(4000.0 / 12.0)
    assert predicted.p99_ms is None


def test_a_neighbour_that_slows_down_is_in_the_prediction() -> None:
    given = problem([demand("m")], estimator=LinearEstimator(slowdown=1.0))
    alone, beside = predict(given, REPLICA), predict(given, REPLICA, replace(REPLICA))
    assert beside.predicted.latency_ms == 2.0 * alone.predicted.latency_ms


class _UnsureEstimator(LinearEstimator):
    """Of a model beside others it knows the same time within a wider interval."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        estimate = super().estimate(model, device, batch, share, (), processes)
        time = estimate.latency_ms.value
        reach = 2.0 if beside else 1.1
        return replace(estimate, latency_ms=replace(estimate.latency_ms, low=time / reach, high=time * reach))


def test_of_equal_replicas_that_are_not_equally_sure_each_has_its_own_interval() -> None:
    given = problem([demand("m", 120.0, 40.0), demand("other", 1.0)], None, _UnsureEstimator())
    sure, unsure = replace(REPLICA, rate_rps=60.0), replace(REPLICA, model="other", rate_rps=1.0)
    gpus = [
        PlacedGpu("plain", (PlacedPartition((sure,)),)),
        PlacedGpu("plain", (PlacedPartition((sure, unsure)),)),
    ]
    predictor = Predictor(given, gpus)
    alone, beside = (predictor.replicas(plain_device(), gpu.partitions[0])[0].predicted for gpu in gpus)
    assert alone.p99_ms == beside.p99_ms
    assert alone.p99_ms_interval is not None and beside.p99_ms_interval is not None
    assert beside.p99_ms_interval[1] > alone.p99_ms_interval[1]
