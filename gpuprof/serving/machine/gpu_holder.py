"""Limits workers to their shares of a machine's GPUs: runs MPS daemons and makes MIG instances."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from gpuprof.machine.mig_layout import MigLayout, apply_layout, restore_layout
from gpuprof.machine.mps import MpsDaemon, adopt_daemon, mps_daemon
from gpuprof.serving.machine.launcher import WorkerOrder


class GpuHolder:
    """Starts MPS daemons for GPUs and MIG instances that need them, applies MIG layouts, and undoes both on exit.

    ``changed``: called when `describe_takeover_state` returns something new.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._daemons: dict[str, MpsDaemon] = {}
        self._running = ExitStack()
        self._starts_one = asyncio.Lock()
        self._before: dict[int, MigLayout] = {}

    def describe_takeover_state(self) -> dict[str, Any]:
        """Return the state for a successor of this process: the running daemons, and the former MIG layouts."""
        daemons = {uuid: [daemon.pipe_directory, daemon.log_directory] for uuid, daemon in self._daemons.items()}
        return {"daemons": daemons, "mig": [[gpu, asdict(layout)] for gpu, layout in self._before.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over from a predecessor: its living daemons, and the MIG layouts to restore on exit."""
        for gpu, layout in state.get("mig", []):
            self._before[gpu] = MigLayout(
                layout["enabled"], tuple((name, start) for name, start in layout["instances"])
            )
        for uuid, (pipe, log) in state.get("daemons", {}).items():
            daemon = self._running.enter_context(adopt_daemon(uuid, pipe, log))
            if daemon is not None:
                self._daemons[uuid] = daemon

    async def with_gpu_environment(self, order: WorkerOrder) -> WorkerOrder:
        """Return the order with the environment variables that limit the worker to its share of a GPU.

        Raises `UnavailableError` when the share needs MPS and MPS does not run here.
        """
        if order.gpu is None:
            return order
        daemon = await self._find_daemon(order.gpu.uuid) if order.with_mps else None
        return replace(order, environment=order.gpu.environment(daemon))

    async def apply_layouts(self, layouts: dict[str, list[list[Any]]]) -> None:
        """Apply MIG layouts; the former ones are restored on exit.

        Raises `UnavailableError` when the driver refuses. ``layouts``: by the number of the GPU.
        """
        for gpu, instances in layouts.items():
            layout = MigLayout.of([(profile, start) for profile, start in instances])
            before = await asyncio.to_thread(apply_layout, int(gpu), layout)
            if before is not None and int(gpu) not in self._before:
                self._before[int(gpu)] = before
                self._changed()

    async def close(self) -> None:
        """Stop the daemons, then restore the former MIG layouts."""
        # The daemons first: the driver refuses another layout while a process uses the GPU.
        await asyncio.to_thread(self._running.close)
        for gpu, layout in self._before.items():
            if (reason := await asyncio.to_thread(restore_layout, gpu, layout)) is not None:
                sys.stderr.write(f"gpuprof: GPU {gpu} could not be cut again as it was: {reason}\n")

    async def _find_daemon(self, uuid: str) -> MpsDaemon:
        """Return the MPS daemon of a GPU or MIG instance, started for the first worker that needs it."""
        async with self._starts_one:
            if uuid not in self._daemons:
                enter = self._running.enter_context
                self._daemons[uuid] = await asyncio.to_thread(enter, mps_daemon(uuid))
                self._changed()
            return self._daemons[uuid]
