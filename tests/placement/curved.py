"""An estimator that is not linear: shares and batches pay less and less, and neighbours disturb by what they take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import INTERPOLATED, MEASURED, Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class CurvedEstimator:
    """A batch of n under a fraction f takes start + each · n^bend / f^yields ms, times the number of processes.

    Every model called ``m<i>`` is ``1 + spread · i`` times as slow, so that no two are alike.

    Attributes
    ----------
    start_ms, each_ms, bend, yields, spread : float
    weight_mib, request_mib : int
        Memory of one process: the weights, and what each request of its batch adds.
    disturbance : float
        A neighbour with fraction g and batch k slows a model down by this times g · log2(1 + k).
    sizes : tuple of int
        Batches that are listed; any other is answered as well, unless ``gaps`` is False.
    percents : tuple of float
        Shares of the whole device that are listed.
    interval : float
        Half width of the 90% interval, relative.
    """

    start_ms: float = 1.0
    each_ms: float = 1.0
    bend: float = 0.8
    yields: float = 0.7
    spread: float = 0.3
    weight_mib: int = 500
    request_mib: int = 20
    disturbance: float = 0.0
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    gaps: bool = True
    percents: tuple[float, ...] = (20.0, 40.0, 60.0, 80.0, 100.0)
    interval: float = 0.1

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time of the formula."""
        if batch not in self.sizes and not self.gaps:
            raise InputError(f"{model} was not measured at batch {batch}")
        slower = 1.0 + self.spread * int(model[1:] or 0)
        alone = self.start_ms + slower * self.each_ms * batch**self.bend / device.fraction(share) ** self.yields
        taken = math.fsum(device.fraction(neighbour.share) * math.log2(1 + neighbour.batch) for neighbour in beside)
        time = alone * processes * (1.0 + self.disturbance * taken)
        return Estimate(
            workload=Workload(model, batch, share, processes),
            device=device.name,
            latency_ms=Figure(time, INTERPOLATED, time / (1 + self.interval), time * (1 + self.interval)),
            memory_bytes=Figure(float(_MIB * (self.weight_mib + batch * self.request_mib)), MEASURED),
            creq_pct=(("max_occupancy", Figure(min(100.0, 7.0 + 6.0 * batch), MEASURED)),),
        )

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the sizes that are listed."""
        return self.sizes

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the percentages, and the MIG profiles of the device."""
        mig = [Share(100.0, profile.name) for profile in device.mig_profiles]
        return tuple(sorted([*mig, *map(Share, self.percents)], key=lambda share: (device.fraction(share), str(share))))
