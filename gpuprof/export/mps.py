"""NVIDIA's MPS, protocol version 3: a map as the configuration file of each node's control daemon.

The daemon (``nvidia-cuda-mps-control -d -p 3 -a FILE``) has a server for each GPU or MIG instance, and in the server a
namespace with a share and a memory limit for each worker process. A client enters a namespace by its pipe directory,
``PIPE/SERVER/NAMESPACE``. The keys are those of NVIDIA's documentation, "MPS v3 Configuration File".
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuprof.domain.deployment import DeploymentMap, Node, Partition, Replica
from gpuprof.errors import InputError
from gpuprof.export.bundle import Bundle, UniqueNames, fill_text, is_cpu, slug

_HEAD = """\
# Shares of {node}: nvidia-cuda-mps-control -d -p 3 -a {node}.toml
# To be replaced: each UUID-OF-… by the UUID that `nvidia-smi -L` prints.
schema_version = "1.0"
"""


def mps(deployment: DeploymentMap) -> Bundle:
    """Return ``NODE.toml`` for each node with GPUs, and a README with the pipe directory of each worker process.

    Raises `InputError` when the map has no GPU.
    """
    bundle, rows, names = Bundle(), list[str](), UniqueNames()
    for node in deployment.nodes:
        if all(is_cpu(gpu) for gpu in node.gpus):
            continue
        name = names.add(slug(node.name))
        tables = [_HEAD.format(node=name)]
        for server, device, partition in _list_servers(node):
            tables.append(f'[servers.{server}]\nallowed_devices = "UUID-OF-{device}"\n')
            namespaces = UniqueNames()
            for replicas in _list_workers(partition):
                first = replicas[0]
                models = ", ".join(replica.model for replica in replicas)
                for _ in range(first.processes):
                    namespace = namespaces.add(slug(first.model))
                    tables.append(f"[servers.{server}.namespaces.{namespace}]\n{_write_limits(partition, replicas)}")
                    rows.append(f"| {name} | {server} | {models} | PIPE/{server}/{namespace} |")
        bundle.files[f"{name}.toml"] = "\n".join(tables)
    if not rows:
        raise InputError("the map has no GPU that MPS could share", "export it to triton or json")
    bundle.files["README.md"] = fill_text("mps.md", rows="\n".join(rows))
    return bundle


def _list_servers(node: Node) -> Iterator[tuple[str, str, Partition]]:
    """Yield the name of each server, its GPU or MIG instance in words, and the partition."""
    for gpu in (gpu for gpu in node.gpus if not is_cpu(gpu)):
        for partition in gpu.partitions:
            if partition.mig is None:
                yield f"gpu{gpu.index}", f"GPU-{gpu.index}", partition
            else:
                name = f"gpu{gpu.index}-slot{partition.mig.start}"
                yield name, f"MIG-{partition.mig.profile}-AT-{partition.mig.start}-OF-GPU-{gpu.index}", partition


def _list_workers(partition: Partition) -> Iterator[list[Replica]]:
    """Yield the replicas of each worker: a single one, or all that take the same turns."""
    workers: dict[tuple[int, int], list[Replica]] = {}
    for number, replica in enumerate(partition.replicas):
        workers.setdefault((replica.turns, 0 if replica.turns else number), []).append(replica)
    yield from workers.values()


def _write_limits(partition: Partition, replicas: list[Replica]) -> str:
    """Return the settings of a process's namespace: its share of the SMs, and its limit of device memory."""
    first = replicas[0]
    percentage = 100.0 if partition.unshared else first.sm_share_pct / first.processes
    text = f'active_thread_percentage = "{percentage:g}"\n'
    limits = [replica.memory_limit_bytes for replica in replicas]
    if all(limits):
        text += f'pinned_memory_limit = "{-(-sum(limit or 0 for limit in limits) // 2**20)}M"\n'
    return text
