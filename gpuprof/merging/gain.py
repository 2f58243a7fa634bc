"""The gain of merging a part of the graphs: time saved and added, from FLOPs, bytes and launches.

Running an op once for n models reads its weights once instead of n times and launches a single kernel instead of n.
The costs are copies that concatenate inputs and split results, the cuts and sums of a Super-Operator, and cache misses:
values that fit into the caches for a single model may not fit for all models together. The number of multiplications
stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuprof.domain.device import Device


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of a device."""

    #: ``flops_per_s``, ``bytes_per_s``: Float32 arithmetic, and memory bandwidth.
    flops_per_s: float
    bytes_per_s: float
    launch_s: float  #: Overhead of launching an op.
    cache_bytes: float = float(2**25)  #: Size of the last-level cache.
    #: Whether convolutions keep images in a special layout, so that other ops need copies to and from it, as in ONNX
    #: Runtime on CPUs.
    blocked_images: bool = True

    def moved_bytes(self, nbytes: float, working_bytes: float) -> float:
        """Return the bytes moved from memory when an op touches ``nbytes`` while ``working_bytes`` are in use.

        The op is assumed to own half of the last-level cache; accesses beyond miss. The transition is gradual, as with
        caches of several levels and sets.
        """
        return nbytes * working_bytes / (working_bytes + 0.5 * self.cache_bytes) if nbytes else 0.0

    def copied_bytes(self, nbytes: float) -> float:
        """Return the memory traffic equivalent to copying ``nbytes``: read, fetched before writing, and written.

        Cached data move about four times as fast as uncached data.
        """
        traffic = 3.0 * nbytes
        return traffic / 4.0 + self.moved_bytes(traffic, 2.0 * nbytes)


#: A medium server CPU, the default if no device is given.
TYPICAL_CPU = Rates(flops_per_s=2e11, bytes_per_s=2e10, launch_s=5e-6)


def device_rates(device: Device) -> Rates:
    """Return the rates of a device from its peaks."""
    return Rates(
        device.flops_per_s["float32"],
        device.dram_bytes_per_s,
        max(device.launch_overhead_us, 2.0) * 1e-6,
        float(device.l2_bytes),
        device.kind == "cpu",
    )


@dataclass(frozen=True, slots=True)
class MergeGain:
    """Savings and costs of merging steps, in a call with every model present."""

    #: ``saved_bytes``, ``added_bytes``: Weights read less often; copies and additional cache misses.
    saved_bytes: int = 0
    added_bytes: int = 0
    saved_launches: int = 0
    added_launches: int = 0
    added_flops: int = 0  #: Sums that combine results.
    #: Seconds saved by the ops with measurements; no other field includes them.
    measured_s: float = 0.0

    def __add__(self, other: MergeGain) -> MergeGain:
        return MergeGain(
            self.saved_bytes + other.saved_bytes,
            self.added_bytes + other.added_bytes,
            self.saved_launches + other.saved_launches,
            self.added_launches + other.added_launches,
            self.added_flops + other.added_flops,
            self.measured_s + other.measured_s,
        )

    def seconds(self, rates: Rates) -> float:
        """Return the time saved; negative if merging costs time."""
        moved = (self.saved_bytes - self.added_bytes) / rates.bytes_per_s
        launched = (self.saved_launches - self.added_launches) * rates.launch_s
        return moved + launched - self.added_flops / rates.flops_per_s + self.measured_s
