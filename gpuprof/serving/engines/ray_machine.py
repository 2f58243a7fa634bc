"""The machine process under Ray: an actor, which Ray restarts when it dies, elsewhere when its node does."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from gpuprof.serving.machine.machine import MachineOrder, MachineProcess


class RayMachine:
    """Keeps the workers of a node of a map; see `gpuprof.serving.machine.machine.Machine`."""

    def serve(self, order: str) -> str:
        """Keep workers until the router has gone; Ray calls this again in the actor's successor.

        ``order``: written by `MachineOrder.to_json`.

        Returns
        -------
        str
            The node of the map.
        """
        # Ray hides the GPUs from actors that request none; workers get theirs by UUID.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        machine_order = MachineOrder.from_json(order)
        asyncio.run(MachineProcess(machine_order).run())
        return machine_order.node


def placement(node: str, nodes: list[dict[str, Any]]) -> dict[str, Any] | None:
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


RESOURCE = "gpuprof"
LABEL = "gpuprof.node"
