"""What neighbours cost, from what batches took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.serving.router.neighbour_times import ReplicaTime, attribute_times, list_replica_times
from gpuprof.serving.watch.statistics import BatchStatistics


def time_of(model: str, beside: tuple[str, ...], ratio: float, predicted_ns: float = 1e9) -> ReplicaTime:
    return ReplicaTime(model, beside, ratio * predicted_ns, predicted_ns)


def test_what_is_slow_alone_too_is_not_put_down_to_a_neighbour() -> None:
    cost = attribute_times([time_of("a", (), 1.5), time_of("a", ("heavy",), 3.0), time_of("heavy", ("a",), 1.1)])
    assert cost["a"].alone == pytest.approx(1.5)
    assert cost["a"].beside == pytest.approx({"heavy": 2.0})
    assert cost["heavy"].alone is None and cost["heavy"].beside == pytest.approx({"a": 1.1})


def test_slowdowns_of_several_neighbours_multiply_and_are_told_apart_by_other_sets() -> None:
    both = time_of("a", ("b", "c"), 3.0)
    assert attribute_times([both])["a"].beside == pytest.approx({"b": 3.0**0.5, "c": 3.0**0.5})
    assert attribute_times([both, time_of("a", ("b",), 1.2)])["a"].beside == pytest.approx({"b": 1.2, "c": 2.5})
    assert attribute_times([time_of("a", ("b", "b"), 4.0)])["a"].beside == pytest.approx({"b": 2.0})


def served_replica(name: str, place: str, took_ms: float, count: int = 10, mig: str = "") -> Any:
    plan = SimpleNamespace(name=name, place=place, mig=mig, latency_ms=(5.0, 8.0))
    batches = {2: BatchStatistics(count, 0, int(took_ms * 1e6) * count, 0)} if count else {}
    return SimpleNamespace(plan=plan, batches=batches)


def model_of(name: str, *replicas: Any) -> Any:
    return SimpleNamespace(name=name, replicas=list(replicas))


def test_neighbours_are_those_that_ran_on_the_same_device_or_instance() -> None:
    models = [
        model_of("a", served_replica("a/0", "n/0", 16.0), served_replica("a/1", "n/1", 8.0, mig="1g@0")),
        model_of("heavy", served_replica("heavy/0", "n/0", 8.0), served_replica("heavy/1", "n/1", 8.0, mig="1g@1")),
        model_of("idle", served_replica("idle/0", "n/0", 8.0, count=0)),
    ]
    times = {(row.model, row.beside): row.took_ns / row.predicted_ns for row in list_replica_times(models)}
    assert times == {("a", ("heavy",)): 2.0, ("a", ()): 1.0, ("heavy", ("a",)): 1.0, ("heavy", ()): 1.0}


def test_only_what_came_since_counts() -> None:
    (model,) = models = [model_of("a", served_replica("a/0", "n/0", 16.0))]
    earlier = {"a/0": {2: (6, int(6 * 8e6))}}  # the first six took 8 ms each, the last four the rest
    (row,) = list_replica_times(models, earlier)
    assert row.took_ns / row.predicted_ns == pytest.approx((160.0 - 48.0) / 32.0)
    assert list_replica_times(models, {"a/0": {2: (10, int(160e6))}}) == []
    assert model.name == row.model
