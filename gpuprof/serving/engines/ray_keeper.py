"""The process that talks to Ray, so that Ray's threads and memory stay out of the router.

python -m gpuprof.serving.engines.ray_keeper ADDRESS

Reads a line of JSON for each machine to keep, and ends the machines at the end of the input. Writes a line of JSON
for each event that concerns the router.
"""

from __future__ import annotations

import json
import os
import select
import sys
from dataclasses import dataclass
from typing import Any

from gpuprof.errors import UnavailableError
from gpuprof.machine.ray_cluster import join_cluster
from gpuprof.serving.engines.ray_machine import LABEL, RESOURCE, RayMachine, placement

_LOOK_S = 0.5
_END_S = 15.0


@dataclass(slots=True)
class _PlacedMachine:
    order: str
    actor: Any
    serving: Any


class RayKeeper:
    """Keeps an actor for each machine."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._kept: dict[str, _PlacedMachine] = {}

    def keep(self, node: str, order: str) -> None:
        """Place the machine of a map's node through Ray, and place it again whenever it dies."""
        options = placement(node, self._ray.nodes())
        if options is None:
            resources = sorted({name for item in self._ray.nodes() if item["Alive"] for name in item["Resources"]})
            nodes = [name for name in resources if name.startswith(RESOURCE)] or ["none"]
            message = f"the Ray cluster has no node for {node!r} of the map (it has {', '.join(nodes)})"
            fix = f"""ray start --resources '{{"{RESOURCE}:{node}": 1}}' on it, or --labels {LABEL}={node}"""
            say({"node": node, "error": message, "fix": fix})
            return
        actor_class = self._ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, **options)(RayMachine)
        actor = actor_class.remote()
        self._kept[node] = _PlacedMachine(order, actor, actor.serve.remote(order))
        say({"node": node, "placed": True})

    def replace_lost_machines(self) -> None:
        """Place machines again after Ray has given them up."""
        for node, item in list(self._kept.items()):
            ended, _ = self._ray.wait([item.serving], timeout=0)
            if ended:
                say({"node": node, "log": f"machine ended, is placed again: {self._describe_failure(item)}"})
                self._ray.kill(item.actor)
                del self._kept[node]
                self.keep(node, item.order)

    def end(self) -> None:
        """Wait until the machines have restored their GPUs, then end them."""
        if self._kept:
            self._ray.wait([item.serving for item in self._kept.values()], num_returns=len(self._kept), timeout=_END_S)
        for item in self._kept.values():
            self._ray.kill(item.actor)

    def _describe_failure(self, item: _PlacedMachine) -> str:
        try:
            self._ray.get(item.serving)
        except Exception as error:  # any cause of the actor's death is only reported
            return str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__
        return "the router was not there"


def main(arguments: list[str]) -> int:
    """Keep machines until the input ends."""
    try:
        ray = join_cluster(arguments[0])
    except UnavailableError as error:
        say({"error": error.message, "fix": error.fix})
        return 1
    keeper = RayKeeper(ray)
    say({"joined": True, "host": ray.util.get_node_ip_address()})
    pending = b""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], _LOOK_S)
        if readable:
            # From the descriptor: select does not see data buffered by the file object.
            piece = os.read(sys.stdin.fileno(), 1 << 16)
            if not piece:
                break
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                order = json.loads(line)
                keeper.keep(order["node"], order["order"])
        keeper.replace_lost_machines()
    keeper.end()
    ray.shutdown()
    return 0


def say(message: dict[str, Any]) -> None:
    """Send the router a message."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
