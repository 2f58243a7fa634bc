"""Figures of deployment maps: placement of the replicas, and cost of each policy's map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpuprof.domain.catalogue import devices as catalogued
from gpuprof.domain.deployment import DeploymentMap, Gpu, Partition
from gpuprof.domain.device import Device
from gpuprof.domain.plural import count_of
from gpuprof.reporting.chart import LINE, Axis, Box, Chart, group_bars
from gpuprof.reporting.number import show_number
from gpuprof.reporting.palette import shade_of

_MOST_GPUS = 48
_GAP = 0.15  # percent of a device between neighbours


def map_figure(
    deployment: DeploymentMap,
    devices: Mapping[str, Device] | None = None,
    *,
    title: str = "",
    models: Sequence[str] | None = None,
) -> Chart:
    """Return the map as a picture: a bar for each GPU, its partitions and replicas as wide as their shares.

    ``devices``: devices by name, otherwise taken from the catalogue; ``title``: by default the policy's name;
    ``models``: models in the order of their colours, common to several maps; by default the map's own.

    Returns
    -------
    Chart
        A MIG instance stands at its memory slices. Where the slices of a device are unknown, a note says so and all its
        instances have the same width.
    """
    colors = list(models if models is not None else deployment.models)
    has_instances = any(partition.mig is not None for _, _, partition, _ in deployment.places())
    gpus = [(f"{node.name}/{gpu.index}", gpu) for node in deployment.nodes for gpu in node.gpus]
    by_name = {**catalogued(), **(devices or {})}
    boxes = [
        box for row, (name, gpu) in enumerate(gpus[:_MOST_GPUS]) for box in _draw_gpu(row, name, gpu, by_name, colors)
    ]
    return Chart(
        title or f"Deployment map of {deployment.policy}",
        Axis("% of the device (MIG: of its memory slices)", low=0.0, high=100.0),
        Axis("GPU", names=tuple(f"{name} {gpu.device}" for name, gpu in gpus[:_MOST_GPUS]), is_downwards=True),
        boxes=tuple(boxes),
        note=" ".join(_describe(gpus, by_name)),
        height=max(3 * LINE, LINE * (3 if has_instances else 2) * min(len(gpus), _MOST_GPUS)),
    )


def _describe(gpus: Sequence[tuple[str, Gpu]], devices: Mapping[str, Device]) -> Iterator[str]:
    if len(gpus) > _MOST_GPUS:
        yield f"The first {_MOST_GPUS} of {len(gpus)} GPUs."
    unknown = {gpu.device for _, gpu in gpus for partition in gpu.partitions if _slots(partition, gpu, devices) is None}
    if unknown:
        yield f"The MIG slices of {', '.join(sorted(unknown))} are not known: instances are drawn equally wide."


def _draw_gpu(row: int, name: str, gpu: Gpu, devices: Mapping[str, Device], models: Sequence[str]) -> Iterator[Box]:
    low, high = row - 0.4, row + 0.4
    yield Box("", 0.0, 100.0, low, high, f"{name} ({gpu.device})", 0, has_frame=True)
    for index, partition in enumerate(gpu.partitions):
        slots = _slots(partition, gpu, devices)
        at, width = slots or (100.0 * index / len(gpu.partitions), 100.0 / len(gpu.partitions))
        instance = "" if partition.mig is None else f" in {partition.mig.profile} at {partition.mig.start}"
        top = low
        if partition.mig is not None:
            label = "" if partition.replicas else partition.mig.profile
            tip = f"{name} ({gpu.device}){instance}"
            yield Box("", at, at + width, low, high, tip, 0, label, has_frame=True)
            if partition.replicas:
                top = low + 0.3
                yield Box("", at + _GAP, at + width - _GAP, low, top, tip, 0, partition.mig.profile, strip=True)
        for replica in partition.replicas:
            mates = sum(bool(replica.turns) and r.turns == replica.turns for r in partition.replicas)
            share_width = width * replica.sm_share_pct / 100.0 / max(1, mates)
            part = width / len(partition.replicas) if partition.unshared else share_width
            share = "no share" if partition.unshared else f"{replica.sm_share_pct:g}% share"
            share += f" of worker {replica.turns}" if replica.turns else ""
            color = models.index(replica.model) if replica.model in models else len(models)
            label = f"{replica.model} b{replica.batch}" + (f"×{replica.processes}" if replica.processes > 1 else "")
            tip = (
                f"{name} ({gpu.device}): {replica.model}{instance}, {share}, "
                f"batch {replica.batch}, {count_of(replica.processes, 'process')}, "
                f"{show_number(replica.rate_rps)} requests/s, "
                f"batch times {replica.predicted.source or 'of unknown source'}"
            )
            yield Box(replica.model, at + _GAP, at + part - _GAP, top, high, tip, color, label, shade_of(color))
            at += part


def _slots(partition: Partition, gpu: Gpu, devices: Mapping[str, Device]) -> tuple[float, float] | None:
    """Return the start and the width of a partition, in percent; None where the device's slices are unknown."""
    if partition.mig is None:
        return 0.0, 100.0
    device = devices.get(gpu.device)
    if device is None or not device.mig_slices:
        return None
    slices = device.mig_profile(partition.mig.profile).memory_slices
    return 100.0 * partition.mig.start / device.mig_slices, 100.0 * slices / device.mig_slices


def cost_figure(maps: Mapping[str, DeploymentMap]) -> Chart:
    """Return the cost of maps by policy: dollars an hour where all have a price, else devices."""
    names = tuple(maps)
    costs = [deployment.predicted.cost_per_hour for deployment in maps.values()]
    title, unit, values = "Cost by policy", "US dollars per hour", costs
    if None in costs:
        title, unit = "Devices by policy", "devices"
        values = [float(deployment.predicted.gpus) for deployment in maps.values()]
    return Chart(title, Axis("map", names=names), Axis(unit, low=0.0), boxes=group_bars(names, {unit: values}, unit))
