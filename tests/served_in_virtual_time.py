"""The router and batcher of the serving runtime, with simulated workers, on a clock that only the loop moves."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from gpuprof.domain.deployment import Replica
from gpuprof.rules.routing import routing_rule
from gpuprof.serving.machine.launcher import WorkerOrder
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.router.served_replica import ReplicaPlan, ServedReplica
from gpuprof.serving.router.simulated_link import SimulatedLink
from gpuprof.serving.router.worker_handle import WorkerHandle
from gpuprof.serving.router.worker_link import LinkEvents
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import Inference, InputTensor, RefusedError
from gpuprof.serving.watch.statistics import ModelStatistics
from gpuprof.serving.worker.runtime import NULL_PREFIX

#: What a turn of the loop takes: a timer that is due a rounding error too early must not find time standing still.
_TURN_S = 1e-9
_MODULES = ("router.served_replica", "router.worker_handle", "router.served_model")


@dataclass(frozen=True)
class Outage:
    """The device of a replica is away from one time to another, in ms; None: it does not come back."""

    replica: int
    begin_ms: float
    end_ms: float | None = None


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: when nothing is ready its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.now += timeout or _TURN_S
        return super().select(0)


class _Link(SimulatedLink):
    """A worker that can end and be started again."""

    def fail(self) -> None:
        self._ending = asyncio.ensure_future(self.end())

    def come_back(self) -> None:
        assert self.spec is not None
        self._free_at = 0.0
        self.is_ready = True
        self._events.ready(self.spec)


@dataclass
class Served:
    """What became of the requests: latencies in ms by when they came, and how many were turned away or given up."""

    latencies_ms: dict[float, float]
    failed: int = 0


def serve(
    replicas: Sequence[Replica],
    arrivals_ms: Sequence[float],
    outages: Sequence[Outage],
    patch: pytest.MonkeyPatch,
    rule: str = "fastest",
    slo_ms: float = 1e6,
) -> Served:
    """Play the requests, all of one model, through the runtime's own objects."""
    loop = VirtualLoop()
    clock = SimpleNamespace(monotonic=loop.time, time=time.time, perf_counter=loop.time)
    for module in _MODULES:
        patch.setattr(f"gpuprof.serving.{module}.time", clock)
    try:
        return loop.run_until_complete(_play(loop, replicas, arrivals_ms, outages, rule, slo_ms))
    finally:
        loop.close()


async def _play(
    loop: VirtualLoop,
    replicas: Sequence[Replica],
    arrivals_ms: Sequence[float],
    outages: Sequence[Outage],
    rule: str,
    slo_ms: float,
) -> Served:
    start = loop.time()
    model = ServedModel("m", slo_ms, routing_rule(rule), Arena(1 << 20))
    links: list[list[_Link]] = [[] for _ in replicas]
    for i, one in enumerate(replicas):
        times = one.batch_latency_ms or ()
        order = WorkerOrder("m", "1", f"{NULL_PREFIX}4", one.batch, latency_ms=times)

        def connect(events: LinkEvents, mine: list[_Link] = links[i]) -> _Link:
            mine.append(_Link(events))
            return mine[-1]

        workers = [WorkerHandle(f"m/{i}.{p}", order, connect, 1e6) for p in range(one.processes)]
        plan = ReplicaPlan(f"m/{i}", one.batch, one.max_wait_ms, times)
        model.replicas.append(ServedReplica(plan, workers, model, ModelStatistics()))
        for worker in workers:
            model.spec = await worker.start()
    seen = Served({})
    for outage in outages:
        for link in links[outage.replica]:
            loop.call_at(start + outage.begin_ms / 1000.0, link.fail)
            if outage.end_ms is not None:
                loop.call_at(start + outage.end_ms / 1000.0, link.come_back)
    for came in arrivals_ms:
        loop.call_at(start + came / 1000.0, _send, model, came, start, seen)
    await asyncio.sleep(100.0)
    seen.failed = len(arrivals_ms) - len(seen.latencies_ms)
    return seen


def _send(model: ServedModel, came: float, start: float, seen: Served) -> None:
    def done(*_: object) -> None:
        seen.latencies_ms[came] = 1000.0 * (asyncio.get_running_loop().time() - start) - came

    def refused(*_: object) -> None:
        pass

    inference = Inference(1, [InputTensor([1], b"")], None, start + came / 1000.0, model.slo_ms, done, refused)
    with contextlib.suppress(RefusedError):
        model.submit(inference)
