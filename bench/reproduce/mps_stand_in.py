"""Shares by MPS where only MIG instances were measured: a stand-in for profiles that nobody published."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError

_SOURCE = "interpolated"
_STEP_PCT = 2.5


class MpsStandIn:
    """A process under x% runs as it would in x% of the slices of the largest instance.

    Its throughput is interpolated between the instances that were measured with one process, and below the smallest is
    proportional to the share; between batch sizes its time is. An instance keeps its memory and its L2 to itself,
    an MPS share does not: what runs beside costs nothing here, which favours the policies that share by MPS.
    """

    def __init__(self, latency_ms: Mapping[Workload, float]) -> None:
        self._latency_ms = latency_ms

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the interpolated time.

        Raises
        ------
        InputError
            For several processes, an instance, or a batch outside those measured.
        """
        if processes > 1 or share.mig is not None:
            raise InputError(f"{model}: shares by MPS are interpolated for one process on the whole device")
        sizes = self._by_batch.get(model, {})
        below = max((size for size in sizes if size <= batch), default=None)
        above = min((size for size in sizes if size >= batch), default=None)
        if below is None or above is None:
            raise InputError(f"{model} was not measured at batches about {batch}")
        slices = share.sm_pct / 100.0 * max(sizes[below])
        low, high = (_time_ms(size, sizes[size], slices) for size in (below, above))
        weight = (batch - below) / (above - below) if above > below else 0.0
        time = low + weight * (high - low)
        return Estimate(Workload(model, batch, share), device.name, Figure(time, _SOURCE))

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes measured on the largest instance."""
        return tuple(sorted(self._by_batch.get(model, {})))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the multiples of 2.5%."""
        return tuple(Share(_STEP_PCT * n) for n in range(1, round(100.0 / _STEP_PCT) + 1))

    @cached_property
    def _by_batch(self) -> dict[str, dict[int, dict[int, float]]]:
        """Return model → batch → slices → ms of one process, of the batches that the largest instance holds."""
        found: defaultdict[str, defaultdict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for workload, time in self._latency_ms.items():
            if workload.processes == 1:
                slices = int(str(workload.share.mig).partition("g")[0])
                found[workload.model][workload.batch][slices] = time
        most = {model: max(max(times) for times in batches.values()) for model, batches in found.items()}
        return {m: {b: t for b, t in batches.items() if most[m] in t} for m, batches in found.items()}


def _time_ms(batch: int, times: dict[int, float], slices: float) -> float:
    """Return the time of a batch in so many slices: throughput linear between what was measured, and from nothing."""
    rates = {0: 0.0, **{size: batch / ms for size, ms in sorted(times.items())}}
    low = max(size for size in rates if size < slices)
    high = min(size for size in rates if size >= slices - 1e-9)
    weight = (slices - low) / (high - low)
    return batch / (rates[low] + weight * (rates[high] - rates[low]))
