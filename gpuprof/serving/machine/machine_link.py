"""The router's link to a machine process: it sends the machine's workers, again after the process was replaced."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gpuprof.errors import UnavailableError
from gpuprof.serving.machine.orders import MachineParts, WorkerOrder
from gpuprof.serving.transport.rendezvous import ExpectedPeer, Rendezvous
from gpuprof.serving.transport.wire import Frame, FrameConnection, FrameKind
from gpuprof.serving.watch.logs import LOGGER

#: Worker numbers, across all machines and never reused: a late worker must not be taken for its successor.
_NUMBERS = itertools.count()


class WorkerObserver(ExpectedPeer, Protocol):
    """The receiver of events of a machine's worker."""

    @property
    def identity(self) -> list[int] | None:
        """Process id and start time of the connected worker; None if none is connected."""

    def on_refusal(self, kind: str, message: str, fix: str) -> None:
        """Called with the reason why the machine cannot start the worker."""

    def on_exit(self, pid: int) -> None:
        """Called when its process has ended."""

    def on_machine_loss(self) -> None:
        """Called when the worker's machine is lost, and with it the worker's batches."""


@dataclass(slots=True, eq=False)
class _WorkerEntry:
    order: WorkerOrder
    observer: WorkerObserver


class MachineLink:
    """Sends a machine process, and each successor, the workers to run.

    ``node``: name in the map; ``rendezvous``: waits for the machine and for its workers.
    """

    def __init__(self, node: str, rendezvous: Rendezvous) -> None:
        self.node = node
        self._rendezvous = rendezvous
        self._entries: dict[str, _WorkerEntry] = {}
        self._removals: dict[str, asyncio.Future[None]] = {}
        self._connection: FrameConnection | None = None
        self._takeover_state: dict[str, Any] | None = None
        self._host = ""
        self._came = asyncio.Event()
        self._layout_change: asyncio.Future[dict[str, Any]] | None = None
        self.parts: MachineParts | None = None
        self.pid: int | None = None
        self.on_moved: Callable[[], None] | None = None
        rendezvous.expect(f"machine:{node}", self)

    async def wait(self) -> MachineParts:
        """Wait until a process of this machine has connected; return the cores and GPUs that it found."""
        await self._came.wait()
        assert self.parts is not None
        return self.parts

    async def apply_layouts(self, layouts: Mapping[str, Sequence[tuple[str, int]]]) -> MachineParts:
        """Apply MIG layouts through the machine; return the machine's parts afterwards.

        Raises `UnavailableError` when the driver refuses, or the machine ends meanwhile. ``layouts``: profile and
        first memory slice of each instance, by the number of the GPU.
        """
        await self._came.wait()
        if self._connection is None:
            raise UnavailableError(f"the machine of {self.node!r} has ended")
        self._layout_change = asyncio.get_running_loop().create_future()
        self._connection.send(FrameKind.APPLY_LAYOUTS, layouts)
        answer = await self._layout_change
        if "error" in answer:
            raise UnavailableError(answer["error"], answer["fix"])
        self.parts = MachineParts.from_message(answer)
        return self.parts

    def add_worker(self, order: WorkerOrder, observer: WorkerObserver) -> str:
        """Have the machine run a worker from now on; return its id."""
        number = f"worker:{self.node}/{order.model}/{next(_NUMBERS)}"
        self._entries[number] = _WorkerEntry(order, observer)
        self._rendezvous.expect(number, observer)
        if self._connection is not None:
            self._connection.send(FrameKind.ADD_WORKER, [number, order.to_machine(), None])
        return number

    def remove_worker(self, number: str) -> asyncio.Future[None]:
        """Stop a worker through the machine; the future is done when the worker has gone."""
        removal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = self._entries.pop(number, None)
        self._rendezvous.forget(number)
        if entry is None or self._connection is None:
            removal.set_result(None)
        else:
            self._removals[number] = removal
            self._connection.send(FrameKind.REMOVE_WORKER, number)
        return removal

    def kill(self, number: str, pid: int) -> None:
        """Have a worker's process killed; the machine starts another."""
        if self._connection is not None:
            self._connection.send(FrameKind.KILL, [number, pid])

    def close(self) -> None:
        """End the machine process and its workers."""
        self._rendezvous.forget(f"machine:{self.node}")
        if self._connection is not None:
            self._connection.close()

    # --- the rendezvous's side

    def on_join(self, connection: FrameConnection, hello: dict[str, Any]) -> None:
        """Send a newly connected machine process the workers to run."""
        if self._connection is not None:
            self._connection.drop()  # the later process was started because the earlier was given up
        # Another host cannot take over: the workers and the partitioned GPUs of the old host are out of reach.
        is_same_host = hello["host"] == self._host
        if not is_same_host:
            self._takeover_state = None
            for entry in list(self._entries.values()):
                entry.observer.on_machine_loss()
        has_moved = bool(self._host) and not is_same_host
        self._connection, self._host = connection, hello["host"]
        self.pid = hello["pid"]
        self.parts = MachineParts.from_message(hello["parts"])
        connection.send(FrameKind.WELCOME, self._takeover_state)
        running = Counter(entry.order.turns for entry in self._entries.values() if entry.observer.identity is not None)
        present = Counter(entry.order.turns for entry in self._entries.values())
        for number, entry in self._entries.items():
            order, identity = entry.order, entry.observer.identity if is_same_host else None
            if order.turns and running[order.turns]:  # some of its models may have been removed
                order = replace(order, mates=present[order.turns])
            connection.send(FrameKind.ADD_WORKER, [number, order.to_machine(), identity])
        LOGGER.info("machine is there", extra={"machine": self.node, "pid": self.pid})
        self._came.set()
        if has_moved and self.on_moved is not None:
            self.on_moved()

    def receive(self, frame: Frame) -> None:
        """Handle a frame of the machine."""
        if frame.kind == FrameKind.ENDED:
            number, pid = frame.head
            if number in self._entries:
                self._entries[number].observer.on_exit(pid)
        elif frame.kind == FrameKind.REFUSED:
            number, kind, message, fix = frame.head
            if number in self._entries:
                self._entries[number].observer.on_refusal(kind, message, fix)
        elif frame.kind == FrameKind.WORKER_REMOVED:
            self._on_worker_removed(frame.head)
        elif frame.kind == FrameKind.PARTS:
            self._on_layouts_applied(frame.head)
        elif frame.kind == FrameKind.TAKEOVER_STATE:
            self._takeover_state = frame.head

    def on_close(self) -> None:
        """Called when the process has ended; its workers may live on until its successor adopts them."""
        self._connection = None
        self._on_layouts_applied({"error": f"the machine of {self.node!r} has ended", "fix": ""})
        for number in list(self._removals):
            self._on_worker_removed(number)

    def _on_layouts_applied(self, answer: dict[str, Any]) -> None:
        if self._layout_change is not None and not self._layout_change.done():
            self._layout_change.set_result(answer)

    def _on_worker_removed(self, number: str) -> None:
        removal = self._removals.pop(number, None)
        if removal is not None and not removal.done():
            removal.set_result(None)
