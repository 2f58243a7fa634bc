"""What neighbours cost, from what batches took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpuprof.serving.router.neighbour_times import find_neighbour_slowdowns
from gpuprof.serving.watch.statistics import BatchStatistics, ModelStatistics


def served_replica(name: str, place: str, took_ms: float, count: int = 10, mig: str = "") -> Any:
    plan = SimpleNamespace(name=name, place=place, mig=mig, latency_ms=(5.0, 8.0))
    batches = {2: BatchStatistics(count, 0, int(took_ms * 1e6) * count, 0)} if count else {}
    return SimpleNamespace(plan=plan, statistics=ModelStatistics(batches=batches))


def model_of(name: str, *replicas: Any) -> Any:
    return SimpleNamespace(name=name, replicas=list(replicas))


def test_neighbours_are_those_that_ran_on_the_same_device_or_instance() -> None:
    models = [
        model_of("a", served_replica("a/0", "n/0", 16.0), served_replica("a/1", "n/1", 8.0, mig="1g@0")),
        model_of("heavy", served_replica("heavy/0", "n/0", 8.0), served_replica("heavy/1", "n/1", 8.0, mig="1g@1")),
        model_of("idle", served_replica("idle/0", "n/0", 8.0, count=0)),
    ]
    assert find_neighbour_slowdowns(models) == {"a": {"heavy": 2.0}, "heavy": {"a": 1.0}}


def test_slowdowns_of_several_neighbours_multiply() -> None:
    peers = [model_of(name, served_replica(f"{name}/0", "n/0", 8.0)) for name in ("b", "c")]
    slowdowns = find_neighbour_slowdowns([model_of("a", served_replica("a/0", "n/0", 24.0)), *peers])
    assert slowdowns["a"] == pytest.approx({"b": 3.0**0.5, "c": 3.0**0.5})


def test_only_what_came_since_counts() -> None:
    models = [model_of("a", served_replica("a/0", "n/0", 16.0)), model_of("b", served_replica("b/0", "n/0", 8.0))]
    earlier = {"a/0": {2: (6, int(6 * 8e6))}}  # the first six took 8 ms each, the last four the rest
    assert find_neighbour_slowdowns(models, earlier)["a"]["b"] == pytest.approx((160.0 - 48.0) / 32.0)
    assert find_neighbour_slowdowns(models, {"a/0": {2: (10, int(160e6))}}) == {}
