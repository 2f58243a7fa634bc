"""Runs the machine process of this machine: starts it for the first worker, and again when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from gpuprof.errors import GpuprofError, UnavailableError
from gpuprof.runtime.module_command import module_command
from gpuprof.serving.machine.machine import MachineOrder
from gpuprof.serving.machine.machine_link import MachineLink
from gpuprof.serving.machine.orders import MachineParts, SharedMemory
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.rendezvous import Rendezvous
from gpuprof.serving.watch.logs import LOGGER
from gpuprof.serving.watch.supervised_process import LivingProcess, SupervisedProcess

_NAME = "here"
_PATIENCE_S = 20.0


#: Profile and first memory slice of each MIG instance, by the number of the GPU.
Layouts = Mapping[str, Sequence[tuple[str, int]]]


async def find_machine_parts(machine: MachineLink, layouts: Layouts) -> MachineParts:
    """Return the parts of a machine, after its GPUs were partitioned according to ``layouts``."""
    return await machine.apply_layouts(layouts) if layouts else await machine.wait()


class Engine(Protocol):
    """Runs machine processes on the nodes of a map."""

    on_moved: Callable[[], None]  #: Called after a machine was replaced by another, whose parts may differ.

    async def parts(self, nodes: Mapping[str, Layouts]) -> dict[str, MachineParts]:
        """Return the parts of the machines of these nodes, after their GPUs were partitioned.

        Raises
        ------
        GpuprofError
            When a node has no machine, or a GPU cannot be partitioned.
        """

    async def machine(self, node: str) -> MachineLink:
        """Return the machine for the workers of a node."""

    async def close(self) -> None:
        """End every machine process, and return when they have ended."""


class LocalEngine:
    """The engine that runs the workers of all nodes on this machine; ``arena``: shared with the workers."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._rendezvous = Rendezvous()
        self._machine: MachineLink | None = None
        self._process: SupervisedProcess | None = None
        self._opening = asyncio.Lock()
        self.on_moved: Callable[[], None] = lambda: None

    async def parts(self, nodes: Mapping[str, Layouts]) -> dict[str, MachineParts]:
        """Return the parts of this machine for each node, after its GPUs were partitioned.

        Raises `UnavailableError` when a GPU cannot be partitioned.
        """
        return {node: await find_machine_parts(await self.machine(node), layouts) for node, layouts in nodes.items()}

    async def machine(self, node: str) -> MachineLink:
        """Return this machine; its process is started at the first use.

        Raises `UnavailableError` when no process can be started.
        """
        async with self._opening:
            if self._machine is None:
                memory = SharedMemory(self._arena.fd, self._arena.capacity)
                start = partial(_start_machine, MachineOrder(_NAME, await self._rendezvous.open_local(), memory))
                try:
                    first = await start()
                except OSError as error:
                    raise UnavailableError(f"cannot start a process: {error.strerror or error}") from None
                self._process = SupervisedProcess(start, self._log_exit, _log_failure)
                self._process.begin(first)
                self._machine = MachineLink(_NAME, self._rendezvous)
            return self._machine

    async def close(self) -> None:
        """Wait until the machine process has ended, and kill it after a while."""
        self._rendezvous.close()
        if self._machine is not None:
            self._machine.close()
        if self._process is not None:
            await self._process.stop(_PATIENCE_S)

    def _log_exit(self, pid: int) -> None:
        if self._process is not None and not self._process.is_stopping:
            LOGGER.warning("machine process ended, starts again", extra={"pid": pid})


async def _start_machine(order: MachineOrder) -> LivingProcess:
    assert order.memory is not None
    # The arena is an unnamed file, available only through an inherited descriptor.
    command = module_command("gpuprof.serving.machine.machine")
    return LivingProcess.start(command, order.to_json(), (order.memory.fd,))


def _log_failure(error: GpuprofError) -> None:
    LOGGER.error("cannot start the machine process", extra={"error": error.message})
