"""Runs machine processes on the nodes of a Ray cluster: Ray places them, and places them again when a node dies.

Only orders to start a machine go through Ray. Machines and workers come to the router's rendezvous by TCP, and the
tensors travel on these connections.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from gpuprof.errors import UnavailableError, install_hint
from gpuprof.machine.ray_cluster import join_cluster
from gpuprof.serving.engines.local_engine import Engine
from gpuprof.serving.machine.machine import MachineOrder, MachineProcess
from gpuprof.serving.machine.machine_link import MachineLink
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.rendezvous import RendezvousKey
from gpuprof.serving.transport.security import Security, check_exposure
from gpuprof.serving.watch.logs import LOGGER

if TYPE_CHECKING:
    from gpuprof.serving.server import EngineMaker
    from gpuprof.serving.server_settings import ServerSettings

#: Before the name of a node in the custom resource of its Ray node.
_RESOURCE = "gpuprof:"
_END_S = 15.0
_RETRY_S = 5.0


def ray_engine(address: str | None, insecure: bool) -> EngineMaker:
    """Return the maker of the engine.

    Raises `UnavailableError` when Ray is not installed.

    Parameters
    ----------
    address : str or None
        Address of the cluster; None: the cluster of this machine.
    insecure : bool
        If True, the rendezvous may be open to other machines without TLS.
    """
    if importlib.util.find_spec("ray") is None:
        raise UnavailableError("ray is not installed", install_hint("ray"))

    def make(arena: Arena, settings: ServerSettings) -> RayEngine:
        return RayEngine(address or "", settings.security, insecure)

    return make


class RayMachine:
    """The machine process of a node of a map, as an actor."""

    def serve(self, order: str) -> None:
        """Keep workers until the router has gone; Ray calls this again in the actor's successor.

        ``order``: written by `MachineOrder.to_json`.
        """
        # Ray hides the GPUs from actors that request none; workers get theirs by UUID.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        asyncio.run(MachineProcess(MachineOrder.from_json(order)).run())


class RayEngine(Engine):
    """The engine of a Ray cluster.

    A node of a map is the Ray node with the custom resource ``gpuprof:NODE``.

    Parameters
    ----------
    address : str
        Address of the cluster; empty: the cluster of this machine.
    security : Security
        Its certificate also serves the rendezvous; machines and workers have a separate secret in place of the token.
    insecure : bool
        If True, the rendezvous may be open to other machines without TLS.
    """

    def __init__(self, address: str, security: Security, insecure: bool) -> None:
        super().__init__()
        self._address = address
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
            await asyncio.wait(self._keeping, timeout=_END_S)
        for task in self._keeping:
            task.cancel()
        if self._ray is not None:
            await asyncio.to_thread(self._ray.shutdown)  # with it, Ray ends the actors

    async def _join(self) -> RendezvousKey:
        """Join the cluster, and open the rendezvous where its nodes can reach it."""
        # In a thread: Ray replaces the signal handlers of a main thread, and connecting takes seconds.
        self._ray = self._ray or await asyncio.to_thread(join_cluster, self._address)
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
        """Place a machine, and again when it ended although Ray restarts its actor, until the engine closes."""
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
            await asyncio.sleep(_RETRY_S)
