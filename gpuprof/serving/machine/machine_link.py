"""The router's end of a machine: the workers that it must run, whichever process runs them at present."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpuprof.errors import UnavailableError
from gpuprof.serving.machine.launcher import WorkerOrder
from gpuprof.serving.machine.machine_parts import MachineParts
from gpuprof.serving.transport.frame_connection import FrameConnection
from gpuprof.serving.transport.rendezvous import ExpectedPeer, Rendezvous
from gpuprof.serving.transport.wire import Frame, FrameKind
from gpuprof.serving.watch.logs import LOGGER

#: Of all machines, and never used again: a worker that comes late must not be taken for its successor.
_NUMBERS = itertools.count()


class WorkerSlot(ExpectedPeer, Protocol):
    """The router's end of a worker that a machine keeps."""

    @property
    def identity(self) -> list[int] | None:
        """Process id and start time of the worker that is connected, None where none is."""

    def on_refusal(self, kind: str, message: str, fix: str) -> None:
        """Learn why the machine cannot start it."""

    def on_exit(self, pid: int) -> None:
        """Learn that its process has ended."""

    def strand(self) -> None:
        """Learn that the machine it was on is gone: what it was doing will not come back."""


@dataclass(slots=True, eq=False)
class _WorkerEntry:
    order: WorkerOrder
    posted: WorkerSlot


class MachineLink:
    """Says which workers a machine is to keep, again to every process that comes as this machine.

    ``node``: name in the map; ``rendezvous``: waits for the machine and for its workers.
    """

    def __init__(self, node: str, rendezvous: Rendezvous) -> None:
        self.node = node
        self._rendezvous = rendezvous
        self._posts: dict[str, _WorkerEntry] = {}
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self._connection: FrameConnection | None = None
        self._legacy: dict[str, Any] | None = None
        self._host = ""
        self._came = asyncio.Event()
        self._pinged: float | None = None
        self._cutting: asyncio.Future[dict[str, Any]] | None = None
        self.parts: MachineParts | None = None
        self.pid: int | None = None
        self.on_silence: Callable[[], None] | None = None
        self.on_moved: Callable[[], None] | None = None
        rendezvous.expect(f"machine:{node}", self)

    async def wait(self) -> MachineParts:
        """Wait until a process has come as this machine; return what it found there."""
        await self._came.wait()
        assert self.parts is not None
        return self.parts

    async def cut(self, layouts: Mapping[str, Sequence[tuple[str, int]]]) -> MachineParts:
        """Have GPUs cut into MIG instances; return what the machine has then.

        Raises `UnavailableError` when the driver refuses, or the machine ends meanwhile. ``layouts``: profile and first
        memory slice of each instance, by the number of the GPU.
        """
        await self._came.wait()
        if self._connection is None:
            raise UnavailableError(f"the machine of {self.node!r} has ended")
        self._cutting = asyncio.get_running_loop().create_future()
        self._connection.send(FrameKind.CUT, layouts)
        answer = await self._cutting
        if "error" in answer:
            raise UnavailableError(answer["error"], answer["fix"])
        self.parts = MachineParts.from_message(answer)
        return self.parts

    def post(self, order: WorkerOrder, posted: WorkerSlot) -> str:
        """Let the machine keep a worker from now on; return its id."""
        number = f"worker:{self.node}/{order.model}/{next(_NUMBERS)}"
        self._posts[number] = _WorkerEntry(order, posted)
        self._rendezvous.expect(number, posted)
        if self._connection is not None:
            self._connection.send(FrameKind.POST, [number, order.to_machine(), None])
        return number

    def dismiss(self, number: str) -> asyncio.Future[None]:
        """Let the machine keep a worker no longer; what is returned is done when nothing is left of it."""
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        known = self._posts.pop(number, None)
        self._rendezvous.forget(number)
        if known is None or self._connection is None:
            gone.set_result(None)
        else:
            self._leaving[number] = gone
            self._connection.send(FrameKind.DISMISS, number)
        return gone

    def kill(self, number: str, pid: int) -> None:
        """End the process of a worker at once; the machine starts another."""
        if self._connection is not None:
            self._connection.send(FrameKind.KILL, [number, pid])

    def watch(self, now: float, limit_s: float) -> None:
        """Report a machine process that is silent while a worker is missing."""
        if self._connection is None:
            return
        if self._pinged is None:
            self._pinged = now
            self._connection.send(FrameKind.PING, None)
        elif now - self._pinged > limit_s and any(post.posted.identity is None for post in self._posts.values()):
            LOGGER.warning("machine process hangs, is replaced", extra={"machine": self.node, "pid": self.pid})
            self._pinged = now
            if self.on_silence is not None:
                self.on_silence()

    def close(self) -> None:
        """Let the machine end, and everything on it."""
        self._rendezvous.forget(f"machine:{self.node}")
        if self._connection is not None:
            self._connection.close()

    # --- the rendezvous's side

    def on_join(self, connection: FrameConnection, hello: dict[str, Any]) -> None:
        """Tell a process that came as this machine what is to be there."""
        if self._connection is not None:
            self._connection.drop()  # what came later was started because this one was given up
        # On another host nothing can be taken over: its workers, and the GPUs that were cut, are out of reach.
        same = hello["host"] == self._host
        if not same:
            self._legacy = None
            for post in list(self._posts.values()):
                post.posted.strand()
        moved = bool(self._host) and not same
        self._connection, self._host, self._pinged = connection, hello["host"], None
        self.pid = hello["pid"]
        self.parts = MachineParts.from_message(hello["parts"])
        connection.send(FrameKind.WELCOME, self._legacy)
        for number, post in self._posts.items():
            living = post.posted.identity if same else None
            connection.send(FrameKind.POST, [number, post.order.to_machine(), living])
        LOGGER.info("machine is there", extra={"machine": self.node, "pid": self.pid})
        self._came.set()
        if moved and self.on_moved is not None:
            self.on_moved()

    def receive(self, frame: Frame) -> None:
        """Take what the machine says."""
        self._pinged = None
        if frame.kind == FrameKind.ENDED:
            number, pid = frame.head
            if number in self._posts:
                self._posts[number].posted.on_exit(pid)
        elif frame.kind == FrameKind.REFUSED:
            number, kind, message, fix = frame.head
            if number in self._posts:
                self._posts[number].posted.on_refusal(kind, message, fix)
        elif frame.kind == FrameKind.DISMISSED:
            self._gone(frame.head)
        elif frame.kind == FrameKind.PARTS:
            self._has_cut(frame.head)
        elif frame.kind == FrameKind.LEGACY:
            self._legacy = frame.head

    def on_close(self) -> None:
        """The process has gone; its workers may live on until another takes them over."""
        self._connection = None
        self._has_cut({"error": f"the machine of {self.node!r} has ended", "fix": ""})
        for number in list(self._leaving):
            self._gone(number)

    def _has_cut(self, answer: dict[str, Any]) -> None:
        if self._cutting is not None and not self._cutting.done():
            self._cutting.set_result(answer)

    def _gone(self, number: str) -> None:
        leaving = self._leaving.pop(number, None)
        if leaving is not None and not leaving.done():
            leaving.set_result(None)
