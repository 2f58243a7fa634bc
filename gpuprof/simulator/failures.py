"""Injected failures: a GPU or a whole node fails at a given time and may recover."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.duration import parse_duration
from gpuprof.errors import InputError, unknown_name

_FORM = re.compile(r"(?P<node>[^/@]+)(?:/(?P<gpu>\d+))?@(?P<at>[^+]+)(?:\+(?P<lasts>.+))?")


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of a GPU or a node."""

    node: str
    gpu: int | None  #: Index of the GPU; None: the whole node.
    at_s: float
    lasts_s: float | None = None  #: Duration; None: no recovery.


def parse_failure(text: str, deployment: DeploymentMap) -> Failure:
    """Read ``node0@30s``, ``node0/1@30s`` or ``node0/1@30s+10s``: GPU 1 of node0 fails for ten seconds.

    Raises `InputError` for another form, or a node or GPU absent from the map.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise InputError(f"cannot read the failure {text!r}", "write node0@30s, node0/1@30s or node0/1@30s+10s")
    nodes = {node.name: node for node in deployment.nodes}
    if match["node"] not in nodes:
        raise unknown_name("node", match["node"], sorted(nodes))
    gpu = None if match["gpu"] is None else int(match["gpu"])
    indices = [entry.index for entry in nodes[match["node"]].gpus]
    if gpu is not None and gpu not in indices:
        raise InputError(
            f"{match['node']} has no GPU {gpu}", f"it has {', '.join(map(str, sorted(indices))) or 'none'}"
        )
    at_s = parse_duration(match["at"], "the time of a failure")
    lasts_s = None if match["lasts"] is None else parse_duration(match["lasts"], "the length of a failure")
    return Failure(match["node"], gpu, at_s, lasts_s)
