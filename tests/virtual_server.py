"""The router and batcher of the serving runtime, with simulated workers, on a clock that only the loop moves.

What happens is what would happen on a machine that does nothing else and takes no time for it: minutes of service are
played in seconds, and any two runs are the same.
"""

import asyncio
import contextlib
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

from gpuprof.domain.deployment import Replica
from gpuprof.serving.machine.orders import WorkerOrder
from gpuprof.serving.router.served_model import ServedModel
from gpuprof.serving.router.served_replica import ReplicaPlan, ServedReplica
from gpuprof.serving.router.worker import SimulatedWorker
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.inference import Inference, InputTensor, RefusedError
from gpuprof.serving.watch.statistics import ModelStatistics
from gpuprof.serving.worker.runtime import NULL_PREFIX

#: What a turn of the loop takes: a timer that is due a rounding error too early must not find time standing still.
_TURN_S = 1e-9
_MODULES = ("served_replica", "worker", "served_model")
_DRAIN_S = 100.0


@dataclass(frozen=True)
class Outage:
    """The device of a replica is away from one time to another, in ms; None: it does not come back."""

    replica: int
    begin_ms: float
    end_ms: float | None = None


@dataclass
class VirtualRun:
    """What became of the requests that came at these times: ms until the answer, None where there was none."""

    arrivals_ms: Sequence[float]
    took_ms: list[float | None]

    @property
    def latencies_ms(self) -> dict[float, float]:
        """Latency by the time of arrival, of those that were answered."""
        pairs = zip(self.arrivals_ms, self.took_ms, strict=True)
        return {arrival_ms: took for arrival_ms, took in pairs if took is not None}

    @property
    def failed(self) -> int:
        """Requests without an answer."""
        return sum(took is None for took in self.took_ms)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: when nothing is ready its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Return the virtual seconds."""
        return self.now


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.now += timeout or _TURN_S
        return super().select(0)


class _Worker(SimulatedWorker):
    """A worker that can end and be started again."""

    def fail(self) -> None:
        self._ending = asyncio.ensure_future(self._end())

    def come_back(self) -> None:
        assert self.spec is not None
        self._free_at = 0.0
        self._on_ready(self.spec)


def serve(
    replicas: Sequence[Replica], arrivals_ms: Sequence[float], outages: Sequence[Outage] = (), slo_ms: float = 1e6
) -> VirtualRun:
    """Play requests that come at these times, all of one model, through the runtime's own objects."""
    loop = VirtualLoop()
    with contextlib.ExitStack() as stack:
        clock = SimpleNamespace(monotonic=loop.time, time=time.time, perf_counter=loop.time)
        for module in _MODULES:
            stack.enter_context(patch(f"gpuprof.serving.router.{module}.time", clock))
        stack.callback(loop.close)
        return loop.run_until_complete(_play(loop, replicas, arrivals_ms, outages, slo_ms))


async def _play(
    loop: VirtualLoop,
    replicas: Sequence[Replica],
    arrivals_ms: Sequence[float],
    outages: Sequence[Outage],
    slo_ms: float,
) -> VirtualRun:
    start = loop.time()
    model = ServedModel("m", slo_ms, Arena(1 << 20))
    workers = [await _start_replica(model, number, replica) for number, replica in enumerate(replicas)]
    for outage in outages:
        for worker in workers[outage.replica]:
            loop.call_at(start + outage.begin_ms / 1000.0, worker.fail)
            if outage.end_ms is not None:
                loop.call_at(start + outage.end_ms / 1000.0, worker.come_back)
    run = VirtualRun(arrivals_ms, [None] * len(arrivals_ms))
    for number, arrival_ms in enumerate(arrivals_ms):
        loop.call_at(start + arrival_ms / 1000.0, _send, model, run, number, start)
    await asyncio.sleep(max(arrivals_ms, default=0.0) / 1000.0 + _DRAIN_S)
    return run


async def _start_replica(model: ServedModel, number: int, replica: Replica) -> list[_Worker]:
    times = replica.batch_latency_ms or ()
    cv = replica.predicted.latency_cv
    workers = []
    for process in range(replica.processes):
        group = f"{number}.{process}"
        order = WorkerOrder("m", "1", f"{NULL_PREFIX}4", replica.batch, group=group, latency_ms=times, latency_cv=cv)
        workers.append(_Worker(f"m/{group}", order, 1e6))
    plan = ReplicaPlan(f"m/{number}", replica.batch, replica.max_wait_ms, times)
    model.replicas.append(ServedReplica(plan, [*workers], model, ModelStatistics()))
    for worker in workers:
        model.spec = await worker.start()
    return workers


def _send(model: ServedModel, run: VirtualRun, number: int, start: float) -> None:
    arrival_ms = run.arrivals_ms[number]

    def done(*_: object) -> None:
        run.took_ms[number] = 1000.0 * (asyncio.get_running_loop().time() - start) - arrival_ms

    def ignore_refusal(*_: object) -> None:
        pass

    tensors, arrived = [InputTensor([1], b"")], start + arrival_ms / 1000.0
    with contextlib.suppress(RefusedError):
        model.submit(Inference(1, tensors, None, arrived, model.slo_ms, done, ignore_refusal))
