"""The router and batcher of the serving runtime, with simulated workers, on a clock that only the loop moves.

What happens is what would happen on a machine that does nothing else and takes no time for it: minutes of service are
played in seconds, and any two runs are the same.
"""

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
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


@dataclass(frozen=True)
class SlowPhase:
    """The batches of a replica that begin in this time, in ms, take ``factor`` times as long; infinite: it is stopped.

    What runs when it is stopped is delayed by the whole phase.
    """

    replica: int
    begin_ms: float
    end_ms: float
    factor: float = float("inf")


@dataclass(frozen=True)
class VirtualRequest:
    """A request: when it comes, by when it wants its answer (None: the SLO), and for whom."""

    at_ms: float
    priority: int = 0
    timeout_ms: float | None = None
    client: str = ""


@dataclass
class VirtualRun:
    """What became of the requests, in their order: ms until the answer, None where there was none."""

    requests: Sequence[VirtualRequest]
    took_ms: list[float | None] = field(default_factory=list)

    @property
    def latencies_ms(self) -> dict[float, float]:
        """Latency by the time of arrival, of those that were answered."""
        pairs = zip(self.requests, self.took_ms, strict=True)
        return {request.at_ms: took for request, took in pairs if took is not None}

    @property
    def failed(self) -> int:
        """Requests without an answer."""
        return sum(took is None for took in self.took_ms)

    def in_time(self, slo_ms: float, begin_ms: float = 0.0, end_ms: float = float("inf")) -> int:
        """Return how many of those that came in a time were answered within ``slo_ms``."""
        pairs = zip(self.requests, self.took_ms, strict=True)
        return sum(
            begin_ms <= request.at_ms < end_ms and took is not None and took <= slo_ms for request, took in pairs
        )


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
    """A worker that can end and be started again, be slow, and be stopped."""

    factor = 1.0

    def fail(self) -> None:
        self._ending = asyncio.ensure_future(self._end())

    def come_back(self) -> None:
        assert self.spec is not None
        self._free_at = 0.0
        self._on_ready(self.spec)

    def slow_down(self, factor: float) -> None:
        self.factor = factor

    def stop_for(self, seconds: float) -> None:
        now = self._loop.time()
        for number, timer in list(self._timers.items()):
            timer.cancel()
            self._timers[number] = self._loop.call_at(timer.when() + seconds, self._finish, self.sent[number], 0)
        self._free_at = max(now, self._free_at) + seconds

    def _draw_time_ms(self, rows: int) -> float:
        return self.factor * super()._draw_time_ms(rows)


def serve(
    replicas: Sequence[Replica],
    arrivals_ms: Sequence[float],
    outages: Sequence[Outage] = (),
    slo_ms: float = 1e6,
    slow: Sequence[SlowPhase] = (),
) -> VirtualRun:
    """Play requests that come at these times, all of one model, through the runtime's own objects."""
    return serve_requests(replicas, [VirtualRequest(at) for at in arrivals_ms], outages, slo_ms, slow)


def serve_requests(
    replicas: Sequence[Replica],
    requests: Sequence[VirtualRequest],
    outages: Sequence[Outage] = (),
    slo_ms: float = 1e6,
    slow: Sequence[SlowPhase] = (),
) -> VirtualRun:
    """Play requests, all of one model, through the runtime's own objects."""
    loop = VirtualLoop()
    with contextlib.ExitStack() as stack:
        clock = SimpleNamespace(monotonic=loop.time, time=time.time, perf_counter=loop.time)
        for module in _MODULES:
            stack.enter_context(patch(f"gpuprof.serving.router.{module}.time", clock))
        stack.callback(loop.close)
        return loop.run_until_complete(_play(loop, replicas, requests, outages, slo_ms, slow))


async def _play(
    loop: VirtualLoop,
    replicas: Sequence[Replica],
    requests: Sequence[VirtualRequest],
    outages: Sequence[Outage],
    slo_ms: float,
    slow: Sequence[SlowPhase],
) -> VirtualRun:
    start = loop.time()
    model = ServedModel("m", slo_ms, Arena(1 << 20))
    links = [await _start_replica(model, number, replica) for number, replica in enumerate(replicas)]
    for at_ms, action in _events(outages, slow, links):
        loop.call_at(start + at_ms / 1000.0, action)
    run = VirtualRun(requests, [None] * len(requests))
    for number, request in enumerate(requests):
        loop.call_at(start + request.at_ms / 1000.0, _send, model, run, number, start)
    last_s = max((request.at_ms for request in requests), default=0.0) / 1000.0
    await asyncio.sleep(last_s + _DRAIN_S)
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


def _events(
    outages: Sequence[Outage], slow: Sequence[SlowPhase], links: Sequence[Sequence[_Worker]]
) -> Iterator[tuple[float, Callable[[], None]]]:
    """Yield when something happens to a worker, and what."""
    for outage in outages:
        for link in links[outage.replica]:
            yield outage.begin_ms, link.fail
            if outage.end_ms is not None:
                yield outage.end_ms, link.come_back
    for phase in slow:
        for link in links[phase.replica]:
            if phase.factor == float("inf"):
                yield phase.begin_ms, partial(link.stop_for, (phase.end_ms - phase.begin_ms) / 1000.0)
            else:
                yield phase.begin_ms, partial(link.slow_down, phase.factor)
                yield phase.end_ms, partial(link.slow_down, 1.0)


def _send(model: ServedModel, run: VirtualRun, number: int, start: float) -> None:
    request = run.requests[number]

    def done(*_: object) -> None:
        run.took_ms[number] = 1000.0 * (asyncio.get_running_loop().time() - start) - request.at_ms

    def ignore_refusal(*_: object) -> None:
        pass

    deadline_ms = model.slo_ms if request.timeout_ms is None else request.timeout_ms
    arrived = start + request.at_ms / 1000.0
    inference = Inference(
        1, [InputTensor([1], b"")], None, arrived, deadline_ms, done, ignore_refusal, request.priority
    )
    inference.client = request.client
    with contextlib.suppress(RefusedError):
        model.submit(inference)
