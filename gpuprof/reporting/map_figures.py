"""Figures of deployment maps: which replica stands where, and what each policy's map costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuprof.domain.deployment import DeploymentMap, Gpu, Partition
from gpuprof.reporting.chart import Axis, Box, Chart, side_by_side

#: Memory slices that a MIG geometry is drawn in.
_SLICES = 8
_MOST_GPUS = 48


def map_figure(deployment: DeploymentMap) -> Chart:
    """Return the map as a picture: a bar for each GPU, its partitions and replicas as wide as their shares."""
    models = [*deployment.models, *deployment.merges]
    gpus = [(f"{node.name}/{gpu.index}", gpu) for node in deployment.nodes for gpu in node.gpus]
    boxes = [box for row, (name, gpu) in enumerate(gpus[:_MOST_GPUS]) for box in _gpu(row, name, gpu, models)]
    note = "" if len(gpus) <= _MOST_GPUS else f"The first {_MOST_GPUS} of {len(gpus)} GPUs."
    return Chart(
        f"Deployment map of {deployment.policy}",
        Axis("part of the device in %", low=0.0, high=100.0),
        Axis("GPU", names=tuple(name for name, _ in gpus[:_MOST_GPUS])),
        boxes=tuple(boxes),
        note=note,
        height=max(60, 30 * min(len(gpus), _MOST_GPUS)),
    )


def _gpu(row: int, name: str, gpu: Gpu, models: Sequence[str]) -> list[Box]:
    boxes = []
    for partition in gpu.partitions:
        at, width = _extent(partition)
        for replica in partition.replicas:
            part = width * replica.sm_share_pct / 100.0
            mig = "" if partition.mig is None else f" in {partition.mig.profile} at {partition.mig.start}"
            tip = (
                f"{name} ({gpu.device}): {replica.model}{mig}, {replica.sm_share_pct:g}% share, batch {replica.batch}, "
                f"{replica.processes} process(es), {replica.rate_rps:.4g} requests/s"
            )
            label = f"{replica.model} b{replica.batch}" + (f"×{replica.processes}" if replica.processes > 1 else "")
            color = models.index(replica.model) if replica.model in models else len(models)
            boxes.append(Box(replica.model, at + 0.15, at + part - 0.15, row - 0.4, row + 0.4, tip, color, label))
            at += part
    return boxes


def _extent(partition: Partition) -> tuple[float, float]:
    """Return where a partition begins and how wide it is, in percent; a MIG instance by its memory slices."""
    if partition.mig is None:
        return 0.0, 100.0
    compute = int(partition.mig.profile.split("g", 1)[0])
    # From the profile's name alone: 3g takes 4 memory slices, 7g all 8, the others as many as compute slices.
    slices = {3: 4, 7: 8}.get(compute, compute)
    return 100.0 * partition.mig.start / _SLICES, 100.0 * slices / _SLICES


def cost_figure(maps: Mapping[str, DeploymentMap]) -> Chart:
    """Return the cost of maps by policy: dollars an hour where all have a price, else devices."""
    names = tuple(maps)
    costs = [deployment.predicted.cost_per_hour for deployment in maps.values()]
    if all(cost is not None for cost in costs):
        return _bars("Cost by policy", names, "US dollars per hour", costs)
    return _bars("Devices by policy", names, "devices", [float(one.predicted.gpus) for one in maps.values()])


def _bars(title: str, names: tuple[str, ...], unit: str, values: Sequence[float | None]) -> Chart:
    return Chart(
        title,
        Axis("map", names=names),
        Axis(unit, low=0.0),
        boxes=side_by_side(names, {unit: values}, unit),
        height=200,
    )
