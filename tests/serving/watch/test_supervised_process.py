"""A supervised process is restarted until it is stopped."""

from __future__ import annotations

import asyncio

from gpuprof.serving.watch.supervised_process import LivingProcess, SupervisedProcess


def test_a_process_that_is_stopped_when_its_restart_is_due_does_not_start() -> None:
    starts = []

    async def start() -> LivingProcess:
        starts.append(1)
        raise RuntimeError("what it starts is gone")

    async def stop_before_start() -> None:
        process = SupervisedProcess(start, lambda pid: None, lambda error: None)
        stopping = asyncio.ensure_future(process.stop(1.0))
        process.begin()
        await stopping

    asyncio.run(stop_before_start())
    assert not starts
