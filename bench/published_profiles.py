"""The V100 profiles that Elvinger's thesis published, as an estimator."""

from __future__ import annotations

from collections.abc import Sequence

from gpuprof.domain.catalogue import PublishedProfile, device, v100_profiles
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError


class PublishedEstimator:
    """Answers what the table holds: a model that needs no more compute than its share is as quick as alone.

    That is USHER's premise, and the thesis shows where it fails; there is no interference in the table.
    """

    def __init__(self) -> None:
        self._rows = {(row.model, row.batch): row for row in v100_profiles().rows if row.throughput_rps is not None}

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the row of the table; goodput is batch over latency."""
        row = self._rows.get((model, batch))
        if row is None or row.throughput_rps is None or processes > 1:
            raise InputError(f"{model} was not measured at batch {batch} with {processes} processes")
        memory = None if row.memory_pct is None else Figure(row.memory_pct / 100.0 * device.dram_bytes, MEASURED)
        return Estimate(
            workload=Workload(model, batch, share, processes),
            device=device.name,
            latency_ms=Figure(1000.0 * batch / row.throughput_rps, MEASURED),
            memory_bytes=memory,
            creq_pct=_creq(row),
        )

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes measured."""
        return tuple(sorted(batch for name, batch in self._rows if name == model))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the whole device, which is all that was measured."""
        return (Share(),)


def v100() -> Device:
    """Return the device of the table."""
    return device(v100_profiles().device)


def _creq(row: PublishedProfile) -> tuple[tuple[str, Figure], ...]:
    known = {
        "max_occupancy": row.max_occupancy_pct,
        "wavg_occupancy": row.wavg_occupancy_pct,
        "wavg_sm_util": row.wavg_sm_util_pct,
    }
    return tuple((metric, Figure(value, MEASURED)) for metric, value in known.items() if value is not None)
