"""Brings the estimator into a simulation: ``gpuprof simulate --interference``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.domain.device import Device
    from gpuprof.domain.estimate import Estimator
    from gpuprof.simulator.cluster import PlacedInstance
    from gpuprof.simulator.interference import Interference


def make_interference(deployment: DeploymentMap, db: Path | None, estimator: str | None = None) -> Interference:
    """Return an estimator's interference of batches: the time beside some neighbours over the time beside all.

    The default estimator is used unless another is named. Raises `InputError` when there is neither a database nor the
    models' files, or a device of the map is unknown.
    """
    from gpuprof.estimators.builtin import DEFAULT
    from gpuprof.pipeline.recorded_problem import restore_problem

    problem = restore_problem(deployment, db, estimator=estimator or DEFAULT)
    return over_all_neighbours(problem.estimator, {one.device.name: one.device for one in problem.fleet.entries})


def over_all_neighbours(estimator: Estimator, devices: dict[str, Device]) -> Interference:
    """Return the ratio of a batch's times: beside some neighbours over beside all neighbours of its partition.

    Both times come from the estimator. For replicas that take turns, they are times of a turn: the simulator adds the
    waits.
    """
    from gpuprof.placement.map_workloads import ask_estimator, neighbour_workloads, replica_workload
    from gpuprof.rules.turns import without_turn_mates

    def ask(place: PlacedInstance, beside: Sequence[PlacedInstance]) -> float:
        own = replica_workload(place.partition, place.replica, place.replica.batch)
        others = neighbour_workloads(place.partition, place.replica)
        running = [replica_workload(one.partition, one.replica, one.replica.batch) for one in beside]
        some, every = (
            ask_estimator(estimator, devices[place.gpu.device], own, without_turn_mates(own, group)).latency_ms.value
            for group in (running, others)
        )
        return some / every

    return ask
