"""The V100 of Elvinger's thesis (ETH, 2024, Table A.1) under shares: what its profiles say of any batch and share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from bench.published_measurements import v100
from gpuprof.domain.catalogue import v100_profiles
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError

_SOURCE = "interpolated"


class SharedV100:
    """Time of a batch under a share by MPS, from the time alone and the SMs that the model keeps busy (WSM).

    Between the sizes measured, time and WSM are interpolated; batches below the smallest measured take as long as it.
    A share that is smaller than the SMs that a batch keeps busy stretches its time by the ratio of the two; one that is
    larger costs nothing. The thesis measures worse: resnet50 (batch 4, WSM 36%) under 17.55% takes four times as long
    (§6.2.1), bert (batch 4, WSM 97%) under 31.83% five times (§6.2.2), where this says two and three times. What runs
    beside costs nothing here, which the thesis's table does not hold.

    Other GPUs than the V100 are as much quicker or slower as their float32 peaks: a stand-in for profiles of them.

    Parameters
    ----------
    step_pct : float
        Shares that are offered are multiples of this.
    """

    def __init__(self, step_pct: float = 2.5) -> None:
        self._step_pct = step_pct
        self._v100 = v100()
        known: defaultdict[str, dict[int, tuple[float, float, float]]] = defaultdict(dict)
        for row in v100_profiles().rows:
            if row.throughput_rps is not None and row.wavg_sm_util_pct is not None:
                memory = row.memory_pct or 0.0
                known[row.model][row.batch] = (1000.0 * row.batch / row.throughput_rps, row.wavg_sm_util_pct, memory)
        self._known = dict(known)

    def latency_ms(self, model: str, batch: int, share_pct: float = 100.0) -> float:
        """Return the time of a batch under a share.

        Raises
        ------
        InputError
            For a model or a batch beyond those measured.
        """
        time, busy_pct, _ = self._at(model, batch)
        return time * max(1.0, busy_pct / share_pct)

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time and the memory, whatever runs beside."""
        if processes > 1 or share.mig is not None:
            raise InputError(f"{model} was not measured with {processes} processes on {share}")
        memory = self._at(model, batch)[2] / 100.0 * self._v100.dram_bytes
        ratio = self._v100.flops_per_s["float32"] / device.flops_per_s["float32"]
        return Estimate(
            workload=Workload(model, batch, share),
            device=device.name,
            latency_ms=Figure(ratio * self.latency_ms(model, batch, share.sm_pct), _SOURCE),
            memory_bytes=Figure(memory, _SOURCE),
        )

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes measured."""
        return tuple(sorted(self._known.get(model, {})))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the multiples of the step."""
        return tuple(Share(self._step_pct * n) for n in range(1, round(100.0 / self._step_pct) + 1))

    def _at(self, model: str, batch: int) -> tuple[float, float, float]:
        """Return time, WSM and memory of a batch alone on the whole device."""
        sizes = self._known.get(model, {})
        if not sizes or batch > max(sizes):
            raise InputError(f"{model} was not measured at batch {batch}")
        above = min(size for size in sizes if size >= batch)
        below = max((size for size in sizes if size <= batch), default=above)
        weight = (batch - below) / (above - below) if above > below else 0.0
        low, high = sizes[below], sizes[above]
        return (
            low[0] + weight * (high[0] - low[0]),
            low[1] + weight * (high[1] - low[1]),
            low[2] + weight * (high[2] - low[2]),
        )
