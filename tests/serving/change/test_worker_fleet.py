"""What a model is served by, from its map."""

from __future__ import annotations

import asyncio
import time

from gpuprof.domain.map_file import parse_map
from gpuprof.serving.change.worker_fleet import WorkerFleet
from gpuprof.serving.router.router import Router
from gpuprof.serving.transport.arena import Arena
from tests.serving.running import map_of, replica


def test_a_model_keeps_as_much_in_hand_as_the_percentile_of_its_map_asks_for() -> None:
    async def learn(percentile: float) -> float:
        document = map_of({"m": "null:4"}, [replica("m")])
        document["models"]["m"]["percentile"] = percentile
        fleet = WorkerFleet(Router(Arena(1 << 16)), None, "fastest", 1.0, 1.0)  # type: ignore[arg-type]
        reserve = fleet._model(parse_map(document, "it"), "m")._reserve
        now = time.monotonic()
        for took_ms in (600.0, 300.0) * 20:
            reserve.observe(450.0, took_ms, 500.0, now)
        return reserve.at(now)

    assert asyncio.run(learn(50.0)) < asyncio.run(learn(99.0))
