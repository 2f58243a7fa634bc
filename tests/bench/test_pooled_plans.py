"""How long the bench of pooled plans simulates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.pooled_plans import count_requests, random_problems
from gpuprof.placement.contract import ExponentialQueue
from gpuprof.placement.deploy import to_map
from gpuprof.placement.optimal.optimal import Optimal


@pytest.mark.parametrize(("load", "times"), [(0.5, 1.0), (0.95, 1.0), (0.975, 4.0), (0.999, 20.0)])
def test_simulations_near_capacity_are_longer(load: float, times: float) -> None:
    given = replace(next(random_problems(1, 7)), queueing=ExponentialQueue())
    planned = to_map(given, Optimal().place(given))
    parts = [part for node in planned.nodes for gpu in node.gpus for part in gpu.partitions]
    predicted = [one.predicted for part in parts for one in part.replicas]
    capacity = math.fsum(one.throughput_rps for one in predicted if one is not None)
    model = planned.models["m"].model_copy(update={"rate_rps": load * capacity})
    loaded = planned.model_copy(update={"models": {"m": model}})
    assert count_requests(loaded) == pytest.approx(150_000 * times, rel=1e-3)
