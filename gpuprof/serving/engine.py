"""Engines, which start the machine processes of a map's nodes, and start them again: on this machine, or through Ray.

Only orders to start a machine go through Ray. Machines and workers come to the router's rendezvous by TCP, and the
tensors travel on these connections.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gpuprof.errors import GpuprofError, UnavailableError
from gpuprof.machine.ray_cluster import join_cluster
from gpuprof.runtime.module_command import ANSWER_S, REACTION_S, module_command
from gpuprof.serving.machine.machine import MachineOrder, MachineProcess
from gpuprof.serving.machine.machine_link import MachineLink
from gpuprof.serving.machine.orders import MachineParts, SharedMemory
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.rendezvous import Rendezvous, RendezvousKey
from gpuprof.serving.transport.security import Security, check_exposure
from gpuprof.serving.watch.logs import LOGGER
from gpuprof.serving.watch.supervised_process import LivingProcess, SupervisedProcess

_NAME = "here"
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

        Raises `GpuprofError` when a node has no machine, it does not start, or a GPU cannot be partitioned.
        """
        machines = [await self.machine(node) for node in nodes]
        parts = {}
        for machine, (node, layouts) in zip(machines, nodes.items(), strict=True):
            try:
                parts[node] = await asyncio.wait_for(
                    machine.apply_layouts(layouts) if layouts else machine.wait(), ANSWER_S
                )
            except TimeoutError:
                raise UnavailableError(
                    f"the machine of node {node!r} has not started within {ANSWER_S:g} s",
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
        """Return this machine; its process starts on first use.

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
            await self._process.stop(2 * REACTION_S)  # the time of its workers, and its own

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


#: Before the name of a node in the custom resource of its Ray node.
_RESOURCE = "gpuprof:"


class RayMachine:
    """The machine process of a node of a map, as an actor."""

    def serve(self, order: str) -> None:
        """Keep this machine's workers running until the router has ended; called again in a restarted actor.

        ``order``: the instructions, written by `MachineOrder.to_json`.
        """
        # Ray hides the GPUs from actors that request none; workers get theirs by UUID.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        asyncio.run(MachineProcess(MachineOrder.from_json(order)).run())


class RayEngine(Engine):
    """The engine of a Ray cluster.

    A node of a map is the Ray node with the custom resource ``gpuprof:NODE``.

    ``security``: its certificate also serves the rendezvous; machines and workers have a separate secret in place of
    the token; ``insecure``: if True, the rendezvous may be open to other machines without TLS.
    """

    def __init__(self, security: Security, insecure: bool) -> None:
        super().__init__()
        self._security = security
        self._insecure = insecure
        self._machines: dict[str, MachineLink] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._ray: Any = None
        self._key: RendezvousKey | None = None
        self._is_closing = False

    async def machine(self, node: str) -> MachineLink:
        """Return the machine of a node; Ray places it at its first use.

        Raises `GpuprofError` when there is no cluster, or it lacks the node.
        """
        async with self._opening:
            if node not in self._machines:
                key = self._key = self._key or await self._join()
                await asyncio.to_thread(self._check_node, node)
                link = self._machines[node] = MachineLink(node, self._rendezvous)
                link.on_moved = self.on_moved
                self._keeping.append(asyncio.ensure_future(self._keep(node, MachineOrder(node, key).to_json())))
            return self._machines[node]

    async def close(self) -> None:
        """End the machines and their actors, after the machines have restored their GPUs."""
        self._is_closing = True
        self._rendezvous.close()
        for machine in self._machines.values():
            machine.close()
        if self._keeping:
            await asyncio.wait(self._keeping, timeout=2 * REACTION_S)
        for task in self._keeping:
            task.cancel()
        if self._ray is not None:
            await asyncio.to_thread(self._ray.shutdown)  # with it, Ray ends the actors

    async def _join(self) -> RendezvousKey:
        """Join the cluster, and open the rendezvous where its nodes can reach it."""
        # In a thread: Ray replaces the signal handlers of a main thread, and connecting takes seconds.
        self._ray = self._ray or await asyncio.to_thread(join_cluster)
        host = self._ray.util.get_node_ip_address()
        context, certificate = self._security.context, self._security.certificate
        check_exposure(host, Security("internal", context=context), self._insecure)
        try:
            return await self._rendezvous.open_remote(host, context, certificate)
        except OSError as error:
            raise UnavailableError(f"cannot listen on {host} for machines: {error.strerror or error}") from None

    def _check_node(self, node: str) -> None:
        names = sorted(name for name in self._ray.cluster_resources() if name.startswith(_RESOURCE))
        if _RESOURCE + node not in names:
            raise UnavailableError(
                f"the Ray cluster has no node for {node!r} of the map (it has {', '.join(names) or 'none'})",
                f"""ray start --resources '{{"{_RESOURCE}{node}": 1}}' on it""",
            )

    async def _keep(self, node: str, order: str) -> None:
        """Place a machine process, and again whenever its actor ends, until the engine closes."""
        options = {"num_cpus": 0, "resources": {_RESOURCE + node: 1}, "max_restarts": -1, "max_task_retries": -1}
        while True:
            actor = self._ray.remote(**options)(RayMachine).remote()
            reason = "it lost the router"
            try:
                await actor.serve.remote(order)
            except Exception as error:  # any cause of the actor's end is only reported
                reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
            if self._is_closing:
                return
            LOGGER.warning("machine ended, is placed again", extra={"machine": node, "why": reason})
            await asyncio.to_thread(self._ray.kill, actor)  # it holds the resource of the node
            await asyncio.sleep(5.0)
