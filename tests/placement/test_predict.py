"""What a map predicts of its replicas: means, upper ends, and batches that are padded."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import DeploymentMap, Replica
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import EXTRAPOLATED, INTERPOLATED, MEASURED, Estimate, Figure, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.runtime_variant import Padding
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer, Sojourn
from gpuprof.placement.contract import ExponentialQueue, LinearEstimator, demand, evidence, plain_device, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.planned_workloads import find_alike, planned_ms
from gpuprof.placement.policies import make_policy
from gpuprof.placement.predict import Predictor, retime_map
from gpuprof.placement.problem import MEANS, Options, Problem
from gpuprof.rules.batching import padded_size
from tests.placement.curved import CurvedEstimator

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
    gpus = [PlacedGpu("plain", (PlacedPartition((sure,)),)), PlacedGpu("plain", (PlacedPartition((sure, unsure)),))]
    predictor = Predictor(given, gpus)
    alone, beside = (predictor.replicas(plain_device(), gpu.partitions[0])[0].predicted for gpu in gpus)
    assert alone.p99_ms == beside.p99_ms
    assert alone.p99_ms_interval is not None and beside.p99_ms_interval is not None
    assert beside.p99_ms_interval[1] > alone.p99_ms_interval[1]


def test_planning_with_confidence_takes_the_upper_end_and_extrapolates_it() -> None:
    figure = Figure(10.0, MEASURED, 9.0, 11.0)
    assert planned_ms(figure, None) == 10.0
    assert planned_ms(figure, 0.9) == pytest.approx(11.0)
    assert planned_ms(figure, 0.99) == pytest.approx(10.0 + 2.5758 / 1.6449, rel=1e-4)
    assert planned_ms(Figure(10.0, MEASURED), 0.9) == 10.0


@pytest.mark.parametrize(
    ("source", "planned"),
    [
        (MEASURED, 10.0),
        (INTERPOLATED, 10.0),
        ("sum of its models, interpolated", 10.0),
        (EXTRAPOLATED, 15.0),
        ("roofline, uncalibrated", 15.0),
        ("measured × linear", 15.0),
    ],
)
def test_what_nobody_observed_is_planned_at_its_upper_end(source: str, planned: float) -> None:
    figure = Figure(10.0, source, 5.0, 15.0)
    assert planned_ms(figure, None) == planned
    assert planned_ms(figure, MEANS) == 10.0


def make_problem(demands: tuple[Demand, ...], spread: float = 0.0) -> Problem:
    fleet = Fleet((FleetEntry(plain_device()),))
    return Problem(demands, fleet, CurvedEstimator(spread=spread), ExponentialQueue(), Options(latency_budget=0.5))


def test_equal_demands_for_one_model_under_two_names_are_alike() -> None:
    base = Demand("m0", 100.0, Slo(50.0))
    given = (base, replace(base, model="m1"), Demand("m2", 100.0, Slo(60.0)), replace(base, model="m3", priority=1))
    assert find_alike(make_problem(given)) == {"m0": "m0", "m1": "m0", "m2": "m2", "m3": "m3"}


def test_equal_demands_for_two_models_are_not_alike() -> None:
    given = (Demand("m0", 100.0, Slo(50.0)), Demand("m1", 100.0, Slo(50.0)))
    assert find_alike(make_problem(given, spread=0.1)) == {"m0": "m0", "m1": "m1"}


@dataclass(frozen=True, slots=True)
class PaddedEstimator(LinearEstimator):
    """Every batch is filled up."""

    padding: Padding = Padding.FULL

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time of the formula."""
        estimate = LinearEstimator.estimate(self, model, device, batch, share, beside, processes)
        return replace(estimate, padding=self.padding)


def _pose(source: str = MEASURED, slowdown: float = 0.05, count: int | None = None) -> Problem:
    demands = [demand("m0", 120.0, 60.0), demand("m1", 300.0, 40.0)]
    estimator = PaddedEstimator(slowdown=slowdown, source=source)
    return problem(demands, [(plain_device(), count)], estimator, Options())


@pytest.mark.parametrize("policy", ["ffd", "gpulet", "igniter", "milp", "optimal", "usher"])
def test_every_batch_of_a_replica_is_planned_with_the_time_of_a_full_one(policy: str) -> None:
    given = _pose(count=4)
    deployment = to_map(given, make_policy(policy).place(given))
    assert check(deployment, evidence(given)) == ()
    replicas = [replica for *_, replica in deployment.places()]
    assert any(replica.batch > 1 for replica in replicas)
    for replica in replicas:
        assert replica.batch_latency_ms is not None
        assert set(replica.batch_latency_ms) == {replica.batch_latency_ms[-1]}
        assert len(replica.batch_latency_ms) == replica.batch
        assert replica.batch_latency_ms[-1] == pytest.approx(replica.predicted.latency_ms)


@pytest.mark.parametrize("policy", ["ffd", "optimal"])
def test_batches_padded_to_powers_of_two_are_planned_with_the_times_of_these(policy: str) -> None:
    estimator = PaddedEstimator(slowdown=0.05, source=MEASURED, padding=Padding.POWERS_OF_TWO)
    given = replace(_pose(count=4), estimator=estimator)
    deployment = to_map(given, make_policy(policy).place(given))
    assert check(deployment, evidence(given)) == ()
    for *_, replica in deployment.places():
        times = replica.batch_latency_ms
        assert times is not None and len(set(times)) > 1
        sizes = [padded_size(rows, replica.batch, Padding.POWERS_OF_TWO) for rows in range(1, replica.batch + 1)]
        assert times == tuple(times[size - 1] for size in sizes)


def test_check_refuses_partial_batches_that_are_quicker_than_full_ones() -> None:
    given = _pose()
    content = json.loads(to_map(given, make_policy("ffd").place(given)).to_json())
    replica = next(
        written
        for node in content["nodes"]
        for gpu in node["gpus"]
        for partition in gpu["partitions"]
        for written in partition["replicas"]
        if written["batch"] > 1
    )
    replica["batch_latency_ms"][0] *= 0.5
    violations = check(DeploymentMap.model_validate(content), evidence(given))
    assert any("batch_latency_ms of 1 is" in violation.message for violation in violations)


def test_new_times_of_a_map_are_padded_too() -> None:
    given = _pose()
    deployment = to_map(given, make_policy("ffd").place(given))
    slower = replace(given, estimator=PaddedEstimator(start_ms=4.0, slowdown=0.05))
    for *_, replica in retime_map(deployment, evidence(slower), "another").places():
        assert replica.batch_latency_ms is not None
        assert replica.batch_latency_ms == pytest.approx((replica.predicted.latency_ms,) * replica.batch)
