"""The machine process under Ray: an actor, which Ray starts again when it dies, elsewhere when its node does."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from gpuprof.serving.machine.machine import MachineOrder, MachineProcess


class RayMachine:
    """Keeps the workers of a node of a map; see `gpuprof.serving.machine.machine.Machine`."""

    def serve(self, order: str) -> str:
        """Keep workers until the router has gone; Ray calls this again in an actor that takes the place of this one.

        ``order``: as `MachineOrder.to_json` writes it.

        Returns
        -------
        str
            The node of the map.
        """
        # Ray hides the GPUs from actors that ask it for none; workers are given theirs by UUID.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        told = MachineOrder.from_json(order)
        asyncio.run(MachineProcess(told).run())
        return told.node


def placement(node: str, nodes: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the options that make Ray place an actor where a node of a map is; None when the cluster lacks it.

    Ray's node that has the custom resource ``gpuprof:NODE`` or the label ``gpuprof.node=NODE`` is meant; when there is
    none, any that has the resource ``gpuprof``: such nodes stand in for whichever is missing. ``node``: name in the
    map; ``nodes``: as ``ray.nodes()`` describes them.
    """
    living = [one for one in nodes if one["Alive"]]
    resource = f"{RESOURCE}:{node}"
    if any(resource in one["Resources"] for one in living):
        return {"resources": {resource: 1}}
    if any(one.get("Labels", {}).get(LABEL) == node for one in living):
        return {"label_selector": {LABEL: node}}
    if any(RESOURCE in one["Resources"] for one in living):
        return {"resources": {RESOURCE: 1}}
    return None


RESOURCE = "gpuprof"
LABEL = "gpuprof.node"
