"""What merging a part of the graphs is worth: time saved and added, from FLOPs, bytes and launches.

Running an op once for n models reads its weights once instead of n times and launches one kernel instead of n.
Against that stand the copies that lay inputs end to end and take results apart again, for a Super-Operator its cuts
and sums, and that the values of all models together are larger: what the caches held between two ops of one model,
they may not hold for all. Multiplications are as many as before.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuprof.domain.device import Device


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a device is."""

    #: ``flops_per_s``, ``bytes_per_s``: Of float32 arithmetic, and of memory.
    flops_per_s: float
    bytes_per_s: float
    launch_s: float  #: What an op costs beside its work.
    cache_bytes: float = float(2**25)  #: Of the last level.
    #: Whether convolutions keep images in a layout of their own, which other ops must leave and enter by copies: so
    #: ONNX Runtime on CPUs.
    blocked_images: bool = True

    def moved_bytes(self, nbytes: float, working_bytes: float) -> float:
        """Return how many bytes memory moves when an op touches ``nbytes`` while ``working_bytes`` are in use.

        The part of the last cache that is the op's own is taken as half of it; what is in use beyond that misses. The
        change is gradual, as caches of several levels and sets make it.
        """
        return nbytes * working_bytes / (working_bytes + 0.5 * self.cache_bytes) if nbytes else 0.0

    def copied_bytes(self, nbytes: float) -> float:
        """Return how many bytes copying ``nbytes`` is worth: read, fetched to be written, and written.

        What the caches hold moves about four times as fast as what they do not.
        """
        traffic = 3.0 * nbytes
        return traffic / 4.0 + self.moved_bytes(traffic, 2.0 * nbytes)


#: A middling server core count and memory: used where no device is given.
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
    """What merging some steps saves and adds at one call with every model present."""

    #: ``saved_bytes``, ``added_bytes``: Weights read less often; copies, and what caches no longer hold.
    saved_bytes: int = 0
    added_bytes: int = 0
    saved_launches: int = 0
    added_launches: int = 0
    added_flops: int = 0  #: Sums that put results together.
    #: Seconds that measurements of the ops say they save, of those that have any; nothing else counts these.
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
        """Return the time saved, negative where merging costs time."""
        moved = (self.saved_bytes - self.added_bytes) / rates.bytes_per_s
        launched = (self.saved_launches - self.added_launches) * rates.launch_s
        return moved + launched - self.added_flops / rates.flops_per_s + self.measured_s
