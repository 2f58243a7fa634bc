"""The measurements that ParvaGPU's authors published (MunQ-Lee/ParvaGPU_SC24), as an estimator and six scenarios."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError

_PROFILE = {1: "1g.10gb", 2: "2g.20gb", 3: "3g.40gb", 4: "4g.40gb", 7: "7g.80gb"}


@dataclass(frozen=True)
class ProfileTable:
    """Answers what was measured and nothing else.

    Attributes
    ----------
    latency_ms : dict of Workload to float
        Time of one batch in one of the processes: batch over the throughput of one process, which the tables know
        to more digits than the latency that they round to 1 ms.
    """

    latency_ms: dict[Workload, float]

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the measurement; MIG instances do not disturb one another."""
        workload = Workload(model, batch, share, processes)
        if workload not in self.latency_ms:
            raise InputError(f"{model} was not measured at batch {batch} with {processes} processes on {share}")
        return Estimate(workload, device.name, Figure(self.latency_ms[workload], MEASURED))

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batch sizes measured."""
        return self._index[model].get(share, ())

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the instances measured."""
        return tuple(sorted(self._index[model], key=device.fraction))

    @cached_property
    def _index(self) -> dict[str, dict[Share, tuple[int, ...]]]:
        sizes: dict[str, dict[Share, set[int]]] = {}
        for workload in self.latency_ms:
            sizes.setdefault(workload.model, {}).setdefault(workload.share, set()).add(workload.batch)
        return {m: {share: tuple(sorted(found)) for share, found in shares.items()} for m, shares in sizes.items()}


def read_profiles(directory: Path, copies: int = 1) -> ProfileTable:
    """Read every profile; with ``copies`` each model also under the names ``model#1`` …"""
    latency_ms = {}
    for model in model_names(directory):
        for row in csv.reader((directory / f"{model}.csv").read_text().splitlines()[1:]):
            size, batch, processes = (int(cell) for cell in row[:3])
            if float(row[3]) > 0.0:  # 0,0 marks what did not fit the memory
                share = Share(100.0, _PROFILE[size])
                for copy in range(copies):
                    latency_ms[Workload(_named(model, copy), batch, share, processes)] = 1000.0 * batch / float(row[3])
    return ProfileTable(latency_ms)


def model_names(directory: Path) -> list[str]:
    """Return the models in alphabetical order, the order of the scenarios' columns."""
    return sorted(path.stem for path in directory.glob("*.csv") if not path.stem.startswith("SLO"))


def scenario(directory: Path, number: int, copies: int = 1) -> tuple[Demand, ...]:
    """Return the demands of scenario S1 … S6 (Table IV), every service ``copies`` times."""
    rates, limits = (
        (directory / f"SLO_{name}.csv").read_text().splitlines()[number - 1].split(",")
        for name in ("req_rate", "latency")
    )
    return tuple(
        Demand(_named(model, copy), float(rate), Slo(float(limit)))
        for copy in range(copies)
        for model, rate, limit in zip(model_names(directory), rates, limits, strict=True)
        if rate != "N/A"
    )


def _named(model: str, copy: int) -> str:
    return model if copy == 0 else f"{model}#{copy}"
