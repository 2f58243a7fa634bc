"""Distance of a GPU from the GPUs of the training data.

Intervals hold for GPUs about as far from the others as each held-out GPU was. A GPU further off by a factor in an SM's
work per cycle, or in the number of SMs, is known less well by that factor: time goes at most in proportion to a rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from gpuprof.domain.catalogue import devices
from gpuprof.domain.device import Device
from gpuprof.estimators.cross_gpu.rates import TENSOR_TYPES, sustained_part

#: Chip → its boards in the published ops; a chip is held out with all its boards.
LEARNED_FROM: Mapping[str, tuple[str, ...]] = {
    "p4": ("p4",),
    "p100": ("p100",),
    "t4": ("t4",),
    "v100": ("v100-pcie-32",),
    "a100": ("a100-pcie-40", "a100-pcie-80", "a100-80"),
    "h100": ("h100",),
    "l40s": ("l40s",),
}
_WORTH_TELLING = 1.25


@dataclass(frozen=True, slots=True)
class Distance:
    """The trait by which a GPU is furthest outside the training data."""

    trait: str  #: In words, with its unit.
    #: ``value``, ``low``, ``high``: The trait of the GPU, and its range over the training data.
    value: float
    low: float
    high: float
    factor: float  #: Above 1: distance beyond the range over the largest distance of a chip beyond the others.

    def __str__(self) -> str:
        """Return the trait and its range in words."""
        value, low, high = (f"{one:,.0f}" if one >= 10.0 else f"{one:.2g}" for one in (self.value, self.low, self.high))
        return f"{value} {self.trait}, learned from {low} to {high}"


def measure_distance(device: Device, precision: str) -> Distance | None:
    """Return the trait by which a GPU is furthest outside the training data; None inside.
    ``precision``: of products.
    """
    own = dict(_traits(device, precision))
    found = [one for name, value in own.items() if (one := _compare(name, value, precision)) is not None]
    return max(found, key=lambda one: one.factor, default=None)


def describe_distance(device: Device, precision: str) -> str | None:
    """Return in words the distance of a GPU from the training data; None where intervals hardly show it."""
    most = measure_distance(device, precision)
    if most is None or most.factor < _WORTH_TELLING:
        return None
    return f"{device.name} is unlike the GPUs learned from ({most}): intervals reach {most.factor:.3g} times as far"


def _compare(trait: str, value: float, precision: str) -> Distance | None:
    known = _whole_range(trait, precision)
    if known is None:
        return None
    low, high, usual = known
    factor = max(low / value, value / high) / usual
    return Distance(trait, value, low, high, factor) if factor > 1.0 else None


@cache
def _whole_range(trait: str, precision: str) -> tuple[float, float, float] | None:
    """Return the least and the largest over all chips, and the largest factor by which a chip is beyond the others."""
    ranges = _ranges(precision).get(trait, {})
    if len(ranges) < 2:  # a single chip gives no distance between GPUs
        return None
    low, high = min(one for one, _ in ranges.values()), max(one for _, one in ranges.values())
    usual = 1.0
    for chip, (least, most) in ranges.items():
        others = [pair for name, pair in ranges.items() if name != chip]
        usual = max(usual, min(one for one, _ in others) / least, most / max(one for _, one in others))
    return low, high, usual


@cache
def _ranges(precision: str) -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """Return for each trait and chip the least and the largest of the chip's boards."""
    ranges_by_kind: dict[str, dict[str, tuple[float, float]]] = {}
    for chip, boards in LEARNED_FROM.items():
        for board in boards:
            for trait, value in _traits(devices()[board], precision):
                low, high = ranges_by_kind.setdefault(trait, {}).get(chip, (value, value))
                ranges_by_kind[trait][chip] = (min(low, value), max(high, value))
    return ranges_by_kind


def _traits(device: Device, precision: str) -> Iterator[tuple[str, float]]:
    yield "SMs", float(device.compute_units)
    yield "of the peak in float32 left by the power limit", sustained_part(device, "float32")
    if not device.clock_mhz:
        return
    cycles = device.compute_units * device.clock_mhz * 1e6
    yield "MHz", float(device.clock_mhz)
    yield "float32 operations a cycle and SM", device.flops_per_s["float32"] / cycles
    yield "bytes of memory a cycle and SM", device.dram_bytes_per_s / cycles
    yield "KiB of L2 cache an SM", device.l2_bytes / device.compute_units / 1024
    if precision in TENSOR_TYPES and precision in device.flops_per_s:
        yield f"{precision} operations a cycle and SM", device.flops_per_s[precision] / cycles
