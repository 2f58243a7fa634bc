"""Runs machine processes on the nodes of a Ray cluster: Ray places them, and places them again when a node dies.

Only orders to start a machine go through Ray. Machines and workers come to the router's rendezvous by TCP, and the
tensors travel on these connections.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpuprof.errors import UnavailableError, install_hint
from gpuprof.machine.ray_cluster import join_cluster
from gpuprof.serving.engines.local_engine import Layouts, find_machine_parts
from gpuprof.serving.machine.machine import MachineOrder, MachineProcess
from gpuprof.serving.machine.machine_link import MachineLink
from gpuprof.serving.machine.orders import MachineParts
from gpuprof.serving.transport.arena import Arena
from gpuprof.serving.transport.rendezvous import Rendezvous, RendezvousKey
from gpuprof.serving.transport.security import Security, check_exposure
from gpuprof.serving.watch.logs import LOGGER

if TYPE_CHECKING:
    from gpuprof.serving.server import EngineMaker
    from gpuprof.serving.server_settings import ServerSettings

RESOURCE = "gpuprof"
LABEL = "gpuprof.node"
_COME_S = 120.0
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


class RayEngine:
    """The engine of a Ray cluster.

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
        self._address = address
        self._security = security
        self._insecure = insecure
        self._rendezvous = Rendezvous()
        self._machines: dict[str, MachineLink] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._ray: Any = None
        self._key: RendezvousKey | None = None
        self._opening = asyncio.Lock()
        self._is_closing = False
        self.on_moved: Callable[[], None] = lambda: None

    async def parts(self, nodes: Mapping[str, Layouts]) -> dict[str, MachineParts]:
        """Return the parts of the machines of these nodes; a machine is placed at its first use.

        Raises `GpuprofError` when there is no cluster, it lacks the node, or the machine does not start.
        """
        machines = [await self.machine(node) for node in nodes]
        parts = {}
        for machine in machines:
            try:
                parts[machine.node] = await asyncio.wait_for(find_machine_parts(machine, nodes[machine.node]), _COME_S)
            except TimeoutError:
                raise UnavailableError(
                    f"Ray has not started the machine of node {machine.node!r} within {_COME_S:g} s",
                    "is its resource taken by another server? see ray status",
                ) from None
        return parts

    async def machine(self, node: str) -> MachineLink:
        """Return the machine of a node; Ray places it at its first use.

        Raises `GpuprofError` when there is no cluster, or it lacks the node.
        """
        async with self._opening:
            if node not in self._machines:
                key = self._key = self._key or await self._join()
                actor = await asyncio.to_thread(self._place, node)
                link = self._machines[node] = MachineLink(node, self._rendezvous)
                link.on_moved = self.on_moved
                self._keeping.append(asyncio.ensure_future(self._keep(node, MachineOrder(node, key).to_json(), actor)))
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

    def _place(self, node: str) -> Any:
        """Return an actor on the Ray node that stands for a node of the map.

        Raises `UnavailableError` when the cluster lacks the node.
        """
        nodes = self._ray.nodes()
        options = find_placement(node, nodes)
        if options is None:
            resources = sorted({name for item in nodes if item["Alive"] for name in item["Resources"]})
            names = [name for name in resources if name.startswith(RESOURCE)] or ["none"]
            raise UnavailableError(
                f"the Ray cluster has no node for {node!r} of the map (it has {', '.join(names)})",
                f"""ray start --resources '{{"{RESOURCE}:{node}": 1}}' on it, or --labels {LABEL}={node}""",
            )
        actor = self._ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, **options)(RayMachine)
        return actor.remote()

    async def _keep(self, node: str, order: str, actor: Any) -> None:
        """Place a machine again that ended although Ray restarts its actor, until the engine closes."""
        while True:
            reason = "it lost the router"
            try:
                await actor.serve.remote(order)
            except Exception as error:  # any cause of the actor's end is only reported
                reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
            if self._is_closing:
                return
            LOGGER.warning("machine ended, is placed again", extra={"machine": node, "why": reason})
            await asyncio.sleep(_RETRY_S)
            await asyncio.to_thread(self._ray.kill, actor)  # it holds the resource of the node
            with suppress(UnavailableError):  # the next attempt fails at once, and looks for the node again
                actor = await asyncio.to_thread(self._place, node)


def find_placement(node: str, nodes: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the options with which Ray places an actor on a node of a map; None when the cluster lacks the node.

    The options select the Ray node with the custom resource ``gpuprof:NODE`` or the label ``gpuprof.node=NODE``;
    without such a node, any node with the resource ``gpuprof``, as a substitute. ``node``: name in the map;
    ``nodes``: as ``ray.nodes()`` describes them.
    """
    live_nodes = [entry for entry in nodes if entry["Alive"]]
    resource = f"{RESOURCE}:{node}"
    if any(resource in entry["Resources"] for entry in live_nodes):
        return {"resources": {resource: 1}}
    if any(entry.get("Labels", {}).get(LABEL) == node for entry in live_nodes):
        return {"label_selector": {LABEL: node}}
    if any(RESOURCE in entry["Resources"] for entry in live_nodes):
        return {"resources": {RESOURCE: 1}}
    return None
