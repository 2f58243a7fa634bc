"""Distance of a GPU from the GPUs of the training data.

Intervals hold for GPUs about as far from the others as each held-out GPU was. A GPU further off by a factor in an SM's
work per cycle, or in the number of SMs, is known less well by that factor: time goes at most in proportion to a rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        value, low, high = (f"{x:,.0f}" if x >= 10.0 else f"{x:.2g}" for x in (self.value, self.low, self.high))
        return f"{value} {self.trait}, learned from {low} to {high}"


def measure_distance(device: Device, precision: str) -> Distance | None:
    """Return the trait by which a GPU is furthest outside the training data; None inside.
    ``precision``: of products.
    """
    ranges, outside = _list_ranges(precision), []
    for trait, value in _list_traits(device, precision).items():
        if trait in ranges:
            low, high, usual = ranges[trait]
            outside.append(Distance(trait, value, low, high, _exceed(value, value, low, high) / usual))
    furthest = max(outside, key=lambda distance: distance.factor, default=None)
    return furthest if furthest is not None and furthest.factor > 1.0 else None


def describe_distance(device: Device, precision: str) -> str | None:
    """Return in words the distance of a GPU from the training data; None where intervals hardly show it."""
    most = measure_distance(device, precision)
    if most is None or most.factor < _WORTH_TELLING:
        return None
    return f"{device.name} is unlike the GPUs learned from ({most}): intervals reach {most.factor:.3g} times as far"


def _exceed(least: float, most: float, low: float, high: float) -> float:
    """Return the factor by which a range reaches beyond ``low`` or ``high``; at most 1 inside."""
    return max(low / least, most / high)


def _span(values: Iterable[Sequence[float]]) -> tuple[float, float]:
    joined = [value for series in values for value in series]
    return min(joined), max(joined)


@cache
def _list_ranges(precision: str) -> Mapping[str, tuple[float, float, float]]:
    """Return for each trait its range over all chips, and the largest factor by which a chip is beyond the others."""
    values: dict[str, dict[str, list[float]]] = {}
    for chip, boards in LEARNED_FROM.items():
        for board in boards:
            for trait, value in _list_traits(devices()[board], precision).items():
                values.setdefault(trait, {}).setdefault(chip, []).append(value)
    ranges = {}
    for trait, chips in values.items():
        if len(chips) > 1:  # a single chip gives no distance between GPUs
            factors = (
                _exceed(min(numbers), max(numbers), *_span(series for name, series in chips.items() if name != chip))
                for chip, numbers in chips.items()
            )
            ranges[trait] = (*_span(chips.values()), max(1.0, *factors))
    return ranges


def _list_traits(device: Device, precision: str) -> dict[str, float]:
    traits = {
        "SMs": float(device.compute_units),
        "of the peak in float32 left by the power limit": sustained_part(device, "float32"),
    }
    if not device.clock_mhz:
        return traits
    cycles = device.compute_units * device.clock_mhz * 1e6
    traits |= {
        "MHz": float(device.clock_mhz),
        "float32 operations a cycle and SM": device.flops_per_s["float32"] / cycles,
        "bytes of memory a cycle and SM": device.dram_bytes_per_s / cycles,
        "KiB of L2 cache an SM": device.l2_bytes / device.compute_units / 1024,
    }
    if precision in TENSOR_TYPES and precision in device.flops_per_s:
        traits[f"{precision} operations a cycle and SM"] = device.flops_per_s[precision] / cycles
    return traits
