"""The router's view of a worker: its machine replaces it when it dies, and the router kills it when it hangs."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from gpuprof.errors import GpuprofError, InputError, UnavailableError
from gpuprof.rules.routing import is_retry_limit_reached
from gpuprof.runtime.providers import ORT_CUDA
from gpuprof.serving.machine.launcher import WorkerOrder
from gpuprof.serving.router.simulated_link import SimulatedLink
from gpuprof.serving.router.worker_link import BatchAnswer, LinkEvents, SentBatch, WorkerLink
from gpuprof.serving.transport.inference import Inference
from gpuprof.serving.transport.metadata import ModelSpec
from gpuprof.serving.watch.logs import LOGGER

Link = WorkerLink | SimulatedLink
_MOST_BATCHES = 32  # sent to a worker at a time
_WEIGHT = 0.2  # of the last batch in the mean time of batches, by the worker's own clock
#: Time limit of loading, which a GPU compiler may make long.
_LOAD_S = 1800.0


class WorkerHandle:
    """Sends a worker its batches and supervises it.

    ``name``: for logs, ``"resnet50/0.1"``; ``connect``: makes a link that reports to the given events; ``hang_s``: a
    worker whose answer is late by more than this, beyond the expected time of its batches, is killed.
    """

    def __init__(self, name: str, order: WorkerOrder, connect: Callable[[LinkEvents], Link], hang_s: float) -> None:
        self.name = name
        self.order = order
        #: True if the worker copies the inputs of its next batch to its device while a batch runs.
        self.stages_ahead = order.provider == ORT_CUDA
        self._connect = connect
        self._hang_s = hang_s
        self._link: Link | None = None
        self._busy_until = 0.0
        self._last_done = 0.0
        self._run_ms = math.inf
        self._loading: tuple[int, float] | None = None  # process id, and the start of loading
        self._stopping = False
        self._refusal: GpuprofError | None = None
        self._was_ready = asyncio.Event()
        self.restarts = 0
        self.refusals = 0

    def bind(
        self,
        ready: Callable[[], None],
        on_done: Callable[[SentBatch, BatchAnswer], None],
        failed: Callable[[SentBatch, str], None],
        on_lost: Callable[[list[SentBatch]], None],
    ) -> None:
        """Set the callbacks for the events of the worker."""
        self._on_ready = ready
        self._on_done = on_done
        self._on_failed = failed
        self._on_lost = on_lost

    async def start(self) -> ModelSpec:
        """Start the worker and wait until it is ready.

        Raises `GpuprofError` when the worker cannot load the model or have its share.
        """
        self._link = self._connect(
            LinkEvents(
                self._handle_ready, self._handle_refusal, self._handle_done, self._handle_failure, self._handle_lost
            )
        )
        await self._link.start(self.order)
        await self._was_ready.wait()
        if self._refusal is not None:
            raise self._refusal
        assert self._link is not None and self._link.spec is not None
        return self._link.spec

    async def stop(self) -> None:
        """End the worker and wait for its end."""
        self._stopping = True
        if self._link is not None:
            await self._link.end()

    @property
    def pid(self) -> int | None:
        """Process id of the present worker."""
        return None if self._link is None else self._link.pid

    @property
    def spec(self) -> ModelSpec | None:
        """Inputs and outputs of the model, as the present worker reports them."""
        return None if self._link is None else self._link.spec

    @property
    def is_ready(self) -> bool:
        """Return whether the worker can receive batches."""
        return self._link is not None and self._link.is_ready

    @property
    def is_idle(self) -> bool:
        """Return whether the worker is ready and has no batch."""
        link = self._link
        return link is not None and link.is_ready and not link.sent

    def can_prefetch(self, prefetch_ms: float) -> bool:
        """Return whether the worker may receive a batch in advance.

        The limit is two batches including the running batch, or as many short batches as the worker runs in
        ``prefetch_ms``. A worker that stages ahead works on two at once, so it gets none in advance while it has a
        request that may kill workers.
        """
        link = self._link
        if link is None or not link.is_ready or (self.stages_ahead and self._has_suspect_requests()):
            return False
        count = len(link.sent)
        return count < 2 or (count < _MOST_BATCHES and count * self._run_ms < prefetch_ms)

    def _has_suspect_requests(self) -> bool:
        """Return whether the worker has a request whose earlier worker died: such a request runs alone."""
        assert self._link is not None
        return any(queued.deaths for batch in self._link.sent.values() for queued in batch.inferences)

    @property
    def batches(self) -> int:
        """Number of batches at the worker: the running batch, and batches sent in advance."""
        return 0 if self._link is None else len(self._link.sent)

    @property
    def requests(self) -> int:
        """Number of requests at the worker."""
        return 0 if self._link is None else sum(len(batch.inferences) for batch in self._link.sent.values())

    def busy_ms(self, now: float) -> float:
        """Return the expected time until the worker has finished its batches."""
        left_ms = 1000.0 * (self._busy_until - now)
        return left_ms if left_ms > 0.0 and self._link is not None and self._link.sent else 0.0

    def send(self, inferences: list[Inference], rows: int, expected_ms: float, now: float) -> None:
        """Send the worker a batch."""
        assert self._link is not None
        begin = max(now, self._busy_until) if self._link.sent else now
        self._busy_until = begin + expected_ms / 1000.0
        self._link.send(inferences, rows, expected_ms, now)

    def watch(self, now: float, stalled_since: Callable[[float, float], float] = lambda since, now: 0.0) -> None:
        """Kill the worker when it has been silent or loading for too long; ping an idle worker.

        ``stalled_since``: returns the seconds for which the router's own loop was stalled between two moments.
        """
        link = self._link
        if link is None:
            return
        if not link.is_ready:
            self._watch_loading(link, now, stalled_since)
            return
        expected_s = sum(batch.expected_ms for batch in link.sent.values()) / 1000.0
        silent_s = link.silent_s(now)
        silent_s -= stalled_since(now - silent_s, now)
        if silent_s > self._hang_s + 3.0 * expected_s:
            LOGGER.warning("worker hangs, is replaced", extra={"worker": self.name, "pid": link.pid})
            link.kill()
        elif not link.sent:
            link.ping(now)

    def _watch_loading(self, link: Link, now: float, stalled_since: Callable[[float, float], float]) -> None:
        """Kill a worker that loads for too long: without a limit, a hanging load would never end."""
        if link.pid is None:
            self._loading = None
        elif self._loading is None or self._loading[0] != link.pid:
            self._loading = (link.pid, now)
        else:
            begin = self._loading[1]
            if now - begin - stalled_since(begin, now) > _LOAD_S:
                LOGGER.warning("worker loads for too long, is replaced", extra={"worker": self.name, "pid": link.pid})
                self._loading = None
                link.kill()

    def _handle_ready(self, spec: ModelSpec) -> None:
        self._loading = None
        LOGGER.info("worker is ready", extra={"worker": self.name, "pid": self.pid})
        self._was_ready.set()
        self._on_ready()

    def _handle_refusal(self, kind: str, message: str, fix: str) -> None:
        self.refusals += 1
        if self._was_ready.is_set():
            LOGGER.error("worker refuses", extra={"worker": self.name, "error": message})
        else:
            self._refusal = (UnavailableError if kind == "UnavailableError" else InputError)(message, fix)

    def _handle_done(self, batch: SentBatch, answer: BatchAnswer) -> None:
        now = time.monotonic()
        begin = max(batch.sent, self._last_done)
        for inference in batch.inferences:
            inference.sent = begin  # a batch behind another in the worker still counts as queued
        batch.took_ms = 1000.0 * (now - begin)
        run_ms = (answer.gather_ns + answer.infer_ns + answer.scatter_ns) / 1e6
        self._run_ms = run_ms if math.isinf(self._run_ms) else self._run_ms + _WEIGHT * (run_ms - self._run_ms)
        self._note_end(now)
        self._on_done(batch, answer)

    def _handle_failure(self, batch: SentBatch, message: str) -> None:
        self._note_end(time.monotonic())
        self._on_failed(batch, message)

    def _note_end(self, now: float) -> None:
        """Expect the worker's other batches from now on."""
        assert self._link is not None
        self._last_done = now
        self._busy_until = now + sum([batch.expected_ms for batch in self._link.sent.values()]) / 1000.0

    def _handle_lost(self, batches: list[SentBatch]) -> None:
        if not self._stopping and self._refusal is None:
            self.restarts += 1
            LOGGER.warning("worker died, starts again", extra={"worker": self.name})
            if is_retry_limit_reached(self.restarts) and not self._was_ready.is_set():
                text = f"the worker {self.name} ended {self.restarts} times while it loaded {self.order.path}"
                self._refusal = UnavailableError(text)
        if self._refusal is not None:
            self._was_ready.set()
        self._on_lost(batches)
