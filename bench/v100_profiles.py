"""The profiles of 13 models on a V100 that Elvinger's thesis publishes, which ship with gpuprof."""

from __future__ import annotations

import csv
import tomllib
from dataclasses import dataclass
from functools import cache

from gpuprof.domain.catalogue import datasets


@dataclass(frozen=True, slots=True)
class PublishedProfile:
    """Published measurements of a model at one batch size, alone on a device; None where unknown."""

    model: str
    batch: int
    latency_ms: float | None  #: Of one batch.
    throughput_rps: float | None  #: Requests a second.
    memory_pct: float | None  #: Memory held, percent of the device's.
    #: ``max_occupancy_pct``, ``wavg_occupancy_pct``, ``wavg_sm_util_pct``: The three Creq metrics: the most of
    #: overlapping kernels, its time-weighted average (WAO), and the time-weighted SM utilisation (WSM).
    max_occupancy_pct: float | None
    wavg_occupancy_pct: float | None
    wavg_sm_util_pct: float | None


@dataclass(frozen=True, slots=True)
class PublishedProfiles:
    """A published table of profiles."""

    device: str  #: Name in the catalogue.
    #: ``runtime``, ``source``: What the models ran in, and where the figures stand.
    runtime: str
    source: str
    rows: tuple[PublishedProfile, ...]


@cache
def v100_profiles() -> PublishedProfiles:
    """Return the profiles of 13 models on a V100 that Elvinger's thesis publishes (2024, tables 5.2, 6.5 and A.1)."""
    with (datasets() / "v100_profiles.toml").open("rb") as file:
        origin = tomllib.load(file)
    with (datasets() / "v100_profiles.csv").open(encoding="utf-8") as file:
        rows = tuple(_parse_profile(row) for row in csv.DictReader(file))
    source = f"{origin['author']}, {origin['publication']}, tables {', '.join(origin['tables'])}, {origin['link']}"
    return PublishedProfiles(origin["device"], origin["runtime"], source, rows)


def _parse_profile(row: dict[str, str]) -> PublishedProfile:
    def number(column: str) -> float | None:
        return float(row[column]) if row[column] else None

    latency_s = number("latency_s")
    return PublishedProfile(
        model=row["model"],
        batch=int(row["batch"]),
        latency_ms=None if latency_s is None else round(latency_s * 1000.0, 6),  # the digits that were published
        throughput_rps=number("throughput_rps"),
        memory_pct=number("mem_capacity_pct"),
        max_occupancy_pct=number("achieved_occupancy_pct"),
        wavg_occupancy_pct=number("weighted_achieved_occupancy_pct"),
        wavg_sm_util_pct=number("weighted_sm_utilization_pct"),
    )
