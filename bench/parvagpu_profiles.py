"""The measurements that ParvaGPU's authors published (MunQ-Lee/ParvaGPU_SC24), and six scenarios."""

from __future__ import annotations

import csv
from pathlib import Path

from bench.published_measurements import published_estimator
from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.estimate import Estimator, Workload
from gpuprof.domain.share import Share

_PROFILE = {1: "1g.10gb", 2: "2g.20gb", 3: "3g.40gb", 4: "4g.40gb", 7: "7g.80gb"}


def read_profiles(directory: Path, copies: int = 1) -> Estimator:
    """Return what ``--estimator measured`` says of every profile; with ``copies`` also of services ``model#1`` …"""
    return published_estimator("measured", directory, name_copies(directory, copies))


def name_copies(directory: Path, copies: int) -> dict[str, str]:
    """Return the services of so many tenants, and their models."""
    return {_name_copy(model, copy): model for model in model_names(directory) for copy in range(copies)}


def read_latencies(directory: Path) -> dict[Workload, float]:
    """Return the time of one batch in one of the processes: batch over the throughput of one process.

    The tables know the throughput to more digits than the latency, which they round to 1 ms.
    """
    latency_ms = {}
    for model in model_names(directory):
        for row in csv.reader((directory / f"{model}.csv").read_text().splitlines()[1:]):
            size, batch, processes = (int(cell) for cell in row[:3])
            if float(row[3]) > 0.0:  # 0,0 marks what did not fit the memory
                workload = Workload(model, batch, Share(100.0, _PROFILE[size]), processes)
                latency_ms[workload] = 1000.0 * batch / float(row[3])
    return latency_ms


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
        Demand(_name_copy(model, copy), float(rate), Slo(float(limit)))
        for copy in range(copies)
        for model, rate, limit in zip(model_names(directory), rates, limits, strict=True)
        if rate != "N/A"
    )


def _name_copy(model: str, copy: int) -> str:
    return model if copy == 0 else f"{model}#{copy}"
