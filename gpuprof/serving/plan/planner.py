"""Reads deployment maps and plans their workers.

Planning is the same at the start, for ``gpuprof apply``, and when a machine is replaced by another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.map_file import read_map
from gpuprof.serving.machine.machine_parts import MachineParts
from gpuprof.serving.plan.serving_plan import PlannedReplica, chosen_node, mig_layouts, needs_machine, plan_workers


@dataclass(frozen=True, slots=True)
class MapSource:
    """A map, and the directory searched first for its model files."""

    deployment: DeploymentMap
    base: Path

    @classmethod
    def read_map(cls, path: Path) -> MapSource:
        """Read the map at ``path``. Raises `InputError` as `gpuprof.domain.map_file.read_map` does."""
        return cls(read_map(path), path.absolute().parent)


@dataclass(frozen=True, slots=True)
class Planner:
    """Parameters for planning the workers of maps."""

    group: str  #: Prefix of the control groups' names, unique to this server.
    node: str | None = None  #: This machine's node in the map; None: the only node.
    simulated: bool = False  #: True if workers are simulated and compute nothing.
    shadow_pct: float = 0.0  #: Additional percent of its device for a standby; 0: no standbys.
    cluster: bool = False  #: True if the map's nodes are machines of a cluster.
    apply_mig: bool = False  #: True if GPUs are partitioned into the MIG instances of the map.
    allow_changed: bool = False  #: True if model files may differ from the planned files.

    def nodes(self, source: MapSource) -> dict[str, dict[str, list[tuple[str, int]]]]:
        """Return the nodes of a map whose machines must be connected before its workers can be planned.

        Raises `InputError` when this machine's node in the map is ambiguous.

        Returns
        -------
        dict of str to dict of str to list of (str, int)
            By node and number of the GPU, the MIG instances to create: none unless ``apply_mig``.
        """
        if self.cluster:
            nodes = [node for node in source.deployment.nodes if needs_machine(node, self.simulated)]
        elif self.apply_mig and not self.simulated:
            nodes = [chosen_node(source.deployment, self.node)]
        else:
            return {}
        return {node.name: mig_layouts(node) if self.apply_mig else {} for node in nodes}

    def plan(self, source: MapSource, parts: Mapping[str, MachineParts]) -> Sequence[PlannedReplica]:
        """Return the workers of a map.

        Raises `GpuprofError` as `gpuprof.serving.plan.serving_plan.plan_workers` does. ``parts``: the parts of the
        machines of `nodes`.
        """
        return plan_workers(
            source.deployment,
            source.base,
            self.group,
            None if self.cluster else self.node,
            simulated=self.simulated,
            shadow_pct=self.shadow_pct,
            parts=parts if self.cluster or parts else None,
            allow_changed=self.allow_changed,
        )
