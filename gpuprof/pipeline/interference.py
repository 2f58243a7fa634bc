"""Brings the estimator into a simulation: ``gpuprof simulate --interference``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.domain.device import Device
    from gpuprof.domain.estimate import Estimator, Workload
    from gpuprof.simulator.cluster import PlacedInstance
    from gpuprof.simulator.interference import Interference


def make_interference(deployment: DeploymentMap, db: Path | None, estimator: str | None = None) -> Interference:
    """Return what an estimator, the default one unless named, says of batches beside some neighbours, over beside all.

    Raises `InputError` when there is neither a database nor the models' files, or a device of the map is not known.
    """
    from gpuprof.estimators.builtin import DEFAULT
    from gpuprof.pipeline.recorded_problem import restore_problem

    problem = restore_problem(deployment, db, estimator=estimator or DEFAULT)
    return over_all_neighbours(problem.estimator, {one.device.name: one.device for one in problem.fleet.entries})


def over_all_neighbours(estimator: Estimator, devices: dict[str, Device]) -> Interference:
    """Return the time of a batch beside some neighbours over that beside all of its partition, by an estimator."""

    def ask(place: PlacedInstance, beside: Sequence[PlacedInstance]) -> float:
        others = [_workload(place, i) for i, one in enumerate(place.partition.replicas) if one is not place.replica]
        running = [_workload(other, other.partition.replicas.index(other.replica)) for other in beside]
        return _batch_ms(estimator, devices, place, running) / _batch_ms(estimator, devices, place, others)

    return ask


def _workload(place: PlacedInstance, position: int) -> Workload:
    from gpuprof.domain.deployment import share_of
    from gpuprof.domain.estimate import Workload

    replica = place.partition.replicas[position]
    return Workload(replica.model, replica.batch, share_of(place.partition, replica), replica.processes)


def _batch_ms(
    estimator: Estimator, devices: dict[str, Device], place: PlacedInstance, beside: Sequence[Workload]
) -> float:
    own = _workload(place, place.partition.replicas.index(place.replica))
    device = devices[place.gpu.device]
    said = estimator.estimate(own.model, device, own.batch, own.share, sorted(beside), own.processes)
    return said.latency_ms.value
