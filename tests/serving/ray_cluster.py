"""A Ray cluster of several nodes on this machine, in a process of its own.

    python -m tests.serving.ray_cluster RESOURCE,RESOURCE ...

Each argument is a node after the first, which has nothing: the custom resources that it has, one of each. Prints the
address; then takes ``remove NUMBER`` and ``add RESOURCE,RESOURCE`` on its input, and ends with it.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class RayCluster:
    """The cluster that a process of its own runs."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self.address = address

    def do(self, command: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == "done"


@contextmanager
def ray_cluster(*nodes: str) -> Iterator[RayCluster]:
    command = [sys.executable, "-m", "tests.serving.ray_cluster", *nodes]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, "the cluster does not start"
            yield RayCluster(process, address)
        finally:
            process.stdin.close()
            process.wait(timeout=60)


def main(nodes: list[str]) -> None:
    make: Any = import_module("ray.cluster_utils").Cluster
    small = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = make(initialize_head=True, head_node_args={**small, "num_cpus": 0})
    added: list[Any] = [cluster.add_node(wait=False, **small, resources=_resources(node)) for node in nodes]
    cluster.wait_for_nodes(timeout=120)
    print(cluster.address, flush=True)  # noqa: T201 - this is what it is asked for
    for line in sys.stdin:
        verb, what = line.split()
        if verb == "remove":
            cluster.remove_node(added[int(what)], allow_graceful=False)
        else:
            added.append(cluster.add_node(wait=False, **small, resources=_resources(what)))
        print("done", flush=True)  # noqa: T201
    cluster.shutdown()


def _resources(names: str) -> dict[str, float]:
    return dict.fromkeys(names.split(","), 1.0)


if __name__ == "__main__":
    main(sys.argv[1:])
