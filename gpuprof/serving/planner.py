"""Reads deployment maps and plans their workers: the same way at the start, for ``gpuprof apply``, and when a machine
is replaced by another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.deployment import DeploymentMap, read_map
from gpuprof.serving.machine_parts import MachineParts
from gpuprof.serving.serving_plan import PlannedReplica, needs_machine, plan_workers


@dataclass(frozen=True, slots=True)
class MapSource:
    """A map, and the directory in which its model files are looked for first."""

    deployment: DeploymentMap
    base: Path

    @classmethod
    def read(cls, path: Path) -> MapSource:
        """Read the map at ``path``.

        Raises
        ------
        InputError
            As `gpuprof.deployment.read_map`.
        """
        return cls(read_map(path), path.absolute().parent)


@dataclass(frozen=True, slots=True)
class Planner:
    """How the workers of maps are planned.

    Attributes
    ----------
    group : str
        Prefix of the control groups' names, unique to this server.
    node : str or None
        Which node of the map this machine is; None: the only one.
    simulated : bool
        Whether nothing is computed.
    shadow_pct : float
        How much more of its device a standby has; 0: no standbys.
    cluster : bool
        Whether the map's nodes are machines of a cluster.
    """

    group: str
    node: str | None = None
    simulated: bool = False
    shadow_pct: float = 0.0
    cluster: bool = False

    def nodes(self, source: MapSource) -> list[str]:
        """Return the nodes of a map whose machines must be there before its workers can be planned."""
        if not self.cluster:
            return []
        return [node.name for node in source.deployment.nodes if needs_machine(node, self.simulated)]

    def plan(self, source: MapSource, parts: Mapping[str, MachineParts]) -> Sequence[PlannedReplica]:
        """Return the workers of a map.

        Parameters
        ----------
        source : MapSource
        parts : mapping of str to MachineParts
            What the machines of `nodes` have.

        Raises
        ------
        GpuprofError
            As `gpuprof.serving.serving_plan.plan_workers`.
        """
        return plan_workers(
            source.deployment,
            source.base,
            self.group,
            self.node,
            simulated=self.simulated,
            shadow_pct=self.shadow_pct,
            parts=parts if self.cluster else None,
        )
