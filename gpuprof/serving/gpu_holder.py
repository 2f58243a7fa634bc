"""Holds workers of a machine to their parts of its GPUs: runs the MPS daemons that they need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from gpuprof.mps import MpsDaemon, adopted_daemon, mps_daemon
from gpuprof.serving.launcher import WorkerOrder


class GpuHolder:
    """Starts a daemon for each GPU or MIG instance that needs one, and stops them in the end.

    Parameters
    ----------
    changed : callable
        Told when `legacy` has changed.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._daemons: dict[str, MpsDaemon] = {}
        self._running = ExitStack()
        self._starts_one = asyncio.Lock()

    def legacy(self) -> dict[str, list[str | None]]:
        """Return the daemons that run, for a process that takes over: UUID to pipe and log directory."""
        return {uuid: [daemon.pipe_directory, daemon.log_directory] for uuid, daemon in self._daemons.items()}

    def inherit(self, legacy: dict[str, Any]) -> None:
        """Take over the daemons that a process before this one started, where they still answer."""
        for uuid, (pipe, log) in legacy.items():
            daemon = self._running.enter_context(adopted_daemon(uuid, pipe, log))
            if daemon is not None:
                self._daemons[uuid] = daemon

    async def bound(self, order: WorkerOrder) -> WorkerOrder:
        """Return the order with the environment that holds the worker to its part of a GPU.

        Raises
        ------
        UnavailableError
            When it needs MPS and that does not run here.
        """
        if order.gpu is None:
            return order
        daemon = await self._daemon(order.gpu.uuid) if order.with_mps else None
        return replace(order, environment=order.gpu.environment(daemon))

    async def close(self) -> None:
        """Stop the daemons."""
        await asyncio.to_thread(self._running.close)

    async def _daemon(self, uuid: str) -> MpsDaemon:
        """Return the MPS daemon of a GPU or MIG instance, started for the first worker that needs it."""
        async with self._starts_one:
            if uuid not in self._daemons:
                enter = self._running.enter_context
                self._daemons[uuid] = await asyncio.to_thread(enter, mps_daemon(uuid))
                self._changed()
            return self._daemons[uuid]
