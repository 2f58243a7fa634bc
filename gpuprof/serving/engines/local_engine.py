"""Runs the machine process of this machine: starts it for the first worker, and again when it ends."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

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
_COME_S, _PATIENCE_S = 120.0, 20.0


#: Profile and first memory slice of each MIG instance, by the number of the GPU.
Layouts = Mapping[str, Sequence[tuple[str, int]]]


class Engine(ABC):
    """Runs machine processes on the nodes of a map.

    Attributes
    ----------
    on_moved : callable
        Called after a machine was replaced by another, whose parts may differ.
    """

    def __init__(self) -> None:
        self._rendezvous = Rendezvous()
        self._opening = asyncio.Lock()
        self.on_moved: Callable[[], None] = lambda: None

    async def parts(self, nodes: Mapping[str, Layouts]) -> dict[str, MachineParts]:
        """Return the parts of the machines of these nodes, after their GPUs were partitioned.

        Raises
        ------
        GpuprofError
            When a node has no machine, it does not start, or a GPU cannot be partitioned.
        """
        machines = [await self.machine(node) for node in nodes]
        parts = {}
        for machine, (node, layouts) in zip(machines, nodes.items(), strict=True):
            try:
                parts[node] = await asyncio.wait_for(
                    machine.apply_layouts(layouts) if layouts else machine.wait(), _COME_S
                )
            except TimeoutError:
                raise UnavailableError(
                    f"the machine of node {node!r} has not started within {_COME_S:g} s",
                    "with Ray: is its resource taken by another server? see ray status",
                ) from None
        return parts

    @abstractmethod
    async def machine(self, node: str) -> MachineLink:
        """Return the machine for the workers of a node."""

    @abstractmethod
    async def close(self) -> None:
        """End every machine process, and return when they have ended."""


class LocalEngine(Engine):
    """The engine that runs the workers of all nodes on this machine; ``arena``: shared with the workers."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self._machine: MachineLink | None = None
        self._process: SupervisedProcess | None = None

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
